"""Hand-written layers computed without padding, for ``accelerate(model, packed=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.dropout import KINDS as DROPOUTS
from ...layers.hooks import is_plain
from ...layers.linear import Linear
from ...layers.padded_calls import StaysPaddedError, layers_of, padded_calls
from ...layers.padder import Padder, without_padding
from ...masks.packing import PackedMask, packing_of
from ...models.packed import padder_of, padding_of
from ...tracing import is_traced
from .attention import CLASSIC
from .base import ANY, pattern_of
from .feed_forward import FeedForward

_PER_TOKEN = (
    nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Sequential, Linear, *DROPOUTS,
)  # fmt: skip
"""Modules that work token by token."""


def through(
    m: nn.Module,
    x: Tensor,
    args: tuple[Any, ...],
    run: Callable[..., Any],
    normal: Callable[[Any], Any] = CLASSIC.normal,
) -> Any:
    """Run a layer or a stack of layers: ``run(x, *args)``, on packed tokens if the module skips padding.

    Args:
        m: layer or stack.
        x: (B, L, d).
        args: (mask,) of an encoder, or (memory, src_mask, trg_mask) of a decoder.
        run: function that returns (B, L, d), or the tuple ((B, L, d), weights).
        normal: function that converts a mask to an AttentionMask or None.
    """
    calls = padded_calls(m)
    if calls is None or torch.compiler.is_compiling() or is_traced() or type(x) is not Tensor or x.dim() != 3:
        return run(x, *args)
    if any(isinstance(arg, PackedMask) for arg in args):  # a layer inside a stack that is packed already
        return run(x, *args)

    def prepare() -> tuple[Padder, Callable[[], Any]]:
        try:
            padder = _padder(x, args[:-2], list(map(normal, args[-2:])))
        except (ValueError, TypeError) as reason:
            raise StaysPaddedError(reason) from reason

        def run_on_tokens() -> Any:
            _check_parts(m)
            return run(*(t.unsqueeze(0) for t in padder.remove(x, *args[:-2])), *reversed(padder.masks))

        return padder, run_on_tokens

    result = without_padding(m, calls, x, prepare)
    return run(x, *args) if result is None else result


def _padder(x: Tensor, memory: tuple[Any, ...], masks: list[Any]) -> Padder:
    if memory:
        padder = padder_of(memory[0][..., 0], x[..., 0], *masks)
    else:
        padder = Padder(packing_of(padding_of(masks[0], x.shape[1]), *x.shape[:2], x.device))
    padder.check_sources()
    return padder


def _check_parts(m: nn.Module) -> None:
    for layer in layers_of(m):
        layer_pattern = pattern_of(layer)
        parts = {} if layer_pattern is None else layer_pattern.parts
        any_module = {name for name, part in parts.items() if part.is_one is ANY.is_one}
        for name, child in layer.named_modules():
            pattern = pattern_of(child)
            if not is_plain(child) and child is not m:
                raise StaysPaddedError(
                    f"a {type(child).__name__} inside a layer has a hook, which would see tokens without padding"
                )
            if pattern is not None and not pattern.fits(child):
                raise StaysPaddedError(f"a {type(child).__name__} has an unknown submodule")
            if name in any_module:
                inside = child.modules() if pattern is None else child.children()
                if not (
                    (pattern is None or isinstance(pattern, FeedForward))
                    and all(type(part) in _PER_TOKEN for part in inside)
                ):
                    raise StaysPaddedError(f"its {type(child).__name__} may read several positions")
