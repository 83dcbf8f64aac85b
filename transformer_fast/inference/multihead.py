"""Multi-head attention in evaluation, including projections and weights, as one C++ call."""

from __future__ import annotations

from torch import Tensor

from ..masks import AttentionMask
from ..ops import eager
from ..ops.attention_checks import is_special


def evaluated_heads(
    inputs: tuple[Tensor, Tensor, Tensor],
    projection: tuple[Tensor, Tensor | None],
    output: tuple[Tensor, Tensor | None],
    heads: int,
    *,
    batch_first: bool,
    mask: AttentionMask,
    bias: Tensor | None,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """Compute ``torch.nn.MultiheadAttention`` without dropout; None if the caller must call the parts instead.

    For short sequences, the Python code between the parts takes longer than the computation. The call takes plain CPU
    tensors of one float dtype that need no gradient, under the "auto" and the "native" backend and no autocast.

    Args:
        inputs: query (B, Lq, E) and key and value (B, Lk, E), or (Lq, B, E) and (Lk, B, E).
        projection: weight (3 E, E) and bias (3 E,) of queries, keys and values.
        output: weight (E, E) and bias (E,).
        heads: number of heads.
        batch_first: True for (B, L, E), False for (L, B, E).
        mask, bias: already checked; a query with every key blocked attends to nothing.
        need_weights: also return the weights.
        average: return weights averaged over the heads.

    Returns:
        The output, of the shape of the query, and the weights, (B, Lq, Lk) or (B, heads, Lq, Lk), or None.
    """
    if mask.key_lengths is not None or mask.window_offset is not None or is_special(mask):
        return None
    if not (direct := eager.native()):
        return None
    parts = mask.keep_mask, mask.key_keep_mask, bias, mask.causal_offset
    options = heads, batch_first, *parts, need_weights, average
    found = direct.multihead_attention(False, *inputs, *projection, *output, *options)
    return found if found is None or need_weights else (found, None)
