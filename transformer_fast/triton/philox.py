"""The random-number contract (Philox 4x32-10, version 1) as Triton device functions.

Method: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3.

The key is one int64 seed. One call gives four 32-bit words, each read as two 16-bit draws (low half,
then high half), so one call serves eight elements; an element is kept iff its draw is at least
``round(p * 65536)``. The draw of an element is a pure function of the element's position and does not depend on tiles:

* attention weight (b, h, i, j): counter ``((j >> 5) * 4 + ((j >> 1) & 3), i, h, b)``,
  word ``(j >> 3) & 3``, half ``j & 1``. A call serves pairs of keys eight apart. One thread of a tensor-core
  accumulator holds exactly these keys, so the tile below needs no exchange between threads.
* element (r, c) of a (rows, columns) view: counter ``(c >> 3, low32(r), high32(r), 0)``,
  word ``(c >> 1) & 3``, half ``c & 1``. A call serves eight neighbours: one 128-bit access in 16-bit types.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def load_seed(seed):
    """Load the seed, an int64 or a pointer to an int64, as the key (low, high): two uint32 scalars; None for None."""
    if seed is None:
        return
    else:
        number = tl.load(seed) if seed.dtype.is_ptr() else seed.to(tl.int64)
        return number.to(tl.uint32), (number >> 32).to(tl.uint32)


class RandomBits(NamedTuple):
    """Source of the random bits for the attention weights of one (batch, head).

    Args:
        key: (low, high), uint32 scalars from :func:`load_seed`; None without dropout.
        threshold: int32 scalar, ``round(p * 65536)``.
        batch, head: scalars; ``head`` counts query heads.
    """

    key: tl.tuple
    threshold: tl.tensor
    batch: tl.tensor
    head: tl.tensor


def _product(factor: int) -> str:
    """PTX of a 32 x 32-bit product, with low half and high half as results."""
    return f"{{ .reg .b64 product; mul.wide.u32 product, $2, {factor}; mov.b64 {{$0, $1}}, product; }}"


# The interpreter and non-NVIDIA GPUs do not support PTX.
PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

# One instruction gives both halves; compilers do not merge the two products below. 64-bit tensors would change Triton's
# layout of the words.
_FACTORS = tl.constexpr((0xD2511F53, 0xCD9E8D57))
_PRODUCTS = tl.constexpr(tuple(map(_product, _FACTORS.value)))


@triton.jit
def _multiply(x, NUMBER: tl.constexpr):
    """Return the (low, high) halves of the product of uint32 words with one of the two factors."""
    if PTX:
        return tl.inline_asm_elementwise(
            _PRODUCTS[NUMBER], "=r,=r,r", [x], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
    else:
        return x * _FACTORS[NUMBER], tl.umulhi(x, _FACTORS[NUMBER])


@triton.jit
def philox4x32(key_low, key_high, c0, c1, c2, c3):
    """Ten rounds of Philox 4x32 on uint32 tensors of one shape; returns the four output words."""
    for _ in tl.static_range(10):
        low0, high0 = _multiply(c0, 0)
        low1, high1 = _multiply(c2, 1)
        c0 = high1 ^ c1 ^ key_low
        c1 = low1
        c2 = high0 ^ c3 ^ key_high
        c3 = low0
        key_low = key_low + 0x9E3779B9
        key_high = key_high + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _draws_to_keep(w0, w1, w2, w3, threshold, IN_PLACE: tl.constexpr):
    """Convert words (R, C) to eight keep bits per call: bool (R, C, half, high bit of word, low bit of word).

    IN_PLACE compares the high half without a shift, which saves an instruction; the threshold must be below 65,536.
    """
    threshold = tl.cast(threshold, tl.uint32)
    SHIFT: tl.constexpr = 0 if IN_PLACE else 16
    high_threshold = threshold << (16 - SHIFT)
    low0 = (w0 & 0xFFFF) >= threshold
    high0 = (w0 >> SHIFT) >= high_threshold
    low1 = (w1 & 0xFFFF) >= threshold
    high1 = (w1 >> SHIFT) >= high_threshold
    low2 = (w2 & 0xFFFF) >= threshold
    high2 = (w2 >> SHIFT) >= high_threshold
    low3 = (w3 & 0xFFFF) >= threshold
    high3 = (w3 >> SHIFT) >= high_threshold
    words02 = tl.join(tl.join(low0, high0), tl.join(low2, high2))
    words13 = tl.join(tl.join(low1, high1), tl.join(low3, high3))
    return tl.join(words02, words13)


@triton.jit
def kept_or_zero(kept, values):
    """Compute ``where(kept, values, 0)`` for values that are rounded to 16 bits next.

    With a constant zero, LLVM would round before the select, and then would have to split pairs of 16 bits.
    """
    zero = tl.full((), 0.0, tl.float32)
    if PTX:
        zero = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [zero], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where(kept, values, zero)


@triton.jit
def attention_keep_tile(random, start_query, start_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Keep bits of the weights of one (query tile x key tile).

    Args:
        random: the RandomBits of the (batch, head).
        start_query, start_key: first row and first key of the tile; ``start_key % 32 == 0``.
        QUERIES, KEYS: tile shape; KEYS a power of two of at least 32.

    Returns:
        bool (QUERIES, KEYS), True = kept. With threshold 65,536 (everything dropped) the bits are arbitrary, because
        the caller's factor of kept weights is 0.
    """
    w0, w1, w2, w3 = attention_draws(random, start_query, start_key, QUERIES, KEYS)
    return kept_of_draws(w0, w1, w2, w3, random.threshold, QUERIES, KEYS)


