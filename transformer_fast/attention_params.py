"""Mask, scale and dropout of an attention call, as one value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(slots=True, eq=False)
class PackedBatch:
    """Boundaries of the sequences in a packed batch.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), rising from 0 to Tq and Tk. Sequence b has the queries and the keys
            from entry b to entry b + 1.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        seqused_k: int32 (B,), number of keys in use per sequence, counted from its first key; None for all.
        bias_starts: int64 (B + 1,), where the pairs of each sequence begin in the bias; None without a bias.
        bottom_right: align the last query of a sequence with its last key, for causal, window and distances.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_k: Tensor | None = None
    bias_starts: Tensor | None = None
    bottom_right: bool = False

    @property
    def query_lengths(self) -> Tensor:
        """Number of queries per sequence, int32 (B,)."""
        return self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]

    @property
    def stored_keys(self) -> Tensor:
        """Number of stored keys per sequence, int32 (B,)."""
        return self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]

    @property
    def key_lengths(self) -> Tensor:
        """Number of keys in use per sequence, int32 (B,)."""
        return self.stored_keys if self.seqused_k is None else self.seqused_k


@dataclass(slots=True, eq=False)
class CachedKeys:
    """Keys in use per sequence of a cache.

    Args:
        lengths: int32 (B,), with those of the new positions.
        page_table: int32 (B, pages of a sequence) for a cache of pages; None for a cache (B, Hkv, S, D).
    """

    lengths: Tensor
    page_table: Tensor | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionParams:
    """The arguments of attention beside q (B, H, Lq, D), k and v (B, Hkv, Lk, D).

    Args:
        keep: bool, broadcastable to (B, H, Lq, Lk), any strides; True = visible.
        key_keep: bool (B|1, H|1, 1, Lk), a second mask on keys alone.
        lengths: int32 (B,) or (B, Lq): keys at or past the length are blocked; 0 <= length <= Lk.
        bias: any float, broadcastable to (B, H, Lq, Lk), added to the scaled scores; -inf blocks. For a packed batch
            (H|1, pairs), contiguous: the (Lq, Lk) biases of the sequences, concatenated.
        distance_bias: fp32 or fp64 (B|1, H|1, Lq + Lk - 1), last stride 1, added to the scaled scores: query i and key
            j get entry Lq - 1 + j - i; -inf blocks. For a packed batch (1, H|1, max_seqlen_q + max_seqlen_k - 1), entry
            max_seqlen_q - 1 + j - i; with bottom_right, entry max_seqlen_k - 1 + j - (i + keys - queries of the
            sequence).
        query_ids, key_ids: int32 (B|1, Lq) and (B|1, Lk), last stride 1: query i sees the keys with its own id. For a
            packed batch (Tq,) and (Tk,). Both or neither.
        sinks: fp32 or fp64 (H,), contiguous: per head, the score of one additional key without a value.
        causal: query i sees keys j <= i + causal; None for no such bound.
        window: query i sees keys j >= i + window; None for no such bound.
        softcap: scaled scores s become softcap * tanh(s / softcap) before biases are added; None for no cap.
        scale: multiplies q k^T.
        dropout_p, seed: dropout on the weights; seed is int64 (1,) on q's device, an int, or None.
        zero_empty_rows: a query without visible keys gets 0 rather than the mean of v.
        packed: boundaries of the sequences in q (Tq, H, D), k and v (Tk, Hkv, D). Then keep, key_keep and lengths are
            None, and positions count within each sequence. None for a padded batch.
        cached: the keys in use of a cache, for the newest queries q (B, H, Lq, D). Then the mask is by position alone:
            causal and window count from the query's own key, and distance_bias has S = Lk: entry S - 1 + j - own key.
            None without a cache.
    """

    keep: Tensor | None = None
    key_keep: Tensor | None = None
    lengths: Tensor | None = None
    bias: Tensor | None = None
    distance_bias: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    sinks: Tensor | None = None
    causal: int | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: Tensor | int | None = None
    zero_empty_rows: bool = False
    packed: PackedBatch | None = None
    cached: CachedKeys | None = None

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of the op: those after the inputs in its schema, without those that are None."""
        if self.cached is not None:
            keys = {"lengths": self.cached.lengths, "page_table": self.cached.page_table}
            return keys | {name: getattr(self, name) for name in _OF_CACHE}
        given = {name: getattr(self, name) for name in _OF_BATCH}
        if self.packed is not None:
            given |= {name: getattr(self.packed, name) for name in _OF_SEQUENCES}
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def from_keywords(cls, **options: Any) -> AttentionParams:
        """Inverse of :meth:`keywords`; arguments that are left out have their defaults."""
        sequences = {name: options.pop(name) for name in _OF_SEQUENCES if name in options}
        if sequences.get("cu_seqlens_q") is not None:
            options["packed"] = PackedBatch(**sequences)
        return cls(**options)


_OF_BATCH = tuple(field.name for field in fields(AttentionParams) if field.name not in ("packed", "cached"))
_OF_SEQUENCES = tuple(field.name for field in fields(PackedBatch))
_OF_CACHE = ("causal", "window", "scale", "distance_bias", "query_ids", "key_ids", "sinks", "softcap")
