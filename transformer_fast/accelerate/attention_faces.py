"""The faces of attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.attention import layer_mask
from ..layers.norm import active_dropout
from ..masks import AttentionMask
from .faces import Face, Weights, children, is_dropout, own_parameters


def keep_mask(mask: Tensor | AttentionMask | None) -> Tensor | AttentionMask | None:
    """A keep mask of any dtype: 0 = blocked."""
    return mask != 0 if isinstance(mask, Tensor) and mask.dtype != torch.bool else mask


def some_keep(*shape: int) -> Tensor:
    """A random keep mask with no empty row."""
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True
    return keep


def remember(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> None:
    """Leave what the weights (B, H, Lq, Lk) can be computed from; see :class:`~.faces.Weights`."""
    if torch.compiler.is_compiling():
        return
    q, k, v = q.detach(), k.detach(), v.detach()

    def weights(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module.face_shaped(ops.attention(q, k, v, mask, return_weights=True)[1])

    module.__dict__["_recall"] = weights


class HeadsFace(Face):
    """Multi-head attention (q, k, v, mask) over keep masks that get their head axis here."""

    face_linears = ("q_linear", "k_linear", "v_linear", "out")
    face_skips: tuple[str, ...] = ("dropout",)
    face_head_axis = True

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) - {"attention"} != {*cls.face_linears, "dropout"} or own_parameters(module):
            return False
        linears = cls.face_projections(module)
        widths = {m.out_features if isinstance(m, nn.Linear) else None for m in linears}
        return len(linears) == 4 and widths == {module.h * module.d_k} and is_dropout(module.dropout)

    @classmethod
    def face_projections(cls, module: nn.Module) -> tuple[nn.Module, ...]:
        """The linear layers of queries, keys, values and of the output."""
        return tuple(getattr(module, name) for name in cls.face_linears)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        d = cls.face_projections(module)[0].in_features
        x, memory, value = torch.randn(2, 5, d), torch.randn(2, 3, d), torch.randn(2, 3, d)
        yield x, memory, value
        for mask in (some_keep(2, 1, 3), some_keep(2, 5, 3)):
            yield x, memory, value, mask if cls.face_head_axis else mask.unsqueeze(1)

    def face_fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any) -> Tensor:
        *linears, out = self.face_projections(self)
        by_head = self.h, self.d_k
        q, k, v = (
            linear(x).unflatten(-1, by_head).transpose(-3, -2) for linear, x in zip(linears, (query, key, value))
        )
        mask = keep_mask(mask)
        if self.face_head_axis:
            mask = layer_mask(mask)
        elif isinstance(mask, Tensor):
            mask = AttentionMask.keep(mask)
        heads = ops.attention(q, k, v, mask, dropout_p=active_dropout(self.dropout))
        self.face_remember(q, k, v, mask)
        return out(heads.transpose(-3, -2).flatten(-2))

    def face_remember(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | None) -> None:
        """Nothing, where the module leaves no weights behind."""


class ClassicHeadsFace(HeadsFace):
    """``q_linear``, ``k_linear``, ``v_linear``, ``out``; ``verbose`` prints the weights."""

    def forward(self, *args: Any, cache: None = None, **kwargs: Any) -> Tensor:
        # The decoder layer's face is our decoder layer, which says that there is no cache.
        return super().forward(*args, **kwargs)

    def face_fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, verbose: bool = False) -> Tensor:
        if verbose:
            return super(Face, self).forward(query, key, value, mask, verbose)
        return super().face_fused(query, key, value, mask)


class AnnotatedHeadsFace(HeadsFace):
    """Four ``linears``; the weights of the last call in ``attn``."""

    face_linears = ("linears",)
    attn, face_leaves = Weights(), ("attn",)
    face_remember = remember

    @staticmethod
    def face_shaped(weights: Tensor) -> Tensor:
        """As this module leaves them."""
        return weights

    @classmethod
    def face_projections(cls, module: nn.Module) -> tuple[nn.Module, ...]:
        return tuple(module.linears)


class BertHeadsFace(HeadsFace):
    """Three ``linear_layers`` and an ``output_linear``; masks come with their head axis."""

    face_linears = ("linear_layers", "output_linear")
    face_does = ("attention",)
    face_head_axis = False

    @classmethod
    def face_projections(cls, module: nn.Module) -> tuple[nn.Module, ...]:
        return *module.linear_layers, module.output_linear


class TensorflowHeadsFace(Face):
    """``wq``, ``wk``, ``wv``, ``dense``: (v, k, q, mask) -> (out, weights), 1.0 = blocked, no dropout."""

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        names = ("wq", "wk", "wv", "dense")
        if children(module) != set(names) or not isinstance(getattr(module, "num_heads", None), int):
            return False
        return all(isinstance(getattr(module, name), nn.Linear) for name in names)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        v, k, q = (torch.randn(2, n, m.in_features) for n, m in ((3, module.wv), (3, module.wk), (5, module.wq)))
        yield v, k, q, None
        for shape in ((2, 1, 1, 3), (5, 3)):
            yield v, k, q, 1.0 - some_keep(*shape).to(q.dtype)

    def face_fused(
        self, v: Tensor, k: Tensor, q: Tensor, mask: Tensor | None = None, weights: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        by_head = (self.num_heads, -1)
        q, k, v = (
            linear(x).unflatten(-1, by_head).transpose(1, 2) for linear, x in ((self.wq, q), (self.wk, k), (self.wv, v))
        )
        mask = None if mask is None else AttentionMask.blocked(mask)
        result = ops.attention(q, k, v, mask, return_weights=weights)
        out, weights = result if weights else (result, None)
        return self.dense(out.transpose(1, 2).flatten(-2)), weights
