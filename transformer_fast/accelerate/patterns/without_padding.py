"""Hand-written layers computed without padding, for ``accelerate(model, packed=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.carried import tokens_of, with_tokens
from ...layers.dropout import KINDS as DROPOUTS
from ...layers.hooks import is_plain
from ...layers.linear import Linear
from ...layers.padded_calls import (
    NO_SOURCE,
    NO_TOKEN,
    StaysPaddedError,
    check_sources,
    layers_of,
    padded_calls,
    record,
    stays_padded,
)
from ...masks.packing import PackedMask, Packing, packing_of, take
from ...models.packed import packed_masks, padding_of
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
    try:
        packed = _packed(m, x, args, normal)
    except (StaysPaddedError, ValueError, TypeError) as reason:
        stays_padded(m, calls, x, reason)
        return run(x, *args)
    if packed is None:
        return run(x, *args)
    own, tokens_args = packed
    record(m, own.batch * own.length, own.total)
    result = run(tokens_of(x, own).unsqueeze(0), *tokens_args)
    if isinstance(result, tuple):
        return with_tokens(result[0].squeeze(0), own), *result[1:]
    return with_tokens(result.squeeze(0), own)


def _packed(
    m: nn.Module, x: Tensor, args: tuple[Any, ...], normal: Callable[[Any], Any]
) -> tuple[Packing, tuple[Any, ...]] | None:
    """Packing of x, and the arguments for packed tokens; None if there is no padding."""
    if any(isinstance(arg, PackedMask) for arg in args):  # a layer inside a stack that is packed already
        return None
    memory, masks = args[:-2], map(normal, args[-2:])
    own, packed_args = _packed_decoder_arguments(x, *memory, *masks) if memory else _packed_encoder_arguments(x, *masks)
    if all(mask.queries.is_full and mask.keys.is_full for mask in packed_args if isinstance(mask, PackedMask)):
        return None
    if own.total == 0:
        raise StaysPaddedError(NO_TOKEN)
    _check_parts(m)
    return own, packed_args


def _packed_encoder_arguments(x: Tensor, mask: Any = None) -> tuple[Packing, tuple[Any, ...]]:
    own = packing_of(padding_of(mask, x.shape[1]), *x.shape[:2], x.device)
    if bool((own.cu_seqlens.diff() == 0).any()):  # a decoder may attend to a sequence without tokens
        raise StaysPaddedError(NO_SOURCE)
    return own, (PackedMask(own, own),)


def _packed_decoder_arguments(
    x: Tensor, memory: Tensor, src_mask: Any, trg_mask: Any
) -> tuple[Packing, tuple[Any, ...]]:
    _, cross, own = packed_masks(memory[..., 0], x[..., 0], src_mask, trg_mask)
    check_sources(cross)
    return own.queries, (take(memory, cross.keys).unsqueeze(0), cross, own)


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
