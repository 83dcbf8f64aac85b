"""Layers that remove the padding of their inputs and restore it in their outputs.

Between two layers a padded tensor is passed on, with the packed tokens stored on it; the next layer continues with the
tokens. So the rest of a model, its hooks and its checkpoints see padded shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.lazy_bias import LazyBias
from ...integrations.lazy_mask import LazyMask, PackedLazyMask
from ...integrations.transformers import weights_are_captured
from ...integrations.unpadded import Unpadded, current
from ...layers.padded_calls import GAPS, StaysPaddedError
from ...layers.padder import Padder, without_padding
from ...masks import AttentionMask
from ...masks.arguments import parts_beside
from ...masks.packing import Packing, take
from .classes import Arguments, Forward, part, positional_names

LAYER = "layer"
"""Name of this part."""

MASK, MEMORY, MEMORY_MASK = "attention_mask", "encoder_hidden_states", "encoder_attention_mask"
POSITIONS = ("position_ids", "position_embeddings")
CACHES = ("past_key_values", "cache", "past_key_value", "layer_past")
"""Names of a cache; that of transformers 5.24 is ``cache``."""
CACHED = "keys and values are cached (use_cache, past_key_values)"
"""Reason why a call keeps its padding."""
BIAS, MEMORY_BIAS = "position_bias", "encoder_decoder_position_bias"
_KNOWN = {MASK, MEMORY, MEMORY_MASK, BIAS, MEMORY_BIAS, *POSITIONS, *CACHES}


@part(LAYER)
def layer_forward(base: type[nn.Module]) -> Forward:
    """Make the ``forward`` of a transformers layer: hidden states first, masks and further arguments by name."""
    names = positional_names(base.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(names, args, kwargs)
        call = None if torch.compiler.is_compiling() or not arguments.fits else _call_of(arguments.given)
        if call is None or call.held_back:
            return base.forward(self, *args, **kwargs)

        def prepare() -> tuple[Padder, Callable[[], Any]] | None:
            if (found := _changes(self, names[0], arguments.given, call)) is None:
                return None
            tokens_args, tokens_kwargs = arguments.replaced(found[1])
            return found[0], lambda: base.forward(self, *tokens_args, **tokens_kwargs)

        result = without_padding(self, call, arguments.given[names[0]], prepare)
        return base.forward(self, *args, **kwargs) if result is None else result

    return forward


def _call_of(given: dict[str, Any]) -> Unpadded | None:
    """Call in which a layer's masks were made; None if its inputs keep their padding or have none."""
    masks = [given[name] for name in (MASK, MEMORY_MASK) if isinstance(given.get(name), LazyMask)]
    if any(isinstance(mask, PackedLazyMask) for mask in masks):
        return None
    return next((mask.call for mask in masks), None) or current()


