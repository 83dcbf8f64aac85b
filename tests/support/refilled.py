"""Calls of every public op, and ways to write to a tensor that PyTorch does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_fast import AttentionMask, ops

B, H, L, D = 2, 2, 8, 4
TOKENS = 12


def by_numpy(t: Tensor, values: Tensor) -> None:
    t.detach().numpy()[...] = values.detach().numpy()


def by_data(t: Tensor, values: Tensor) -> None:
    t.data.copy_(values)


def by_dlpack(t: Tensor, values: Tensor) -> None:
    torch.from_dlpack(t.detach()).copy_(values)


REFILLS = {"numpy": by_numpy, "data": by_data, "dlpack": by_dlpack}

MASKS: dict[str, Callable[[Tensor], AttentionMask]] = {
    "lengths int64": AttentionMask.lengths,
    "lengths int32": AttentionMask.lengths,
    "lengths int16": AttentionMask.lengths,
    "lengths per query": AttentionMask.lengths,
    "lengths for all queries": AttentionMask.lengths,
    "documents int64": AttentionMask.documents,
    "documents int32": AttentionMask.documents,
    "documents past int32": AttentionMask.documents,
    "keys of documents": lambda t: AttentionMask.documents(torch.arange(L).view(1, L) // 3, t),
    "keep": AttentionMask.keep,
    "keep of keys": AttentionMask.keep,
    "bias": AttentionMask.bias,
    "alibi": AttentionMask.alibi,
    "relative": AttentionMask.relative,
}
COPIED_MASKS = {"keep of integers": AttentionMask.keep, "blocked": AttentionMask.blocked}
"""Masks that hold a copy of the tensor, so that one made before a write is of what was there."""


def mask_tensor(name: str, draw: torch.Generator) -> Tensor:
    """What a mask of :data:`MASKS` is made of, with random values."""

    def integers(*shape: int, low: int = 0, high: int = L + 1, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=draw).to(dtype)

    documents = integers(B, L, high=3).sort(1).values
    return {
        "lengths int64": lambda: integers(B, low=1),
        "lengths int32": lambda: integers(B, low=1, dtype=torch.int32),
        "lengths int16": lambda: integers(B, low=1, dtype=torch.int16),
        "lengths per query": lambda: integers(B, L, low=2),
        "lengths for all queries": lambda: integers(B, 1, low=1),
        "documents int64": lambda: documents,
        "documents int32": lambda: documents.int(),
        "documents past int32": lambda: documents * 2**40,
        "keys of documents": lambda: documents,
        "keep": lambda: integers(B, 1, L, L, high=2).bool(),
        "keep of keys": lambda: integers(B, 1, 1, L, high=2).bool(),
        "keep of integers": lambda: integers(B, 1, L, L, high=2),
        "blocked": lambda: integers(B, 1, 1, L, high=2).float(),
        "bias": lambda: torch.randn(H, L, L, generator=draw),
        "alibi": lambda: torch.rand(H, generator=draw),
        "relative": lambda: torch.randn(8, H, generator=draw),
    }[name]()


class Call(NamedTuple):
    """A call of a public op.

    Args:
        op: its name in ``transformer_fast.ops``.
        tensors: its tensors, by the names of ``compute``, with random values.
        compute: the outputs.
    """

    op: str
    tensors: Callable[[torch.Generator], dict[str, Tensor]]
    compute: Callable[..., Any]


def _floats(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    return lambda draw: {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def _with(tensors: Callable[..., dict[str, Tensor]], **more: Callable[[torch.Generator], Tensor]) -> Any:
    return lambda draw: tensors(draw) | {name: make(draw) for name, make in more.items()}


def _ids(*shape: int, below: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.Generator], Tensor]:
    return lambda draw: torch.randint(0, below, shape, generator=draw).to(dtype)


def _starts(draw: torch.Generator) -> Tensor:
    middle = int(torch.randint(1, TOKENS, (), generator=draw))
    return torch.tensor([0, middle, TOKENS], dtype=torch.int32)


QKV = _floats(q=(B, H, L, D), k=(B, H, L, D), v=(B, H, L, D))
PACKED = _with(_floats(q=(TOKENS, H, D), k=(TOKENS, H, D), v=(TOKENS, H, D)), starts=_starts)
DECODE = _with(
    _floats(q=(B, H, 2, D), k=(B, H, L, D), v=(B, H, L, D)),
    lengths=lambda draw: torch.randint(2, L + 1, (B,), generator=draw),
)
PAGED = _with(
    _floats(q=(B, H, 2, D), k=(6, 4, H, D), v=(6, 4, H, D)),
    lengths=lambda draw: torch.randint(2, L + 1, (B,), generator=draw).int(),
    pages=_ids(B, 2, below=6, dtype=torch.int32),
)
_SLOPES = {"slopes": lambda draw: torch.rand(H, generator=draw)}
_X = {"x": (B, L, D), "weight": (D,), "bias": (D,), "residual": (B, L, D)}

CALLS = {
    "packed": Call(
        "attention_packed", PACKED, lambda q, k, v, starts: ops.attention_packed(q, k, v, starts, starts, causal=True)
    ),
    "packed, of a logsumexp": Call(
        "attention_packed",
        PACKED,
        lambda q, k, v, starts: ops.attention_packed(q, k, v, starts, starts, return_logsumexp=True),
    ),
    "packed documents": Call(
        "attention_packed",
        _with(PACKED, ids=_ids(1, TOKENS, below=3)),
        lambda q, k, v, starts, ids: ops.attention_packed(
            q, k, v, starts, starts, mask=AttentionMask.documents(ids), dropout_p=0.2
        ),
    ),
    "packed distances": Call(
        "attention_packed",
        _with(PACKED, **_SLOPES, sinks=lambda draw: torch.randn(H, generator=draw)),
        lambda q, k, v, starts, slopes, sinks: ops.attention_packed(
            q, k, v, starts, starts, mask=AttentionMask.alibi(slopes), sinks=sinks, softcap=3.0
        ),
    ),
    "decode": Call("attention_decode", DECODE, lambda **t: _decode(**t)),
    "decode, paged": Call("attention_decode", PAGED, lambda **t: _decode(**t)),
    "decode, capped": Call("attention_decode", DECODE, lambda **t: _decode(**t, softcap=3.0)),
    "decode documents": Call(
        "attention_decode",
        _with(DECODE, queries=_ids(B, 2, below=2), keys=_ids(B, L, below=2)),
        lambda queries, keys, **t: _decode(**t, mask=AttentionMask.documents(queries, keys)),
    ),
    "decode distances": Call(
        "attention_decode",
        _with(DECODE, **_SLOPES),
        lambda slopes, **t: _decode(**t, mask=AttentionMask.alibi(slopes)),
    ),
    "sdpa, bool mask": Call(
        "scaled_dot_product_attention",
        _with(QKV, attn_mask=lambda draw: mask_tensor("keep", draw)),
        lambda q, k, v, attn_mask: ops.scaled_dot_product_attention(q, k, v, attn_mask),
    ),
    "sdpa, float mask": Call(
        "scaled_dot_product_attention",
        _with(QKV, attn_mask=lambda draw: mask_tensor("bias", draw)),
        lambda q, k, v, attn_mask: ops.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p=0.2),
    ),
    "norm": Call("layer_norm", _floats(**_X), lambda **t: ops.layer_norm(**t, dropout_p=0.2)),
    "rms norm": Call("layer_norm", _floats(x=(B, L, D), weight=(D,)), lambda **t: _rms(**t)),
    "embedding": Call(
        "embed",
        _with(_floats(weight=(11, D), table=(L, D)), ids=_ids(B, L, below=11)),
        lambda ids, weight, table: ops.embed(ids, weight, table, padding_idx=0, dropout_p=0.2),
    ),
    "positions": Call("add_positional", _floats(x=(B, L, D), table=(L, D)), ops.add_positional),
    "dropout": Call("dropout", _floats(x=(B, L, D)), lambda x: ops.dropout(x, 0.3)),
    "linear": Call("linear", _floats(x=(64, 64), weight=(64, 64), bias=(64,)), ops.linear),
    "loss": Call(
        "linear_cross_entropy",
        _with(_floats(x=(B, L, D), weight=(11, D), bias=(11,)), target=_ids(B, L, below=11)),
        lambda x, weight, bias, target: ops.linear_cross_entropy(x, weight, bias, target, label_smoothing=0.1),
    ),
}


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return ops.layer_norm(x, weight, None, kind="rms")


def _decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None = None, **options: Any) -> Tensor:
    return ops.attention_decode(q, k, v, lengths, page_table=pages, **options)
