"""``tfast.attention_packed`` through its door, and its oracle against the padded one."""

import math

import pytest
import torch

from transformer_fast.packing import packing_of, take
from transformer_fast.reference.attention import attention as padded_reference
from transformer_fast.reference.attention import attention_packed as reference

LENGTHS_Q, LENGTHS_K = torch.tensor([7, 0, 3, 17, 1]), torch.tensor([7, 4, 0, 33, 1])
H, HKV, D = 4, 2, 20
SCALE = 1 / math.sqrt(D)


def batch(self_attention, dtype=torch.float64, device="cpu"):
    """A padded batch (q, k, v, grad_out, each (B, L, heads, D)) and how its queries and keys are packed."""
    generator = torch.Generator().manual_seed(3)
    lengths_k = LENGTHS_Q if self_attention else LENGTHS_K
    packings = [packing_of(n, len(n), int(n.max()), device) for n in (LENGTHS_Q, lengths_k)]
    queries, keys = packings
    shapes = [(5, queries.length, H, D), *[(5, keys.length, HKV, D)] * 2, (5, queries.length, H, D)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes], *packings


def options(queries, keys):
    return {
        "cu_seqlens_q": queries.cu_seqlens,
        "cu_seqlens_k": keys.cu_seqlens,
        "max_q": queries.max_length,
        "max_k": keys.max_length,
    }


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("self_attention", [False, True])
def test_the_oracle_is_the_padded_one_without_its_padding(self_attention, causal, dropout_p):
    (q, k, v, grad), queries, keys = batch(self_attention)
    seed = torch.tensor([11])
    same = {"scale": SCALE, "dropout_p": dropout_p, "seed": seed}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, _, logsumexp = padded_reference(
        *(t.transpose(1, 2) for t in leaves),
        lengths=keys.cu_seqlens.diff(),
        causal=0 if causal else None,
        empty_rows="zero",
        **same,
    )
    expected = take(out.transpose(1, 2), queries)
    grads = torch.autograd.grad(expected, leaves, take(grad, queries))

    tokens = [take(t, packing) for t, packing in zip(leaves, (queries, keys, keys))]
    packed, packed_logsumexp = reference(*tokens, **options(queries, keys), causal=causal, **same)
    assert torch.allclose(packed, expected, atol=1e-12)
    assert torch.allclose(packed_logsumexp.t(), take(logsumexp.transpose(1, 2), queries), atol=1e-12)
    for actual, truth in zip(torch.autograd.grad(packed, leaves, take(grad, queries)), grads):
        assert torch.allclose(actual, truth, atol=1e-12)
