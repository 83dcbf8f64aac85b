"""Which tile a program of an attention kernel has, and where its rows are.

Three kinds of call run the same kernels. A padded one bounds its keys by limits (lengths, causal, the end of the keys)
and steps through the tiles within them by arithmetic. One with a dense mask steps through lists (see
:mod:`.tile_map`). A packed one finds its sequence in `cu_seqlens`, and from there is like the first.
"""

import triton
import triton.language as tl


@triton.jit
def program_of(heads, rows, batch_order, BLOCK: tl.constexpr):
    """(batch, head, block) of this program, where every (batch, head) has a program for each block of rows.

    With an order of batches, the batch that it puts in this place.
    """
    blocks = tl.cdiv(rows, BLOCK)
    batch = tl.program_id(0) // blocks // heads
    if batch_order is not None:
        batch = tl.load(batch_order + batch)
    return batch, tl.program_id(0) // blocks % heads, tl.program_id(0) % blocks


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
