"""Bits of dropout from the forward to the backward: one per attention weight, loaded instead of drawn again.

Drawing a weight takes eight instructions, reading its bit takes one. The bits take memory, so `configs.DROPOUT_BITS`
limits them. Otherwise each kernel draws the same mask again.

The layout follows the accumulator of a product in a warp: for 16 queries and 64 keys, a lane holds 32 weights, which
form one word. In the word of lane 4 a + b, bit 16 r + 8 g + 2 n + h is of query 8 r + a and of key 32 g + 8 n + 2 b +
h. The words of a block of 128 queries are (columns of 64 keys, 8 units of 16 queries, 32 lanes), with the columns of
the longest sequence, rounded up to whole tiles. The blocks of a (batch, head) follow one another. In a packed batch
those of a head do, and sequence b begins at block cu_seqlens[b] // 128 + b. Words of tiles that the forward skips are
not written, nor those of a block past the tiles of its sequence.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...attention_params import AttentionParams
from ..configs import ATTENTION, ATTENTION_KERNELS, DROPOUT_BITS, AttentionConfig
from ..launcher import architecture_of, blocks_of, widen_bf16_if_interpreted
from ..philox import attention_draws, attention_keep_tile, kept_of_draws
from ..versions import keeps_packed_bits
from .launches import call_kind
from .tiles import padded_head_dim

_BLOCK = tl.constexpr(128)
"""Queries of a block, and queries and keys of the largest tile. Memory covers whole tiles, so that no access needs a
guard."""


def empty_dropout_bits(
    q: Tensor, k: Tensor, params: AttentionParams, arch: str, words: int | None = None
) -> Tensor | None:
    """Allocate memory for the bits of a call, int32 (words,), or None if the bits are not kept.

    For the other arguments see :func:`words_of`.

    Args:
        words: their number in a compiled graph, which was chosen when the graph was made; None chooses it now.
    """
    if words is None:
        words = words_of(q, k, params, arch)
    elif words:
        check_words("dropout_words", words, q, k, params, arch)
    return torch.empty(words, dtype=torch.int32, device=q.device) if words else None


def check_words(name: str, words: int, q: Tensor, k: Tensor, params: AttentionParams, arch: str) -> None:
    """Raise ValueError unless this is the number of words of a call that keeps its bits."""
    if words != (needed := words_of(q, k, params, arch, math.inf)):
        raise ValueError(
            f"attention: {name} must be {needed} words, those that this device keeps, or none, got {words}; "
            "a graph serves the kind of device that it was made for"
        )


@widen_bf16_if_interpreted(results=0)
def dropout_words(q: Tensor, k: Tensor, params: AttentionParams) -> int:
    """Compute :func:`words_of` for the device of q. A graph whose sizes depend on data keeps no bits."""
    packed = params.packed
    sizes = *q.shape, *k.shape, *((packed.max_seqlen_k, *packed.cu_seqlens_q.shape) if packed else ())
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    if any(free_unbacked_symbols(size) for size in symbols):
        return 0
    return words_of(q, k, params, architecture_of(q))


def words_of(q: Tensor, k: Tensor, params: AttentionParams, arch: str, share: float | None = None) -> int:
    """Number of int32 with the bits of a call; 0 if the bits are not kept. The module docstring explains the layout.

    Args:
        q: (B, H, Lq, D), or (Tq, H, D) of a packed batch.
        k: (B, Hkv, Lk, D), or (Tk, Hkv, D).
        params: as given to the launcher. The values of tensors are not read.
        arch: architecture class.
        share: limit of the memory, as :data:`..configs.DROPOUT_BITS` has it; None: that one.
    """
    packed, share = params.packed, DROPOUT_BITS["share"] if share is None else share
    if packed is not None and not keeps_packed_bits(triton.__version__):
        return 0
    keys = k.shape[2] if packed is None else min(packed.max_seqlen_k, k.shape[0])
    if params.window is not None or params.dropout_p == 0.0 or call_kind(keys, params) not in ("long", "packed long"):
        return 0
    bits, block_d = q.element_size() * 8, padded_head_dim(q.shape[-1])
    tiles = [ATTENTION.get((kernel, arch, bits, block_d, "kept")) for kernel in ATTENTION_KERNELS]
    if not all(tile is not None and _holds_whole_words(tile) for tile in tiles):
        return 0
    if packed is None:
        heads, blocks = q.shape[0] * q.shape[1], blocks_of(q.shape[2], _BLOCK.value)
    else:
        heads, blocks = q.shape[1], q.shape[0] // _BLOCK.value + packed.cu_seqlens_q.shape[0] - 1
    columns = 2 * blocks_of(keys, _BLOCK.value)
    rows = q.numel() // q.shape[-1]
    if blocks * columns * 256 >= 2**31:
        return 0
    if share != math.inf:  # sizes of a graph may be symbols, which inf cannot multiply
        most = share * 2 * (q.numel() + k.numel()) * q.element_size()
        # The ends of tiles may take a quarter more: many short sequences beside a long one would take many times that.
        if rows * columns * 8 > most or heads * blocks * columns * 1024 > 1.25 * most:
            return 0
    return heads * blocks * columns * 256  # 8 units of 32 lanes


def _holds_whole_words(tile: AttentionConfig) -> bool:
    return tile.block_keys % 64 == 0 and max(tile.block_queries, tile.block_keys) <= _BLOCK.value


@triton.jit
def bits_at_head(bits, cu_seqlens_q, batch, batches, head, heads, first_query, queries, total_queries, most_keys):
    """Pointer to the words of one (batch, head); None for None. `most_keys` is the length of the longest sequence."""
    if bits is None:
        return
    else:
        if cu_seqlens_q is None:
            block = (batch * heads + head).to(tl.int64) * tl.cdiv(queries, _BLOCK)
        else:
            block = head * (total_queries // _BLOCK + batches) + first_query // _BLOCK + batch
        return bits + block.to(tl.int64) * _words_of_block(most_keys)


@triton.jit
def _words_of_block(most_keys):
    return tl.cdiv(most_keys, _BLOCK) * 512


@triton.jit
def _words_at(bits, start_query, start_key, most_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Pointers to the words of a tile: (QUERIES // 16, 8, KEYS // 64, 4), a unit's a, a column, a lane's b."""
    bits += start_query // _BLOCK * _words_of_block(most_keys) + start_key // 64 * 256 + start_query % _BLOCK * 2
    unit = tl.arange(0, QUERIES // 16)[:, None, None, None] * 32
    column = tl.arange(0, KEYS // 64)[None, None, :, None] * 256
    lane = tl.arange(0, 8)[None, :, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    return bits + column + (unit + lane)


@triton.jit
def draw_keep_tile(bits, random, start_query, start_key, most_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Draw :func:`~..philox.attention_keep_tile`, and store it in `bits` (from :func:`bits_at_head`) unless that
    is None."""
    if bits is None:
        return attention_keep_tile(random, start_query, start_key, QUERIES, KEYS)
    else:
        w0, w1, w2, w3 = attention_draws(random, start_query, start_key, QUERIES, KEYS)
        words = _words_of_draws(w0, w1, w2, w3, random.threshold, QUERIES, KEYS)
        tl.store(_words_at(bits, start_query, start_key, most_keys, QUERIES, KEYS), words)
        return kept_of_draws(w0, w1, w2, w3, random.threshold, QUERIES, KEYS)


@triton.jit
def recall_keep_tile(bits, random, start_query, start_key, most_keys, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the keep bits of a tile as :func:`draw_keep_tile` does, loaded or drawn again.

    Bits of tiles that the forward skipped are arbitrary; the weights there are 0.
    """
    if bits is None:
        return attention_keep_tile(random, start_query, start_key, QUERIES, KEYS)
    else:
        words = tl.load(_words_at(bits, start_query, start_key, most_keys, QUERIES, KEYS))
        keep = (words[:, :, :, :, None] & (1 << tl.arange(0, 32))) != 0
        # (unit, a, column, b; r, g, n, h) -> query = (unit, r, a), key = (column, g, n, b, h)
        keep = tl.reshape(keep, (QUERIES // 16, 8, KEYS // 64, 4, 2, 2, 4, 2))
        keep = tl.permute(keep, (0, 4, 1, 2, 5, 6, 3, 7))
        return tl.reshape(keep, (QUERIES, KEYS))


@triton.jit
def _words_of_draws(w0, w1, w2, w3, threshold, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Convert the draws of a tile, (QUERIES, KEYS // 8) of four words, to words of 32 bits (QUERIES // 16, 8, KEYS //
    64, 4)."""
    threshold = tl.cast(threshold, tl.uint32)
    bits = _two_bits(w0, threshold, 0)
    bits |= _two_bits(w1, threshold, 2)
    bits |= _two_bits(w2, threshold, 4)
    bits |= _two_bits(w3, threshold, 6)
    # (unit, r, a, column, g, b) -> (unit, a, column, b, r, g)
    bits = tl.permute(tl.reshape(bits, (QUERIES // 16, 2, 8, KEYS // 64, 2, 4)), (0, 2, 3, 5, 1, 4))
    of_group0, of_group1 = tl.split(bits)
    bits00, bits10 = tl.split(of_group0)
    bits01, bits11 = tl.split(of_group1)
    return bits00 | (bits01 << 8) | (bits10 << 16) | (bits11 << 24)


@triton.jit
def _two_bits(word, threshold, PLACE: tl.constexpr):
    low = tl.where((word & 0xFFFF) >= threshold, 1 << PLACE, 0)
    return low | tl.where(word >= threshold << 16, 2 << PLACE, 0)
