"""Masks: :class:`AttentionMask` and its parts, biases by distance, and packed batches."""

from .distance import Alibi, DistanceBias, Relative
from .mask import AttentionMask, and_causal, as_attention_mask
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
