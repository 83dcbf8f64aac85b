"""Gradients for a nearly one-hot softmax: weights are 1, and the true gradient is almost 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import transformer_fast as tfast

SIZES = ((16, 64), (64, 64), (128, 64), (160, 64), (256, 32))
TIMES_EAGER = {1: 2.5, 10: 6.0, 30: 8.0}
"""Largest error of a gradient in float32, in errors of eager, by the score of a query's own key."""


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def largest_ratio(function: Callable[..., Tensor], scale: float, dtype: torch.dtype) -> float:
    """Return the error of the gradients of q and k over eager's, where each query is its own key."""
    ratios = []
    for L, D in SIZES:
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            k, v, grad = torch.randn(3, 1, 2, L, D, generator=generator).to(dtype)
            q = k * (scale / D**0.5)

            def gradients(f: Callable[..., Tensor], *given: Tensor, grad: Tensor = grad) -> tuple[Tensor, ...]:
                leaves = [t.clone().requires_grad_() for t in given]
                return torch.autograd.grad(f(*leaves), leaves[:2], grad.to(leaves[0].dtype))

            exact = gradients(eager, *(t.double() for t in (q, k, v)))
            errors = [
                [(found.double() - true).abs().max().item() for found, true in zip(gradients(f, q, k, v), exact)]
                for f in (function, eager)
            ]
            ratios += [ours / theirs for ours, theirs in zip(*errors)]
    return max(ratios)


@pytest.mark.parametrize("scale", TIMES_EAGER)
def test_the_error_is_within_what_the_docs_say(scale: int) -> None:
    assert largest_ratio(tfast.attention, scale, torch.float32) <= TIMES_EAGER[scale]
    assert largest_ratio(tfast.attention, scale, torch.bfloat16) <= 4.0


@pytest.mark.parametrize("mask", [tfast.AttentionMask(), tfast.AttentionMask.lengths(torch.tensor([30, 0]))])
@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, 25.0])])
def test_masks_sinks_and_the_logsumexp_beside_sharp_scores(mask: tfast.AttentionMask, sinks: Tensor | None) -> None:
    k, v = torch.randn(2, 2, 2, 48, 32, generator=torch.Generator().manual_seed(0))

    def gradients(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in (k * (30 / 32**0.5), k, v)]
        options = {"sinks": None if sinks is None else sinks.to(dtype), "dropout_p": 0.2}
        torch.manual_seed(0)
        with tfast.backend(backend):
            out, logsumexp = tfast.attention(*leaves, mask, return_logsumexp=True, **options)
        finite = logsumexp.masked_fill(logsumexp.isinf(), 0.0)
        return torch.autograd.grad(out.square().sum() + finite.sum(), leaves)

    exact = gradients("reference", torch.float64)
    for ours, true in zip(gradients("native", torch.float32), exact):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=2e-5)


def test_what_is_said_of_pytorch() -> None:
    """PyTorch's fused kernel has the larger error too, so the gate does not apply to sharp scores."""
    assert largest_ratio(F.scaled_dot_product_attention, 30, torch.float32) > 10.0
