"""Which tiles a program of an attention kernel takes, in which order, and what the mask says in them.

Three kinds of call run the same kernels. A padded one bounds its keys by limits (lengths, causal, the end of the keys)
and steps through the tiles within them by arithmetic. One with a dense mask steps through lists (see
:mod:`.attention_tile_map`). A packed one finds its sequence in `cu_seqlens`, and from there is like the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import LONG
from .attention_tile_map import allowed_words, bits_arguments, length_order, packed_order, tile_lists
from .attention_tiles import mask_arguments, mask_scores, within_limits, within_reach


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the sequences of a packed batch lie.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), rising from 0: sequence b has the rows from entry b to entry b + 1.
        total_queries: rows of q in all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    total_queries: int


@triton.jit
def sequence(cu_seqlens, batch, length):
    """(first row, rows) of a sequence of a packed batch; without `cu_seqlens`, of a padded one: (0, length)."""
    if cu_seqlens is None:
        return tl.full((), 0, tl.int32), length
    else:
        first = tl.load(cu_seqlens + batch)
        return first, tl.load(cu_seqlens + batch + 1) - first


@triton.jit
def statistics_row(cu_seqlens_q, batch, head, heads, total_queries, first_query):
    """Where the numbers of a sequence's rows begin in a (B, H, Lq) tensor of them, or (H, Tq) of a packed batch."""
    if cu_seqlens_q is None:
        return (batch * heads + head).to(tl.int64) * total_queries
    else:
        return head.to(tl.int64) * total_queries + first_query


@triton.jit
def in_order(order, slot):
    """What an order, if there is one, puts in this slot."""
    if order is None:
        return slot
    else:
        return tl.load(order + slot)


@triton.jit
def tile_at(tile_list, step, full, across):
    """The tile at one step: that of the list, whose full tiles are at the front and partial ones, backwards, at the
    end; without a list, the step itself."""
    if tile_list is None:
        return step
    else:
        return tl.load(tile_list + tl.where(step < full, step, across - 1 - (step - full)))


@triton.jit
def key_steps(tile_counts, line, limit, last_key, BLOCK_KEYS: tl.constexpr):
    """(full, all): how many steps a tile of queries takes over tiles of keys, and how many need no mask. These are the
    first ones."""
    if tile_counts is None:
        return tl.maximum(tl.min(limit, 0), 0) // BLOCK_KEYS, tl.cdiv(last_key, BLOCK_KEYS)
    else:
        full = tl.load(tile_counts + line * 2)
        return full, full + tl.load(tile_counts + line * 2 + 1)


