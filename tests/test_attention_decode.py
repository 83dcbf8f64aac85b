"""``tfast.attention_decode`` through its door, and its oracle against attention over each cache alone."""

import math

import pytest
import torch

from transformer_fast.reference.attention import attention as plain_reference
from transformer_fast.reference.attention import attention_decode as reference

H, HKV, D, S = 4, 2, 20, 40
SCALE = 1 / math.sqrt(D)
LENGTHS = torch.tensor([40, 1, 0, 17, 33], dtype=torch.int32)


def caches(Lq, dtype=torch.float64, device="cpu"):
    """Queries and a contiguous cache whose unused places hold NaN."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in [(5, H, Lq, D), (5, HKV, S, D), (5, HKV, S, D)]
    )
    unused = torch.arange(S) >= LENGTHS[:, None]
    for cache in (k, v):
        cache.masked_fill_(unused[:, None, :, None].to(device), float("nan"))
    return q, k, v


def paged(cache, page_size=8):
    """The same cache in pages that lie in disorder, and the table that says where; entries past the end are wild."""
    B, Hkv, length, dim = cache.shape
    pages = cache.transpose(1, 2).reshape(B * length // page_size, page_size, Hkv, dim)
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(pages.shape[0], generator=generator)
    table = torch.argsort(order).view(B, -1).to(torch.int32)
    used = (LENGTHS[:, None] + page_size - 1) // page_size
    table[torch.arange(table.shape[1]) >= used] = 2**30
    return pages[order.to(cache.device)], table.to(cache.device)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("Lq", [1, 3])
def test_the_oracle_is_attention_over_each_cache_alone(Lq, causal):
    q, k, v = caches(Lq)
    out, logsumexp = reference(q, k, v, lengths=LENGTHS, causal=causal, scale=SCALE)
    for b, n in enumerate(LENGTHS.tolist()):
        expected, _, expected_logsumexp = plain_reference(
            q[b : b + 1],
            k[b : b + 1, :, :n],
            v[b : b + 1, :, :n],
            causal=n - Lq if causal else None,
            scale=SCALE,
            empty_rows="zero",
        )
        assert torch.allclose(out[b], expected[0], atol=1e-12)
        assert torch.allclose(logsumexp[b], expected_logsumexp[0], atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_the_oracle_reads_pages_as_it_reads_one_piece(causal):
    q, k, v = caches(2)
    (pages_k, table), (pages_v, _) = paged(k), paged(v)
    expected = reference(q, k, v, lengths=LENGTHS, causal=causal, scale=SCALE)
    actual = reference(q, pages_k, pages_v, lengths=LENGTHS, page_table=table, causal=causal, scale=SCALE)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)
