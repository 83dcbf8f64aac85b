"""The kernel that the model is calibrated on: fused attention, forward, as the literature writes it, without a mask.

Method: T. Dao, "FlashAttention-2", 2023, algorithm 1: a program has one tile of queries and takes the tiles of keys
with an online softmax in base 2. Lengths are multiples of the tiles, so that no load is guarded.
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q, k, v, out, logsumexp, scale, length, head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """q, k, v, out: (heads, length, HEAD_DIM), contiguous; logsumexp: (heads, length), in base 2; a program a tile of
    queries of a head."""
    tiles = length // BLOCK_QUERIES
    head = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    columns = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, BLOCK_KEYS)
    offset = head.to(tl.int64) * head_stride
    own = rows[:, None] * HEAD_DIM + columns[None, :]
    k_tiles = k + offset + keys[None, :] * HEAD_DIM + columns[:, None]
    v_tiles = v + offset + keys[:, None] * HEAD_DIM + columns[None, :]
    q_tile = tl.load(q + offset + own)
    row_max = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_QUERIES,), tl.float32)
    acc = tl.zeros((BLOCK_QUERIES, HEAD_DIM), tl.float32)
    factor = scale * 1.4426950408889634
    for _ in range(0, length, BLOCK_KEYS):
        scores = tl.dot(q_tile, tl.load(k_tiles))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
        weights = tl.math.exp2(scores * factor - new_max[:, None])
        decay = tl.math.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tiles.dtype.element_ty), tl.load(v_tiles), acc * decay[:, None])
        row_max = new_max
        k_tiles += BLOCK_KEYS * HEAD_DIM
        v_tiles += BLOCK_KEYS * HEAD_DIM
    tl.store(logsumexp + head * length + rows, row_max + tl.math.log2(row_sum))
    tl.store(out + offset + own, (acc / row_sum[:, None]).to(out.dtype.element_ty))
