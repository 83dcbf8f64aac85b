"""Lengths, ids and keep masks of every integer type, with more keys than the narrow types can count.

Each call is made in every way that reaches an op: eagerly, compiled, exported, traced, and as on a device whose
values cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.dialects import d2l
from transformer_fast.masks.checks import INTEGERS, clamped
from transformer_fast.ops import attention_checks, eager

KEYS, QUERIES, H, D = 300, 2, 2, 8


def lengths(dtype: torch.dtype, *shape: int) -> Tensor:
    given = torch.randint(3, min(KEYS, torch.iinfo(dtype).max) + 1, shape)
    given.view(-1)[0] = min(KEYS, torch.iinfo(dtype).max)
    return given.to(dtype)


def per_query(dtype: torch.dtype) -> Tensor:
    return lengths(dtype, 3, QUERIES)


def attended(mask: Callable[[Tensor], AttentionMask]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, t: tfast.attention(q, k, k, mask(t))


def documents(t: Tensor) -> AttentionMask:
    return AttentionMask.documents(t[:, :QUERIES], t)


def unpacked(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    tokens, packing = tfast.pack(k.flatten(0, 1), t.repeat_interleave(H))
    return tfast.unpack(tokens * 2, packing)


Call = Callable[[Tensor, Tensor, Tensor], Tensor]
CALLS: dict[str, tuple[Call, Callable[[torch.dtype], Tensor]]] = {
    "lengths": (attended(AttentionMask.lengths), lambda dtype: lengths(dtype, 3)),
    "lengths for all": (attended(AttentionMask.lengths), lambda dtype: lengths(dtype, 1)),
    "lengths per query": (attended(AttentionMask.lengths), per_query),
    "two lengths": (
        attended(lambda t: AttentionMask.lengths(t) & AttentionMask.lengths(torch.tensor([290, 100, 4]))),
        lambda dtype: lengths(dtype, 3),
    ),
    "prefix": (attended(AttentionMask.prefix), lambda dtype: lengths(dtype, 3)),
    "documents": (attended(documents), lambda dtype: torch.randint(0, 3, (3, KEYS)).to(dtype)),
    "keep": (
        attended(lambda t: AttentionMask.keep(t[:, None, None])),
        lambda dtype: torch.randint(0, 2, (3, KEYS)).to(dtype),
    ),
    "masked_softmax": (lambda q, k, t: d2l.masked_softmax(q[:, 0] @ k[:, 0].mT, t), lambda dtype: lengths(dtype, 3)),
    "pack": (unpacked, lambda dtype: lengths(dtype, 3)),
}
WAYS = "eager", "reference", "device", "compiled", "exported"


class Module(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        return self.call(q, k, t)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_integer_type(name: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, numbers = CALLS[name]
    given = torch.randn(3, H, QUERIES, D), torch.randn(3, H, KEYS, D), numbers(dtype)
    expected = call(*given[:2], given[2].long())
    model = Module(call)
    if way == "compiled":
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(*given)
    elif way == "exported":
        found = torch.export.export(model, given).module()(*given)
    elif way == "device":
        monkeypatch.setattr(eager, "extension", SimpleNamespace(module=lambda: None))
        monkeypatch.setattr(attention_checks, "is_plain_on_cpu", lambda t: False)
        found = model(*given)
    else:
        with tfast.backend("auto" if way == "eager" else way):
            found = model(*given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("bounds", [(0, KEYS), (-200, 5), (1, 2**31 - 1), (-(2**31), 0)])
def test_clamped(dtype: torch.dtype, bounds: tuple[int, int]) -> None:
    """Bounds that a type cannot hold leave its numbers as they are."""
    limits = torch.iinfo(dtype)
    t = torch.tensor([limits.min, 0, 1, 100, limits.max], dtype=dtype)
    assert clamped(t, *bounds).tolist() == [min(max(n, bounds[0]), bounds[1]) for n in t.tolist()]