@triton.jit
def query_steps(
    tile_counts, line, start_key, batch, lengths, lengths_batch, lengths_query, causal_offset, queries, keys,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """(first, full, all): how a tile of keys steps through tiles of queries.

    From a list, `full` steps need no mask, and these are the first ones. By arithmetic, the steps start from tile
    `first`, and `full` is the first that needs none: under a causal mask the edge comes first.
    """
    if tile_counts is None:
        end_key = start_key + BLOCK_KEYS
        length = keys
        uniform_length = True
        if lengths is not None:
            uniform_length = lengths_query == 0
            length = tl.where(uniform_length, tl.load(lengths + batch.to(tl.int64) * lengths_batch), keys)
        tiles = tl.cdiv(queries, BLOCK_QUERIES)
        first_row = tl.maximum(start_key - causal_offset, 0)
        first = first_row // BLOCK_QUERIES
        full = tl.cdiv(tl.maximum(end_key - 1 - causal_offset, 0), BLOCK_QUERIES) - first
        full = tl.where(uniform_length & (end_key <= length), full, tiles)
        return first, full, tl.where((start_key < length) & (first_row < queries), tiles - first, 0)
    else:
        full = tl.load(tile_counts + line * 2)
        return tl.full((), 0, tl.int32), full, full + tl.load(tile_counts + line * 2 + 1)


@triton.jit
def allowed_tile(
    start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Which (query, key) of a tile are allowed: bool (QUERIES, KEYS), by the limits and, where given, by the bits."""
    if keep is None and key_keep is None:
        return within_limits(start_key, limit, KEYS)
    else:
        bits = allowed_words(
            start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep, QUERIES, KEYS // 32
        )
        spread = (tl.expand_dims(bits, 2) >> tl.arange(0, 32)[None, None, :]) & 1
        return tl.reshape(spread, (QUERIES, KEYS)) != 0


@triton.jit
def masked_scores(
    scores, scale, start_query, queries, start_key, keys, limit, keep, keep_query, keep_word, key_keep,
    bias, bias_query, bias_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, MASK_UNIT: tl.constexpr,
):  # fmt: skip
    """Apply every part of the mask: (scores, allowed). With a bias, the scores come back scaled and biased."""
    allowed = allowed_tile(start_query, queries, start_key, limit, keep, keep_query, keep_word, key_keep, QUERIES, KEYS)
    if bias is not None:
        scores, unblocked = mask_scores(
            scores, scale, start_query, queries, start_key, keys, limit, None, 0, 0, None, 0, bias, bias_query,
            bias_key, QUERIES, KEYS, MASK_UNIT,
        )  # fmt: skip
        allowed = allowed & unblocked
    return scores, allowed


def masking_arguments(
    q: Tensor, k: Tensor, tile: tuple[int, int], packed: Packed | None, *, columns: bool, keep: Tensor | None,
    key_keep: Tensor | None, **mask: object,
) -> dict[str, object]:  # fmt: skip
    """Kernel arguments that say what is masked, scaled and dropped, and which tiles are taken in which order.

    Args:
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        tile: queries and keys a tile.
        packed: where the sequences are, of a packed batch.
        columns: for a program a tile of keys, which steps through queries.
        keep, key_keep, mask: as given to the launcher.
    """
    arguments = mask_arguments(q, k, keep=None, key_keep=None, **mask)
    lengths = mask["lengths"]
    # Shorter programs end together in any order.
    ordered = k.shape[2] > LONG
    lists = batch_order = None
    if keep is not None or key_keep is not None:
        causal_offset = arguments["causal_offset"]
        sizes = q.shape[0], q.shape[2], k.shape[2]
        lists = tile_lists(keep, key_keep, lengths, causal_offset, *sizes, tile, columns=columns, ordered=ordered)
        batch_order = lists.batch_order
    elif ordered and packed is not None:
        batch_order = packed_order(packed.cu_seqlens_q, packed.cu_seqlens_k)
    elif ordered and lengths is not None and lengths.dim() == 1:
        batch_order = length_order(lengths)
    lines = 0 if lists is None else lists.lists.shape[2]
    batches, heads = (1, 1) if lists is None else lists.lists.shape[:2]
    return arguments | bits_arguments(keep, key_keep) | {
        "tile_list": None if lists is None else lists.lists,
        "tile_counts": None if lists is None else lists.counts,
        "tile_order": None if lists is None else lists.line_order,
        "batch_order": batch_order,
        "map_batch": heads * lines if batches > 1 else 0,
        "map_head": lines if heads > 1 else 0,
        "cu_seqlens_q": None if packed is None else packed.cu_seqlens_q,
        "cu_seqlens_k": None if packed is None else packed.cu_seqlens_k,
        "total_queries": q.shape[2] if packed is None else packed.total_queries,
    }  # fmt: skip


def packed_view(t: Tensor, batches: int, longest: int) -> Tensor:
    """(T, H, D) as a (B, H, longest, D) of which every batch is the whole: a sequence's first row is added in the
    kernel."""
    return within_reach(t.transpose(0, 1))[:, :longest].expand(batches, -1, -1, -1)


def packed_mask(
    causal: bool, scale: float, dropout_p: float, seed: Tensor | None, zero_empty_rows: bool
) -> dict[str, object]:
    """The mask keywords of a packed call."""
    return dict.fromkeys(("keep", "key_keep", "lengths", "bias")) | {
        "causal": 0 if causal else None, "scale": scale, "dropout_p": dropout_p, "seed": seed,
        "zero_empty_rows": zero_empty_rows,
    }  # fmt: skip


def example_tile_calls() -> Iterator[tuple[tuple[Tensor, Tensor], dict[str, object], Packed | None]]:
    """Calls on meta tensors that between them use every config of an architecture in every way that changes what is
    compiled much: ((q, logsumexp), mask, packed)."""

    def meta(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def call(dtype: torch.dtype, D: int, L: int, kind: str):
        mask = packed_mask(False, 1.0, 0.1, meta(1, dtype=torch.int64), False)
        packed = None
        if kind in ("limits", "mapped", "biased"):
            mask["lengths"] = meta(2, dtype=torch.int32)
        if kind in ("mapped", "biased"):
            mask |= {"keep": meta(2, 1, L, L, dtype=torch.bool), "key_keep": meta(2, 1, 1, L, dtype=torch.bool)}
        if kind == "biased":
            mask["bias"] = meta(1, 4, L, L, dtype=torch.float32)
        if kind == "packed":
            packed = Packed(meta(3, dtype=torch.int32), meta(3, dtype=torch.int32), 2 * L)
        if kind == "plain":
            mask |= {"dropout_p": 0.0, "seed": None}
        return (meta(2, 4, L, D, dtype=dtype), meta(2, 4, L, dtype=torch.float32)), mask, packed

    for D in (32, 64, 128):
        for kind in ("limits", "mapped", "packed"):
            yield call(torch.bfloat16, D, 256, kind)
            yield call(torch.bfloat16, D, 1024, kind)
        yield call(torch.bfloat16, D, 1024, "plain")
        yield call(torch.bfloat16, D, 1023, "biased")
    yield call(torch.float16, 64, 1024, "mapped")
    yield call(torch.bfloat16, 256, 1023, "biased")
    for D in (32, 64, 128, 256):
        yield call(torch.float32, D, 1024, "limits")
