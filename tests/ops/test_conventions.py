"""Answers of the attention functions to questions on which libraries differ; docs/elsewhere.md has other answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_fast as tfast

B, H, LQ, LK, D = 3, 2, 4, 5, 8
"""All sizes differ, so that no axis of a mask is taken for another."""
TAKEN = (LQ, LK), (B, 1, 1, LK), (B, 1, LQ, LK), (B, H, LQ, LK)
REFUSED = (B, LK), (B, LQ, LK)


def inputs(queries: int = LQ, keys: int = LK) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, H, queries, D), torch.randn(B, H, keys, D), torch.randn(B, H, keys, D)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """A bool mask is a keep mask, a float mask is the bias."""
    given = {"mask": mask} if mask.dtype == torch.bool else {"bias": mask}
    return tfast.attention(q, k, v, **given, **options)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "scaled_dot_product_attention": tfast.scaled_dot_product_attention,
}


def plain(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5 + added).softmax(-1) @ v


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", TAKEN, ids=str)
def test_true_keeps_and_a_float_mask_is_added(shape: tuple[int, ...], name: str) -> None:
    q, k, v = inputs()
    keep = torch.rand(shape) < 0.5
    keep[..., 0], keep[..., -1] = True, False  # no row is empty, as the mask is and inverted
    blocking = torch.zeros(shape).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(FUNCTIONS[name](q, k, v, keep), plain(q, k, v, blocking))
    torch.testing.assert_close(FUNCTIONS[name](q, k, v, keep.float()), plain(q, k, v, keep.float()))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float])
@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_a_mask_without_an_axis_for_heads_is_refused(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        FUNCTIONS[name](*inputs(), torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("blocked", [False, -torch.inf], ids=["bool", "-inf"])
def test_a_query_without_keys(blocked: float) -> None:
    q, k, v = inputs()
    mask = torch.ones(LQ, LK, dtype=torch.bool) if blocked is False else torch.zeros(LQ, LK)
    mask[2] = blocked
    torch.testing.assert_close(attention(q, k, v, mask)[:, :, 2], v.mean(2))
    assert not attention(q, k, v, mask, empty_rows="zero")[:, :, 2].any()
    assert not tfast.scaled_dot_product_attention(q, k, v, mask)[:, :, 2].any()


def test_corners_of_a_causal_mask() -> None:
    """Two queries and four keys: query 0 sees one key from the top left, and three keys from the bottom right."""
    q, k, v = inputs(2, 4)
    top, bottom = (plain(q, k, v, torch.full((2, 4), -torch.inf).triu(n)) for n in (1, 3))
    by_flash = tfast.compat.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)
    torch.testing.assert_close(tfast.attention(q, k, v, causal=True), top)
    torch.testing.assert_close(tfast.scaled_dot_product_attention(q, k, v, is_causal=True), top)
    torch.testing.assert_close(tfast.attention(q, k, v, causal=2), bottom)
    torch.testing.assert_close(by_flash, bottom)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_dropout_with_a_mask_scales_the_rest(name: str) -> None:
    """Values of 1 make an output the sum of its weights."""
    q, k, v = inputs(LQ, 64)
    out = FUNCTIONS[name](q, k, torch.ones_like(v), torch.ones(LQ, 64, dtype=torch.bool), dropout_p=0.5)
    assert (out - 1).abs().max() > 0.01 and 0.7 < out.mean() < 1.3
