"""``unpad_input`` and ``pad_input`` against loops over the rows of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_fast.compat import flash_attn_func, flash_attn_varlen_func, pad_input, unpad_input

B, L = 4, 6
MASKS = {
    "right": torch.arange(L) < torch.tensor([4, 6, 0, 1])[:, None],
    "left": torch.arange(L) >= torch.tensor([4, 0, 6, 1])[:, None],
    "gaps": torch.tensor([[1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool(),
    "full": torch.ones(B, L, dtype=torch.bool),
    "empty": torch.zeros(B, L, dtype=torch.bool),
}
UNUSED = torch.tensor([[0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])


def by_loops(x: Tensor, used: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    places = [(b, i) for b in range(x.shape[0]) for i in range(x.shape[1]) if kept[b, i]]
    tokens = torch.stack([x[b, i] for b, i in places]) if places else x.new_zeros(0, *x.shape[2:])
    indices = torch.tensor([b * x.shape[1] + i for b, i in places], dtype=torch.int64)
    lengths = [sum(row) for row in kept.tolist()]
    starts = torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32)
    return tokens, indices, starts, max(lengths), torch.tensor([sum(row) for row in used.tolist()], dtype=torch.int32)


def assert_same(actual: tuple[Tensor | int, ...], expected: tuple[Tensor | int, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("middle", [(), (3,), (2, 3)])
def test_there_and_back(mask: str, dtype: torch.dtype, unused: bool, middle: tuple[int, ...]) -> None:
    x = torch.randn(B, L, *middle, dtype=torch.float64, requires_grad=True)
    used = MASKS[mask]
    more = (UNUSED.to(dtype),) if unused else ()
    kept = used | UNUSED.bool() if unused else used
    result = unpad_input(x, used.to(dtype), *more)
    expected = by_loops(x, used, kept)
    assert_same(result, expected)
    grad = torch.randn_like(result[0])
    by_indices = torch.where(kept.view(B, L, *(1 for _ in middle)), pad_input(grad, expected[1], B, L), 0.0)
    assert torch.equal(torch.autograd.grad(result[0], x, grad)[0], by_indices)

    tokens = result[0].detach().requires_grad_()
    padded = pad_input(tokens, result[1], B, L)
    at_places = kept.view(B, L, *(1 for _ in middle))
    assert torch.equal(padded, torch.where(at_places, x, 0.0))
    grad = torch.randn_like(padded)
    assert torch.equal(torch.autograd.grad(padded, tokens, grad)[0], by_loops(grad, used, kept)[0])


def test_the_order_of_the_indices_counts() -> None:
    x = torch.arange(6.0).view(6, 1)
    assert pad_input(x, torch.tensor([5, 4, 3, 2, 1, 0]), 2, 3).flatten().tolist() == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_the_tokens_are_a_copy() -> None:
    x = torch.ones(B, L, 3)
    unpad_input(x, MASKS["full"])[0].zero_()
    assert x.all()


def test_no_sequences() -> None:
    tokens, indices, starts, longest, used = unpad_input(torch.ones(0, L, 3), torch.ones(0, L).bool())
    assert tokens.shape == (0, 3) and indices.shape == (0,) and starts.tolist() == [0] and longest == 0
    assert used.shape == (0,) and pad_input(tokens, indices, 0, L).shape == (0, L, 3)


def test_padding_around_flash_attention() -> None:
    q, k, v = (torch.randn(2, 5, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    packed = [unpad_input(t, mask) for t in (q, k, v)]
    _, indices, starts, longest, _ = packed[0]
    tokens = flash_attn_varlen_func(*(t[0] for t in packed), starts, starts, longest, longest, causal=True)
    out = pad_input(tokens, indices, 2, 5)
    expected = torch.cat(
        [
            pad_input(flash_attn_func(*(t[b : b + 1, :n] for t in (q, k, v)), causal=True)[0], torch.arange(n), 1, 5)
            for b, n in enumerate([3, 5])
        ]
    )
    assert torch.allclose(out, expected)
    grad = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad(t, (q, k, v), grad) for t in (out, expected)), strict=True):
        assert torch.allclose(one, other)


X, MASK = torch.randn(2, 3, 4), torch.ones(2, 3).bool()
WRONG = {
    "list": (unpad_input, ([[1.0]], MASK), TypeError, "hidden_states must be a tensor (B, L, ...), got list"),
    "vector": (unpad_input, (X[0, 0], MASK), ValueError, "hidden_states must be (B, L, ...), got shape (4,)"),
    "float mask": (
        unpad_input,
        (X, MASK.float()),
        TypeError,
        "attention_mask must be a bool or integer tensor (B, L), got",
    ),
    "no mask": (
        unpad_input,
        (X, None),
        TypeError,
        "attention_mask must be a bool or integer tensor (B, L), got NoneType",
    ),
    "mask of keys": (
        unpad_input,
        (X, MASK[:, None]),
        ValueError,
        "attention_mask must be (B, L) = (2, 3), got shape (2, 1, 3)",
    ),
    "unused": (unpad_input, (X, MASK, MASK[:1]), ValueError, "unused_mask must be (B, L) = (2, 3), got shape (1, 3)"),
    "tokens": (pad_input, (None, MASK, 2, 3), TypeError, "hidden_states must be a tensor, got NoneType"),
    "int32": (pad_input, (X, torch.arange(2).int(), 2, 3), TypeError, "indices must be int64 (T,), got torch.int32"),
    "too few": (pad_input, (X, torch.arange(1), 2, 3), ValueError, "got shapes (1,) and (2, 3, 4)"),
    "past the batch": (pad_input, (X, torch.tensor([0, 6]), 2, 3), IndexError, "index"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    function, args, error, text = WRONG[case]
    with pytest.raises(error) as raised:
        function(*args)
    assert text in str(raised.value)