@triton.jit
def attention_draws(random, start_query, start_key, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Draw the four words per call for the weights of a tile: uint32 (QUERIES, KEYS // 8)."""
    blank = tl.zeros((QUERIES, KEYS // 8), tl.uint32)
    query = (start_query + tl.arange(0, QUERIES)).to(tl.uint32)[:, None] + blank
    call = (start_key // 8 + tl.arange(0, KEYS // 8)).to(tl.uint32)[None, :] + blank
    head = tl.cast(random.head, tl.uint32) + blank
    batch = tl.cast(random.batch, tl.uint32) + blank
    return philox4x32(random.key[0], random.key[1], call, query, head, batch)


@triton.jit
def kept_of_draws(w0, w1, w2, w3, threshold, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Convert :func:`attention_draws` of a tile to keep bits (QUERIES, KEYS)."""
    keep = _draws_to_keep(w0, w1, w2, w3, threshold, True)
    # key = group * 32 + word * 8 + (call & 3) * 2 + half
    keep = tl.reshape(keep, (QUERIES, KEYS // 32, 4, 2, 2, 2))
    keep = tl.permute(keep, (0, 1, 4, 5, 2, 3))
    return tl.reshape(keep, (QUERIES, KEYS))


@triton.jit
def elementwise_keep_tile(key_low, key_high, threshold, rows, start_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Keep bits of one (row tile x column tile) of a (rows, columns) view.

    Args:
        key_low, key_high: uint32 scalars from :func:`load_seed`.
        threshold: int32 scalar, ``round(p * 65536)``.
        rows: int64 (ROWS,), the row numbers of the tile (any, in any order).
        start_column: first column of the tile; ``start_column % 8 == 0``.
        ROWS, COLUMNS: tile shape; COLUMNS a power of two of at least 8.

    Returns:
        bool (ROWS, COLUMNS), True = kept.
    """
    blank = tl.zeros((ROWS, COLUMNS // 8), tl.uint32)
    rows = rows.to(tl.int64)
    row_low = rows.to(tl.uint32)[:, None] + blank
    row_high = (rows >> 32).to(tl.uint32)[:, None] + blank
    call = (start_column // 8 + tl.arange(0, COLUMNS // 8)).to(tl.uint32)[None, :] + blank
    w0, w1, w2, w3 = philox4x32(key_low, key_high, call, row_low, row_high, blank)
    keep = _draws_to_keep(w0, w1, w2, w3, threshold, False)
    # column = call * 8 + word * 2 + half
    keep = tl.permute(keep, (0, 1, 3, 4, 2))
    return tl.reshape(keep, (ROWS, COLUMNS))
