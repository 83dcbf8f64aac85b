"""What the C++ attention kernels give beside the output: the gradient that comes in through the logsumexp."""

import math

import pytest
import torch
from helpers import assert_as_exact_as_eager, mask_parts, poisoned_memory

from transformer_fast.kernels import extension
from transformer_fast.reference.attention import attention as reference

SEED = torch.tensor([-987_654_321_987], dtype=torch.int64)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
MASKS = list(mask_parts(1, 1, 1, 1, torch.Generator()))


@pytest.fixture(autouse=True, scope="module")
def _extension() -> None:
    assert extension.load(), extension.status()


def inputs(B, H, Hkv, Lq, Lk, D, dtype):
    """q, k, v and the gradient of the output."""
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def tail(parts, D, dropout_p, empty_rows):
    named = (parts.get(name) for name in ("keep", "key_keep", "lengths", "bias", "causal"))
    return *named, 1 / math.sqrt(D), dropout_p, SEED if dropout_p else None, empty_rows == "zero"


def oracle(q, k, v, parts, dropout_p, empty_rows, dtype):
    """Leaves, output, weights and logsumexp of the reference in ``dtype``."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    if parts.get("bias") is not None:
        parts = {**parts, "bias": parts["bias"].to(dtype)}
    options = {"scale": 1 / math.sqrt(q.shape[-1]), "dropout_p": dropout_p, "seed": SEED, "empty_rows": empty_rows}
    return leaves, *reference(*leaves, **parts, **options)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("Lq, Lk", [(70, 150), (33, 40), (2, 150), (1, 40)])
def test_gradient_through_the_logsumexp(Lq, Lk, dtype, empty_rows):
    q, k, v, grad_out = inputs(2, 4, 2, Lq, Lk, 24, dtype)
    parts = {"lengths": torch.tensor([0, Lk - 7], dtype=torch.int32), "causal": Lk - Lq}
    options = tail(parts, 24, 0.1, empty_rows)
    ops = torch.ops.transformer_fast_native
    out, logsumexp = ops.attention_forward(q, k, v, *options)
    grad_logsumexp = torch.randn_like(logsumexp)
    with poisoned_memory():
        actual = ops.attention_backward(grad_out, q, k, v, out, logsumexp, *options, grad_logsumexp)
    without = ops.attention_backward(grad_out, q, k, v, out, logsumexp, *options)

    def gradients(wide):
        leaves, out, _, logsumexp = oracle(q, k, v, parts, 0.1, empty_rows, wide)
        return torch.autograd.grad(
            (out, logsumexp), leaves, (grad_out.to(wide), grad_logsumexp.to(logsumexp.dtype)), materialize_grads=True
        )

    for name, a, e, x in zip("qkv", actual, gradients(dtype), gradients(torch.float64)):
        ulps = 8.0 if dtype != torch.float64 else 8.0 * Lk**0.5
        assert_as_exact_as_eager(a, e, x, what=f"gradient of {name}", ulps=ulps)
    assert not torch.equal(actual[0], without[0]) and torch.equal(actual[2], without[2])
    assert actual[0][0].eq(0).all(), "an empty row has no gradient"