def _changes(
    layer: nn.Module, hidden_name: str, given: dict[str, Any], call: Unpadded
) -> tuple[Padder, dict[str, Any]] | None:
    """Padder of a layer, and its inputs without padding by name; None if there is no padding.

    Raises:
        StaysPaddedError: if the layer must run with the padding.
    """
    hidden, mask, memory, memory_mask = given[hidden_name], given.get(MASK), given.get(MEMORY), given.get(MEMORY_MASK)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        return None
    (batch, length), device = hidden.shape[:2], hidden.device
    keep, bounds = _parts(mask, batch, length, length)
    memory_keep = None
    if memory is not None:
        memory_keep, more = _parts(memory_mask, batch, length, memory.shape[1])
        if more is not None:
            raise StaysPaddedError("its attention to the encoder has a mask that is not padding alone")
    if keep is None and memory_keep is None:
        return None
    _check_others(layer, hidden_name, given)
    own = call.packing(keep, batch, length, device, causal=bounds is not None and bounds.causal_offset == 0)
    source = None if memory is None else call.packing(memory_keep, batch, memory.shape[1], device, causal=None)
    if own is None or (source is None and memory is not None):
        return None
    window, biased = bounds is not None and bounds.window_offset is not None, BIAS in given
    if (own.has_gaps and (window or biased)) or (biased and source is not None and source.has_gaps):
        raise StaysPaddedError(GAPS)
    padder = Padder(own, source, window=bounds)
    kind = memory_mask.dtype if mask is None else mask.dtype
    by_layer = mask is None, False
    masks = (PackedLazyMask(packed, device, kind, left_out) for packed, left_out in zip(padder.masks, by_layer))
    tokens = (t.unsqueeze(0) for t in padder.remove(hidden, *[] if memory is None else [memory]))
    changes = dict(zip((hidden_name, MEMORY), tokens)) | dict(zip((MASK, MEMORY_MASK), masks))
    if source is not None:
        padder.check_sources()
        if MEMORY_BIAS in given and given[MEMORY_BIAS] is None:  # T5 would otherwise make a zero bias of size T x T
            changes[MEMORY_BIAS] = LazyBias(AttentionMask(), (1, 1, own.total, source.total), hidden)
    for name in POSITIONS:
        if given.get(name) is not None:
            changes[name] = _at_tokens(name, given[name], own)
    for name, keys in ((BIAS, own.total), (MEMORY_BIAS, 0 if source is None else source.total)):
        if given.get(name) is not None and tuple(given[name].shape[-2:]) != (own.total, keys):
            raise StaysPaddedError(f"its layers are given {name} with padding")
    return padder, changes


def _parts(mask: Any, batch: int, queries: int, keys: int) -> tuple[Tensor | None, AttentionMask | None]:
    """Padding of a mask, bool (B, Lk), and its causal and window parts; None for missing parts."""
    if mask is None:
        return None, None
    if not isinstance(mask, LazyMask):
        raise StaysPaddedError("its mask is a tensor, not padding, look-ahead or a window")
    parts = mask.mask
    others = parts_beside(parts, "key_keep_mask", "causal_offset", "window_offset")
    if others or tuple(mask.shape) != (batch, 1, queries, keys):
        raise StaysPaddedError("its mask was read as a tensor, or has not the sizes of the batch")
    keep = None if parts.key_keep_mask is None else parts.key_keep_mask[:, 0, 0].expand(batch, keys)
    if parts.causal_offset is None and parts.window_offset is None:
        return keep, None
    return keep, AttentionMask(causal_offset=parts.causal_offset, window_offset=parts.window_offset)


def _check_others(layer: nn.Module, hidden_name: str, given: dict[str, Any]) -> None:
    """Raise StaysPaddedError if a layer cannot run on packed tokens."""
    if given.get("output_attentions") or weights_are_captured():
        raise StaysPaddedError("attention weights are requested (output_attentions)")
    if has_cache(given):
        raise StaysPaddedError(CACHED)
    if (BIAS in given or MEMORY_BIAS in given) and getattr(layer, "gradient_checkpointing", False) and layer.training:
        raise StaysPaddedError("its gradient checkpointing passes on a position bias")
    for name, value in given.items():
        if name not in _KNOWN and name != hidden_name and _holds_tensors(value):
            raise StaysPaddedError(f"its layers are given {name}, whose layout is unknown")


def has_cache(given: dict[str, Any]) -> bool:
    """Return True for a call that is given a cache."""
    return any(given.get(name) is not None for name in CACHES)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    return isinstance(value, list | tuple) and any(map(_holds_tensors, value))


def _at_tokens(name: str, value: Any, packing: Packing) -> Any:
    """Pick the values (1 or B, L, ...) at tokens -> (1, T, ...)."""
    if isinstance(value, tuple):
        return tuple(_at_tokens(name, inner, packing) for inner in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != packing.length:
        raise StaysPaddedError(f"its layers are given {name} that is no tensor (B, L, ...)")
    if value.shape[0] == 1:
        return value[0].index_select(0, packing.positions).unsqueeze(0)
    if value.shape[0] != packing.batch:
        raise StaysPaddedError(f"its layers are given {name} of another batch size")
    return take(value, packing).unsqueeze(0)
