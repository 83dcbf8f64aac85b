"""``tfast.attention_decode`` as users call it, and its oracle against attention over each cache."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import NATIVE, cached, in_pages

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.reference.attention import attention as plain_reference
from transformer_fast.reference.attention import attention_decode as reference
from transformer_fast.testing import assert_as_exact_as_eager

H, HKV, D, S = 4, 2, 20, 40
SCALE = D**-0.5
LENGTHS = [40, 1, 0, 17, 33]
# Causal and window offsets, from the query's own key on.
BOUNDS = [(0, None), (None, None), (0, -4), (None, -1), (-2, -20)]


@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("Lq", [1, 3])
def test_the_oracle_is_attention_over_each_cache_alone(Lq, causal, window):
    q, k, v, lengths = cached(NATIVE, H, HKV, Lq, S, D, LENGTHS, torch.float64)
    bounds = {"causal": causal, "window": window, "scale": SCALE}
    results = reference(q, k, v, lengths=lengths, **bounds)
    for b, n in enumerate(LENGTHS):
        own = {name: None if at is None else n - Lq + at for name, at in (("causal", causal), ("window", window))}
        one = q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]
        out, _, logsumexp = plain_reference(*one, **own, scale=SCALE, empty_rows="zero")
        for found, expected in zip(results, (out, logsumexp), strict=True):
            torch.testing.assert_close(found[b], expected[0], atol=1e-12, rtol=0)
    *pages, table = in_pages((k, v), 8, lengths)
    assert all(map(torch.equal, reference(q, *pages, lengths=lengths, page_table=table, **bounds), results))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
def test_the_logsumexp_beside_the_output(causal, window, backend, device):
    q, k, v, lengths = (t.to(device) for t in cached(NATIVE, H, HKV, 3, S, D, LENGTHS))
    _, rows = reference(q, k, v, lengths=lengths, causal=causal, window=window, scale=SCALE)
    mask = AttentionMask(causal_offset=causal, window_offset=window)
    options = {"causal": causal is not None, "mask": mask}
    with tfast.backend(backend):
        out, logsumexp = tfast.attention_decode(q, k, v, lengths, return_logsumexp=True, **options)
        assert torch.equal(out, tfast.attention_decode(q, k, v, lengths, **options))
    torch.testing.assert_close(logsumexp, rows, atol=1e-5, rtol=1e-5)


def test_a_cache_that_is_a_view_and_a_long_one(device):
    q, whole = torch.randn(2, H, 1, D, device=device), torch.randn(2, 1500, 2, HKV, D, device=device)
    k, v = whole.permute(2, 0, 3, 1, 4)
    lengths = torch.tensor([1500, 1025], device=device)
    eager, exact = (
        reference(q.to(t), k.to(t), v.to(t), lengths=lengths, scale=SCALE)[0] for t in (q.dtype, torch.double)
    )
    assert_as_exact_as_eager(tfast.attention_decode(q, k, v, lengths), eager, exact)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("place", range(3))
def test_there_is_no_gradient_and_it_says_so(place, backend, device):
    tensors = [torch.randn(1, 2, length, 8, device=device) for length in (1, 4, 4)]
    tensors[place].requires_grad_()
    lengths = torch.tensor([4], device=device)
    with pytest.raises(RuntimeError, match=r"no gradient.*torch.no_grad\(\)"), tfast.backend(backend):
        tfast.attention_decode(*tensors, lengths)
    with torch.no_grad():
        assert not tfast.attention_decode(*tensors, lengths).requires_grad
