"""Forwards on the fused ops for hand-written modules: the classic code, The Annotated Transformer, and BERT by hand.

Each function takes a module, and reads its children and its attributes at each call. A child that is hooked, replaced
or subclassed is called. A function returns None for a call that the author's own ``forward`` must compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import layers, ops
from ..layers import hooks
from ..layers.attention import attend, layer_mask
from ..layers.dropout import apply_dropout, dropout_of_any, fused_p
from ..layers.feed_forward import linear_relu_dropout
from ..layers.norm import Sublayer, Unsummed, norm_and_sum, post_norm, pre_norm, unsummed
from ..masks import AttentionMask
from ..masks.checks import four_dimensions
from ..masks.packing import PackedMask
from ..ops.token_mask import token_mask
from .common import embed_with_table, leave_weights, merge_heads, packed_heads, padded_weights, project_heads, root_of

Linears = Callable[[nn.Module], Sequence[nn.Module]]
"""Linear layers of queries, keys, values and of the output."""


def keep_mask(mask: Any, head_axis: bool = True) -> Any:
    """Normal form of a keep mask of any dtype, 0 = blocked; a mask without a head axis gets one.

    Raises:
        ValueError: for a mask of another rank.
    """
    if not isinstance(mask, Tensor):
        return mask
    keep = mask if mask.dtype == torch.bool else mask != 0
    return layer_mask(keep) if head_axis else AttentionMask.keep(four_dimensions(keep))


def heads(
    m: Any,
    linears: Sequence[nn.Module],
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    *,
    head_axis: bool = True,
    stores: bool = False,
) -> Tensor | None:
    """Multi-head attention over keep masks.

    Args:
        m: module with numbers ``h`` and ``d_k``, and a ``dropout`` of the weights.
        linears: layers of queries, keys, values and of the output.
        inputs: queries (B, Lq, d), keys and values (B, Lk, d).
        mask: (B, 1, Lk) or (B, Lq, Lk), 0 = blocked; with ``head_axis=False`` broadcastable to (B, h, Lq, Lk).
        stores: the module keeps the weights of its last call.
    """
    if type(m.h) is not int or (head_axis and isinstance(mask, Tensor) and mask.dim() != 3):
        return None
    *projections, out = linears
    width = getattr(projections[0], "out_features", None)
    if type(m.d_k) is not int or m.h * m.d_k != width or getattr(m, "d_model", width) != width:
        return None
    q, k, v = project_heads(projections, inputs, m.h)
    normal = keep_mask(token_mask(mask, *inputs), head_axis)
    if isinstance(normal, PackedMask):
        result = packed_heads(q, k, v, normal, m.dropout)
        if stores:
            leave_weights(m, lambda q, k: padded_weights(q, k, normal), q, k)
    else:
        result = attend(m.dropout, q, k, v, normal)
        if stores:
            leave_weights(m, lambda q, k: ops.attention(q, k, k, normal, return_weights=True)[1], q, k)
    return out(merge_heads(result))


def norm(
    m: Any, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0, *, names: tuple[str, str], kind: str
) -> Any:
    """Norm with a gain and a shift of these names; see :func:`transformer_fast.layer_norm` for the kind."""
    if type(m.eps) is not float:
        return None
    gain, shift = (getattr(m, name) for name in names)
    return ops.layer_norm(x, gain, shift, m.eps, kind=kind, residual=residual, dropout_p=dropout_p)


def norm_by_author(
    m: nn.Module, forward: Any, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0
) -> Any:
    """Norm by its author's ``forward``, for a parent that asks for the sum ``residual + dropout(x)``, too."""
    if residual is None:
        return forward(m, x)
    x = dropout_of_any(x, dropout_p, residual=residual)
    return forward(m, x), x


def pre_norm_sublayer(m: Any, x: Tensor, function: Any) -> Tensor:
    """``x + dropout(function(norm(x)))``."""
    return apply_dropout(m.dropout, function(m.norm(x)), residual=x)


def post_norm_sublayer(m: Any, x: Tensor, function: Any) -> Tensor:
    """``norm(x + dropout(function(x)))``."""
    return norm_and_sum(m.norm, unsummed(x, function(x), m.dropout))[0]


def add_norm(m: Any, x: Tensor, y: Tensor) -> Tensor | None:
    """``ln(x + dropout(y))``."""
    return norm_and_sum(m.ln, unsummed(x, y, m.dropout))[0] if x.shape == y.shape else None


def feed_forward(m: Any, x: Tensor, *, first: str, second: str) -> Tensor:
    """``second(dropout(relu(first(x))))``."""
    return getattr(m, second)(linear_relu_dropout(getattr(m, first), x, m._modules.get("dropout")))


def activated_feed_forward(m: Any, x: Tensor) -> Tensor:
    """``w_2(dropout(activation(w_1(x))))``."""
    return m.w_2(apply_dropout(m.dropout, m.activation(m.w_1(x))))


def embedder(m: Any, ids: Tensor) -> Tensor | None:
    """``lut(ids) * sqrt(d_model)``."""
    scale = root_of(m.d_model)
    if scale is None or not layers.embedding.is_lookup(m.lut):
        return None
    return ops.embed(ids, m.lut.weight, scale=scale, padding_idx=m.lut.padding_idx)


