"""The patterns of multi-head attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...dialects import tensorflow
from ...dialects.common import leave_weights, merge_heads, project_heads
from ...layers.attention import attend, attention, layer_mask
from ...layers.hooks import TAKES_NEED_WEIGHTS
from ...layers.linear import apply_linear
from ...masks import AttentionMask
from ...masks.checks import four_dimensions
from ...masks.packing import PackedMask, take, unpack
from ...ops.token_mask import token_mask
from .base import ANY, DROPOUT, INLINED, LINEAR, Pattern, children, random_keep


def keep_mask(mask: Tensor | AttentionMask | None) -> Tensor | AttentionMask | None:
    """AttentionMask of a keep mask of any dtype: 0 = blocked."""
    return mask != 0 if isinstance(mask, Tensor) and mask.dtype != torch.bool else mask


class Heads(Pattern):
    """Multi-head attention (q, k, v, mask) over keep masks.

    ``linears`` names the layers of queries, keys, values and of the output, or lists of layers. A mask without a head
    axis gets one.
    """

    keywords = ("cache",)
    attends = True

    def __init__(self, name: str, *linears: str, head_axis: bool = True, weights: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.linears, self.head_axis, self.weights = linears, head_axis, weights
        inner = dataclasses.replace(INLINED, optional=True)
        self.parts = {**dict.fromkeys(linears, ANY), "dropout": DROPOUT, "attention": inner}

    def matches(self, m: Any) -> bool:
        if not super().matches(m):
            return False
        widths = [x.out_features if isinstance(x, nn.Linear) else None for x in self.projections(m)]
        return len(widths) == 4 and set(widths) == {m.h * m.d_k}

    def projections(self, m: Any) -> list[nn.Module]:
        """Linear layers of queries, keys, values and of the output."""
        children = (m._modules[name] for name in self.linears)
        return [x for child in children for x in (child if isinstance(child, nn.ModuleList) else [child])]

    def normal(self, mask: Any) -> Any:
        """Convert a keep mask to normal form."""
        mask = keep_mask(mask)
        if self.head_axis:
            return layer_mask(mask)
        return AttentionMask.keep(four_dimensions(mask)) if isinstance(mask, Tensor) else mask

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        d = self.projections(m)[0].in_features
        inputs = torch.randn(2, 5, d), torch.randn(2, 3, d), torch.randn(2, 3, d)
        masks = random_keep(2, 1, 3), random_keep(2, 5, 3)
        return [inputs, *((*inputs, mask if self.head_axis else mask.unsqueeze(1)) for mask in masks)]

    def fused_forward(
        self, m: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *others: Any, cache: None = None
    ) -> Tensor | None:
        if any(other is not None and other is not False for other in others):  # such as verbose in the classic module
            return None
        *linears, out = self.projections(m)
        q, k, v = project_heads(linears, (query, key, value), m.h)
        mask = self.normal(token_mask(mask, query, key, value))
        if isinstance(mask, PackedMask):
            heads = packed_heads(q, k, v, mask, m.dropout)
            if self.weights:
                leave_weights(m, lambda q, k: padded_weights(q, k, mask), q, k)
            return out(merge_heads(heads))
        heads = attend(m.dropout, q, k, v, mask)
        if self.weights:
            leave_weights(m, lambda q, k: ops.attention(q, k, k, mask, return_weights=True)[1], q, k)
        return out(merge_heads(heads))


def packed_heads(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, dropout: Any = None) -> Tensor:
    """Attend with packed q, k and v (1, heads, T, d_k)."""
    return attention(*(t.squeeze(0) for t in (q, k, v)), q.shape[-1], mask, dropout).unsqueeze(0)


def with_padded_weights(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> tuple[Tensor, Tensor]:
    """Attend without dropout; also return the weights (B, heads, Lq, Lk), 0 at padding."""
    q, k, v = (
        unpack(t.squeeze(0).transpose(0, 1), packing).transpose(1, 2)
        for t, packing in ((q, mask.queries), (k, mask.keys), (v, mask.keys))
    )
    queries, keys = (
        unpack(torch.ones(packing.total, dtype=torch.bool, device=k.device), packing)
        for packing in (mask.queries, mask.keys)
    )
    seen = AttentionMask.keep(queries[:, None, :, None] & keys[:, None, None])
    seen = seen if mask.window is None else seen & mask.window
    options: dict[str, Any] = {"causal": mask.causal, "empty_rows": "zero"}
    out, weights = ops.attention(q, k, v, seen, return_weights=True, **options)
    return take(out.transpose(1, 2), mask.queries).transpose(0, 1).unsqueeze(0), weights


def padded_weights(q: Tensor, k: Tensor, mask: PackedMask) -> Tensor:
    """Compute only the weights (B, heads, Lq, Lk)."""
    return with_padded_weights(q, k, k, mask)[1]


def blocked_mask(mask: Any) -> Any:
    """Convert a mask of TensorFlow's tutorial, 1.0 = blocked, to normal form."""
    return AttentionMask.blocked(four_dimensions(mask)) if isinstance(mask, Tensor) else mask


class TensorflowHeads(Pattern):
    """``wq``, ``wk``, ``wv``, ``dense``: (v, k, q, mask) -> (out, weights), 1.0 = blocked, no dropout."""

    parts = children(wq=LINEAR, wk=LINEAR, wv=LINEAR, dense=LINEAR)
    keywords = ("need_weights",)
    attends = True
    roles = (TAKES_NEED_WEIGHTS,)

    def matches(self, m: Any) -> bool:
        return super().matches(m) and isinstance(getattr(m, "num_heads", None), int)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        v, k, q = (torch.randn(2, n, linear.in_features) for n, linear in ((3, m.wv), (3, m.wk), (5, m.wq)))
        masks = (1.0 - random_keep(*shape).to(q.dtype) for shape in ((2, 1, 1, 3), (5, 3)))
        return [(v, k, q, None), *((v, k, q, mask) for mask in masks)]

    def fused_forward(
        self, m: Any, v: Tensor, k: Tensor, q: Tensor, mask: Any = None, need_weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(mask, PackedMask):
            return tensorflow.MultiHeadAttention.forward(m, v, k, q, blocked_mask(mask), need_weights=need_weights)
        q, k, v = project_heads((m.wq, m.wk, m.wv), (q, k, v), m.num_heads)
        out, weights = with_padded_weights(q, k, v, mask) if need_weights else (packed_heads(q, k, v, mask), None)
        return apply_linear(m.dense, merge_heads(out)), weights


PATTERNS = (
    CLASSIC := Heads("ClassicHeads", "q_linear", "k_linear", "v_linear", "out"),
    Heads("AnnotatedHeads", "linears", weights=("attn",)),
    BERT := Heads("BertHeads", "linear_layers", "output_linear", head_axis=False),
    TensorflowHeads(),
)
KNOWS = (
    (
        "attention over keep masks: `q_linear`...; four `linears`; `linear_layers`, `output_linear`",
        "the classic code, The Annotated Transformer, BERT by hand",
    ),
    (
        "attention over blocked masks: `wq`, `wk`, `wv`, `dense`",
        "TensorFlow's tutorial",
    ),
)
