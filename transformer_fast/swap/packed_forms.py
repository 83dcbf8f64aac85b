"""Hand-written layers and stacks computed without padding, for ``accelerate(model, packed=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import hooks
from ..layers.dropout import KINDS as DROPOUTS
from ..layers.hooks import is_plain
from ..layers.linear import Linear
from ..layers.padded_calls import StaysPaddedError, layers_of, padded_calls
from ..layers.padder import Padder, without_padding
from ..layers.torch_modules import LayerNorm, RMSNorm
from ..masks.packing import PackedMask, packing_of
from ..models.packed import padder_of, padding_of
from .form import Form, any_module, form_of

_PER_TOKEN = (
    nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Sequential, Linear, *DROPOUTS,
    nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm,
)  # fmt: skip
"""Modules that work token by token."""
_NETWORKS = ("FeedForward", "AnnotatedFeedForward", "ActivatedFeedForward", "D2lFeedForward")


def run_without_padding(form: Form, m: nn.Module, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
    """Run a layer or a stack of layers, on packed tokens if the batch has padding.

    Args:
        form: form of the module.
        m: layer or stack.
        args: hidden states (B, L, d), and what follows: a mask, or for a decoder memory and masks.
        run: function (m, *args) that returns (B, L, d), or the tuple ((B, L, d), weights).
    """
    x, *inputs = args
    inputs = [*inputs, *[None] * 3][: 3 if form.decodes else 1]
    calls = padded_calls(m)
    if calls is None or torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() != 3:
        return run(m, *args)
    if any(isinstance(arg, PackedMask) for arg in inputs):  # a layer inside a stack that is packed already
        return run(m, *args)
    memory, masks = inputs[:-2], inputs[-2:]
    if form.swaps_masks:
        masks = masks[::-1]

    def prepare() -> tuple[Padder, Callable[[], Any]]:
        try:
            padder = _padder(x, memory, [form.normal(m, mask, x.shape[1]) for mask in masks])
        except (ValueError, TypeError) as reason:
            raise StaysPaddedError(reason) from reason

        def run_on_tokens() -> Any:
            _check_parts(m)
            tokens = (t.unsqueeze(0) for t in padder.remove(x, *memory))
            result = run(m, *tokens, *(padder.masks if form.swaps_masks else reversed(padder.masks)))
            if result is None:
                raise StaysPaddedError(f"a {type(m).__name__} runs its own forward")
            return result

        return padder, run_on_tokens

    result = without_padding(m, calls, x, prepare)
    return run(m, *args) if result is None else result


def _padder(x: Tensor, memory: list[Tensor], masks: list[Any]) -> Padder:
    if memory:
        padder = padder_of(memory[0][..., 0], x[..., 0], *masks)
    else:
        batch, length = x.shape[:2]
        padder = Padder(packing_of(padding_of(masks[0], length), batch, length, x.device))
    padder.check_sources()
    return padder


def _check_parts(m: nn.Module) -> None:
    for layer in layers_of(m):
        if form_of(layer) is None:
            raise StaysPaddedError(f"a {type(layer).__name__} has another class than when accelerate was called")
    for child in m.modules():
        form, kind = form_of(child), type(child).__name__
        if child is not m and not is_plain(child):
            raise StaysPaddedError(f"a {kind} inside a layer has a hook, which would see tokens without padding")
        if form is None or form.padding is None:
            continue
        for name, test in form.children.items():
            part = child._modules.get(name)
            if test is any_module and part is not None and not _works_per_token(part):
                raise StaysPaddedError(f"its {type(part).__name__} may read several positions")
            if part is None or not test(part):
                raise StaysPaddedError(f"a {kind} has an unknown submodule")


def _works_per_token(m: nn.Module) -> bool:
    form = form_of(m)
    if form is not None and form.name not in _NETWORKS:
        return hooks.TAKES_RESIDUAL in form.roles
    inside = m.modules() if form is None else m.children()
    return all(type(part) in _PER_TOKEN for part in inside)
