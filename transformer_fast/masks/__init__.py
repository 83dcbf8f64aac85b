"""Masks: :class:`AttentionMask` and its parts, biases by distance, and packed batches."""

from .arguments import and_causal, as_attention_mask
from .distance import Alibi, DistanceBias, Relative
from .mask import AttentionMask
from .packing import PackedMask, Packing, pack, packing_of, take, unpack

__all__ = [
    "Alibi",
    "AttentionMask",
    "DistanceBias",
    "PackedMask",
    "Packing",
    "Relative",
    "and_causal",
    "as_attention_mask",
    "pack",
    "packing_of",
    "take",
    "unpack",
]