def positional(m: Any, x: Tensor, *offset: Any, name: str = "pe", axis: int = 1) -> Tensor | None:
    """``dropout(x + table[:, :L])`` for a table (1, max_len, d), or (max_len, 1, d) with the batch second."""
    table, p = getattr(m, name), fused_p(m.dropout)
    if offset or p is None or not isinstance(table, Tensor) or table.dim() != 3 or table.shape[1 - axis] != 1:
        return None
    table = table.squeeze(1 - axis)
    fits = x.dim() == 3 and x.shape[axis] <= table.shape[0] and x.device == table.device
    if not fits or torch.promote_types(x.dtype, table.dtype) != x.dtype:
        return None
    if axis == 1:
        return ops.add_positional(x, table, 0, p)
    return ops.add_positional(x.transpose(0, 1), table, 0, p).transpose(0, 1)


def bert_embedding(m: Any, ids: Tensor, *labels: Tensor) -> Tensor | None:
    """``dropout(token(ids) + position(ids) [+ segment(labels)])`` for a table ``position.pe``."""
    segment, table = m._modules.get("segment"), m.position.pe
    if table.dim() != 3:
        return None
    x = embed_with_table(ids, m.token, table[0], 1.0, m.dropout if segment is None else None)
    if x is None or segment is None:
        return x
    return apply_dropout(m.dropout, x + segment(*labels))


def token_embedding(m: Any, ids: Tensor) -> Tensor | None:
    """Rows of the weight of a subclass of ``nn.Embedding``."""
    if m.max_norm is not None or m.sparse or m.scale_grad_by_freq or not ids.dim():
        return None
    return ops.embed(ids, m.weight, padding_idx=m.padding_idx)


def classic_layer(m: Any, x: Tensor, *args: Any, kind: Any, norm_first: bool) -> Tensor | None:
    """Layer of the classic code; ``kind`` is ``layers.EncoderLayer`` or ``layers.DecoderLayer``."""
    if getattr(m, "norm_first", norm_first) is not norm_first:
        return None
    sublayers = kind.sublayers(m, *args)
    return pre_norm(x, sublayers).summed() if norm_first else post_norm(x, sublayers)


def classic_embedded(m: Any, ids: Tensor) -> Tensor:
    """Input of the first layer of a classic stack."""
    x = None
    if hooks.has_role(m.embed, hooks.SCALED_LOOKUP) and hooks.has_role(m.pe, hooks.ADDS_POSITIONS):
        x = embed_with_table(ids, m.embed.lut, m.pe.pe[0], root_of(m.embed.d_model), m.pe.dropout)
    return m.pe(m.embed(ids)) if x is None else x


def classic_stack(m: Any, x: Tensor, *args: Any) -> Tensor:
    """Layers and norm of a classic stack."""
    for layer in m.layers:
        x = layer(x, *args)
    return m.norm(x)


Step = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A module ``x + dropout(f(norm(x)))``, and the function f."""


def encoder_steps(m: Any, mask: Any) -> Iterable[Step]:
    """Steps of the encoder layer of The Annotated Transformer."""
    return zip(m.sublayer, (lambda x: m.self_attn(x, x, x, mask), m.feed_forward), strict=True)


def decoder_steps(m: Any, memory: Tensor, src_mask: Any, tgt_mask: Any) -> Iterable[Step]:
    """Steps of the decoder layer of The Annotated Transformer."""

    def own(x: Tensor) -> Tensor:
        return m.self_attn(x, x, x, tgt_mask)

    def cross(x: Tensor) -> Tensor:
        return m.src_attn(x, memory, memory, src_mask)

    return zip(m.sublayer, (own, cross, m.feed_forward), strict=True)


def through(x: Tensor | Unsummed, steps: Iterable[Step]) -> Tensor | Unsummed:
    """Run steps; the last sum of a step is left to the norm of the next one."""
    for sublayer, function in steps:
        if hooks.has_role(sublayer, hooks.PRE_NORM):
            step: Sublayer = sublayer.norm, sublayer.dropout, function  # type: ignore[assignment]
            x = pre_norm(x, (step,))
        else:
            x = sublayer(summed(x), function)
    return x


def summed(x: Tensor | Unsummed) -> Tensor:
    """Compute a sum that was left."""
    return x.summed() if isinstance(x, Unsummed) else x


def annotated_layer(m: Any, x: Tensor, *args: Any, steps: Any) -> Tensor:
    """Layer of The Annotated Transformer."""
    return summed(through(x, steps(m, *args)))


def annotated_stack(m: Any, x: Tensor, *args: Any, steps: Any, role: str) -> Tensor:
    """Stack of The Annotated Transformer: the last sum of a layer is left to the norm of the next one."""
    y: Tensor | Unsummed = x
    for layer in m.layers:
        y = through(y, steps(layer, *args)) if hooks.has_role(layer, role) else layer(summed(y), *args)
    return norm_and_sum(m.norm, y)[0]


def bert_block(m: Any, x: Tensor, mask: Any) -> Tensor | None:
    """Block of BERT by hand; some authors call ``attention.forward``, which skips hooks."""
    if not hooks.has_role(m.attention, hooks.TAKES_MASKS):
        return None
    functions = (lambda x: m.attention(x, x, x, mask)), m.feed_forward
    steps = zip((m.input_sublayer, m.output_sublayer), functions, strict=True)
    return apply_dropout(m.dropout, summed(through(x, steps)))
