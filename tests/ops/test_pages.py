"""Results in new memory at every call (csrc/cpu/simd/prefault.h) equal those of a few rows at a time, bit by bit.

glibc asks the system for every block of 32 MiB or more, so such a result is new memory; a few rows are not asked for.
"""

from __future__ import annotations

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import ops

ROWS, D = 8300, 1031  # 34 MB of float32; rows that end inside a page and inside a vector
FEW = 83


def by_few_rows(op, *inputs):
    """Compute op on FEW rows at a time and concatenate the results."""
    parts = [op(*(x[first : first + FEW] for x in inputs)) for first in range(0, ROWS, FEW)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def norm_with_gradients(x, residual, grad):
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    out, summed = tfast.layer_norm(x, None, None, residual=residual)
    return out.detach(), summed.detach(), *torch.autograd.grad(out, (x, residual), grad)


@pytest.mark.parametrize(
    ("inputs", "op"),
    [
        (1, lambda x: (tfast.layer_norm(x, None, None),)),
        (2, lambda x, residual: tfast.layer_norm(x, None, None, residual=residual)),
        (3, norm_with_gradients),
        (1, lambda x: (tfast.embed(torch.arange(len(x)), x, scale=2.0),)),
        (1, lambda x: (ops.dropout(x, 0.0, bias=torch.ones(D)),)),
    ],
    ids=["norm", "residual norm", "norm and its gradients", "embed", "dropout"],
)
def test_new_memory_holds_what_a_few_rows_hold(inputs, op):
    given = [torch.randn(ROWS, D) for _ in range(inputs)]
    for whole, few in zip(op(*given), by_few_rows(op, *given), strict=True):
        assert torch.equal(whole, few)
