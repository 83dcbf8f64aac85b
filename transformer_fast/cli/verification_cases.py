"""Cases of the parity table: computations of every op, with equal inputs on all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..masks import AttentionMask
from ..ops.dropout import dropout
from ..ops.embedding import add_positional

Tensors = dict[str, Tensor]
SEED = 20170612


class Case(NamedTuple):
    """A computation to check: `run` computes a tensor, or several, from the `inputs`, given in fp32 by its names."""

    op: str
    name: str
    inputs: Tensors
    run: Callable[..., Tensor | tuple[Tensor, ...]]


class Draw:
    """Random inputs that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) + shift).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


def wide_loss(x: Tensor, *args: Any, **options: Any) -> Tensor:
    """``linear_cross_entropy`` before it is rounded to a 16-bit dtype."""
    return ops.linear_cross_entropy(x, *args, **options, dtype=torch.promote_types(x.dtype, torch.float32))


def op_cases(device: torch.device) -> Iterator[Case]:
    """Cases of every op. Shapes are odd on purpose, so that no size is a multiple of a tile."""
    draw = Draw(device)
    yield from _attention_cases(draw)
    linear = {"x": draw.normal(70, 40), "weight": draw.normal(50, 40), "bias": draw.normal(50)}
    loss = partial(wide_loss, target=draw.integers(0, 50, 70), label_smoothing=0.1, ignore_index=3)
    yield Case("cross_entropy", "linear layer, label smoothing 0.1", linear, loss)

    plain = {"x": draw.normal(61, 3, 100, shift=2.0), "weight": draw.normal(100, shift=1.0), "bias": draw.normal(100)}
    added = plain | {"residual": draw.normal(61, 3, 100)}
    for kind, eps, name in (("layer", 1e-5, "LayerNorm"), ("std", 1e-6, "Norm (std)")):
        norm = partial(ops.layer_norm, eps=eps, kind=kind)
        yield Case("layer_norm", name, plain, norm)
        yield Case("layer_norm", f"{name}, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))
    plain, added = ({name: t for name, t in inputs.items() if name != "bias"} for inputs in (plain, added))
    norm = partial(ops.layer_norm, bias=None, eps=1e-6, kind="rms")
    yield Case("layer_norm", "RMSNorm", plain, norm)
    yield Case("layer_norm", "RMSNorm, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))

    ids, weight = draw.integers(0, 50, 7, 33), {"weight": draw.normal(50, 100)}
    table = ops.positional_table(64, 100).to(device)
    embed = partial(ops.embed, ids, table=table, scale=10.0)
    yield Case("embed", "scale + PE", weight, embed)
    dropping = partial(embed, dropout_p=0.1, padding_idx=0)
    yield Case("embed", "scale + PE + dropout 0.1, padding_idx 0", weight, dropping)
    yield Case("embed", "an offset for each sequence", weight, partial(embed, offset=ids[:, 0] // 2))
    adding = partial(add_positional, table=table, offset=5, dropout_p=0.1)
    yield Case("add_positional", "offset 5, dropout 0.1", {"x": draw.normal(7, 33, 100)}, adding)

    x = {"x": draw.normal(77, 100)}
    residual, bias = x | {"residual": draw.normal(77, 100)}, x | {"bias": draw.normal(100)}
    yield Case("dropout", "residual + dropout 0.1", residual, partial(dropout, p=0.1))
    yield Case("dropout", "ReLU, dropout 0.3", x, partial(dropout, p=0.3, relu=True))
    yield Case("dropout", "bias, ReLU, dropout 0.3", bias, partial(dropout, p=0.3, relu=True))


def _attention_cases(draw: Draw) -> Iterator[Case]:
    B, H, Lq, Lk, D = 3, 4, 45, 77, 40
    lengths = AttentionMask.lengths(torch.tensor([77, 1, 50], device=draw.device))
    look_ahead = lengths & AttentionMask.causal(10)
    keep = torch.rand(B, 1, Lq, Lk, generator=draw.generator).to(draw.device) < 0.5
    keep[0, 0, 3] = keep[2, 0, 44] = False  # rows without a key
    dense = AttentionMask.keep(keep)
    for name, mask, options in (
        ("no mask", None, {}),
        ("padding", lengths, {}),
        ("padding, look-ahead", look_ahead, {}),
        ("padding, look-ahead, dropout 0.1", look_ahead, {"dropout_p": 0.1}),
        ("dense mask with empty rows, dropout 0.1", dense, {"dropout_p": 0.1}),
        ("dense mask, empty rows give zero", dense, {"empty_rows": "zero"}),
        ("weights after dropout 0.1, padding", lengths, {"dropout_p": 0.1, "return_weights": "dropped"}),
    ):
        inputs = {"q": draw.normal(B, H, Lq, D), "k": draw.normal(B, H, Lk, D), "v": draw.normal(B, H, Lk, D)}
        yield Case("attention", name, inputs, partial(ops.attention, mask=mask, **options))
    inputs |= {"k": draw.normal(B, 2, Lk, D), "v": draw.normal(B, 2, Lk, D), "bias": draw.normal(1, H, Lq, Lk)}
    yield Case("attention", "grouped heads, padding, learned bias", inputs, partial(ops.attention, mask=lengths))
    yield from _cases_by_position(draw, {name: draw.normal(B, H, Lk, D) for name in "qkv"})
    starts = torch.tensor([0, 45, 46, 90], dtype=torch.int32, device=draw.device)
    packed = partial(ops.attention_packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, dropout_p=0.1)
    inputs = {name: draw.normal(90, H, D) for name in "qkv"}
    yield Case("attention_packed", "look-ahead, dropout 0.1", inputs, packed)


def _cases_by_position(draw: Draw, inputs: Tensors) -> Iterator[Case]:
    """Cases with documents, a prefix, biases by distance, a softcap and sinks; q, k and v (B, H, L, D)."""
    B, H, L, _ = inputs["q"].shape
    ids = torch.arange(L, device=draw.device).div(30, rounding_mode="floor").expand(B, L)
    documents = AttentionMask.documents(ids) & AttentionMask.causal()
    dropping = partial(ops.attention, mask=documents, dropout_p=0.1)
    yield Case("attention", "documents, look-ahead, dropout 0.1", inputs, dropping)

    prefix = AttentionMask.prefix(torch.arange(B, device=draw.device) * 20)
    yield Case("attention", "prefix, dropout 0.1", inputs, partial(ops.attention, mask=prefix, dropout_p=0.1))
    place = torch.arange(L, device=draw.device)
    union = AttentionMask.intervals(place - 40, place + 9) | AttentionMask.lengths(torch.full_like(place[:B], 7))
    yield Case("attention", "intervals, union, dropout 0.1", inputs, partial(ops.attention, mask=union, dropout_p=0.1))

    def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ops.attention(q, k, v, AttentionMask.alibi(slopes) & AttentionMask.causal())

    def relative(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return ops.attention(q, k, v, AttentionMask.relative(weight), dropout_p=0.1)

    yield Case("attention", "ALiBi, look-ahead", inputs | {"slopes": draw.normal(H).abs()}, alibi)
    yield Case("attention", "relative positions, dropout 0.1", inputs | {"weight": draw.normal(32, H)}, relative)
    capped = partial(ops.attention, softcap=5.0)
    yield Case("attention", "softcap 5, sinks", inputs | {"sinks": draw.normal(H)}, capped)
