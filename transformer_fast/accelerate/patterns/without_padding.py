"""Hand-written layers on the tokens of a batch alone, where ``accelerate(model, packed=True)`` asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...carried import tokens_of, with_tokens
from ...layers.attention import layer_mask
from ...layers.dropout import KINDS as DROPOUTS
from ...layers.hooks import is_plain
from ...layers.linear import Linear
from ...masks import AttentionMask
from ...models.packed import target_padding
from ...packing import PackedMask, Packing, packing_of, take
from ...padded_calls import NO_SOURCE, NO_TOKEN, StaysPaddedError, padded_calls, record
from ...tracing import is_traced
from .attention import Heads, keep_mask
from .base import pattern_of
from .feed_forward import FeedForward

_PER_TOKEN = (
    nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Sequential, Linear, *DROPOUTS,
)  # fmt: skip
"""Modules that compute each token by itself."""


def through(m: nn.Module, x: Tensor, args: tuple[Any, ...], run: Callable[..., Tensor]) -> Tensor:
    """Run a layer or a stack of layers: ``run(x, *args)``, on tokens alone where it leaves padding out.

    Args:
        m: the layer or the stack.
        x: (B, L, d).
        args: (mask,) of an encoder, or (memory, src_mask, trg_mask) of a decoder, with keep masks.
    """
    calls = padded_calls(m)
    if calls is None or torch.compiler.is_compiling() or is_traced() or type(x) is not Tensor or x.dim() != 3:
        return run(x, *args)
    try:
        packed = _packed(m, x, args)
    except (StaysPaddedError, ValueError, TypeError) as reason:
        calls.add(str(reason))
        record(m, x.shape[0] * x.shape[1], None, str(reason))
        return run(x, *args)
    if packed is None:
        return run(x, *args)
    own, tokens_args = packed
    record(m, own.batch * own.length, own.total)
    return with_tokens(run(tokens_of(x, own).unsqueeze(0), *tokens_args).squeeze(0), own)


def _packed(m: nn.Module, x: Tensor, args: tuple[Any, ...]) -> tuple[Packing, tuple[Any, ...]] | None:
    """How x is packed, and the arguments that go with its tokens; None where nothing is padding."""
    *memory, mask = (arg if n == 0 and len(args) > 1 else layer_mask(keep_mask(arg)) for n, arg in enumerate(args))
    if any(given is not None and not isinstance(given, AttentionMask) for given in (*memory[1:], mask)):
        return None
    if not memory:
        own = packing_of(mask, *x.shape[:2], x.device)
        if own.is_full:
            return None
        if bool((own.cu_seqlens.diff() == 0).any()):  # a decoder may attend to such a row
            raise StaysPaddedError(NO_SOURCE)
        packed_args: tuple[Any, ...] = (PackedMask(own, own),)
    else:
        encoded, src_mask = memory
        padding, causal = target_padding(mask, x.shape[1])
        own, source = packing_of(padding, *x.shape[:2], x.device), packing_of(src_mask, *encoded.shape[:2], x.device)
        if own.is_full and source.is_full:
            return None
        if bool(((source.cu_seqlens.diff() == 0) & (own.cu_seqlens.diff() > 0)).any()):
            raise StaysPaddedError(NO_SOURCE)
        tokens = take(encoded, source).unsqueeze(0)
        packed_args = tokens, PackedMask(own, source), PackedMask(own, own, causal)
    if own.total == 0:
        raise StaysPaddedError(NO_TOKEN)
    _check_parts(m)
    return own, packed_args


def _check_parts(m: nn.Module) -> None:
    for layer in m._modules.get("layers") or (m,):  # type: ignore[attr-defined]
        for name, child in layer.named_modules():
            pattern = pattern_of(child)
            if not is_plain(child) and child is not layer:
                raise StaysPaddedError(f"a {type(child).__name__} inside a layer has a hook")
            if isinstance(pattern, Heads):
                if not pattern.fits(child):
                    raise StaysPaddedError(f"a {type(child).__name__} has a part of another kind")
            elif name in ("ff", "feed_forward"):
                inside = child.modules() if pattern is None else child.children()
                if not (
                    (pattern is None or isinstance(pattern, FeedForward))
                    and all(type(part) in _PER_TOKEN for part in inside)
                ):
                    raise StaysPaddedError(f"its {type(child).__name__} may read several positions")
