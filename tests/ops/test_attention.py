"""``tfast.attention`` as users call it.

That every backend computes every mask is held by test_attention_kernels.py, and by tests/fuzz through this function.
"""

from __future__ import annotations

import pytest
import torch
from attention_kernels import outcome

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.reference.attention import attention as reference


@pytest.mark.parametrize("lengths", [[2], [[2]], [[2], [3], [0]], [[2, 2, 2, 0]]])
def test_lengths_broadcast(lengths, device):
    q = torch.randn(3, 2, 4, 8, device=device)
    lengths = torch.tensor(lengths, device=device)
    expected = reference(q, q, q, lengths=lengths, scale=8**-0.5)[0]
    assert torch.allclose(tfast.attention(q, q, q, AttentionMask.lengths(lengths)), expected, atol=1e-5)


def test_manual_seed_governs_dropout(device):
    q = torch.randn(1, 2, 40, 8, device=device)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tfast.attention(q, q, q, dropout_p=0.3))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_value_dim_may_differ(device):
    for D, Dv in ((8, 20), (20, 8)):
        q, k, v, grad_out = (torch.randn(2, 3, *size, device=device) for size in ((5, D), (6, D), (6, Dv), (5, Dv)))
        actual = outcome(tfast.attention, (q, k, v), grad_out)
        exact = outcome(lambda *t, D=D: reference(*t, scale=D**-0.5)[0], (q.double(), k.double(), v.double()), grad_out)
        for a, x in zip(actual, exact):
            assert torch.allclose(a.double(), x, atol=1e-5)


def test_sizes_of_zero(device):
    for B, Lq, Lk in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q = torch.randn(B, 2, Lq, 8, device=device, requires_grad=True)
        k = torch.randn(B, 2, Lk, 8, device=device, requires_grad=True)
        out = tfast.attention(q, k, k)
        assert out.shape == q.shape and torch.all(out == 0 if Lk == 0 else out.isfinite())
        out.sum().backward()
        assert torch.all(q.grad.isfinite()) and torch.all(k.grad.isfinite())


def test_explain_names_the_path_and_the_reason():
    q = torch.randn(1, 2, 3, 4)
    text = tfast.explain(q, q, q, AttentionMask.lengths(torch.tensor([2])), causal=True, dropout_p=0.1)
    assert "lengths (1,) and causal with offset 0" in text and "dropout: 0.1" in text
    with tfast.backend("reference"):
        assert "backend: reference" in tfast.explain(q, q, q) and "asked for" in tfast.explain(q, q, q)
    assert "additive bias (1, 1, 3, 3)" in tfast.explain(q, q, q, bias=torch.zeros(3, 3))


def test_explain_counts_the_tiles_that_hold_work():
    """Counted by hand for tiles of 64 x 128: two batches of 4 x 2 tiles, one with 130 visible keys, one with 10."""
    q, k = torch.zeros(2, 1, 256, 8), torch.zeros(2, 1, 256, 8)
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.lengths(torch.tensor([130, 10])))
    assert "work: 75.0% of 16 tiles of 64 queries x 128 keys are computed (4 full, 8 partly masked)" in text
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.window(40, right=None))
    assert "window with offset -40" in text
    # In each of two batches, the last 64 queries see no key below 152, and the first 128 all from 128 on.
    assert "work: 87.5% of 16 tiles of 64 queries x 128 keys are computed (4 full, 10 partly masked)" in text


def test_explain_and_the_call_refuse_alike():
    q = torch.randn(1, 2, 3, 257)
    with tfast.backend("triton"):
        for call in (tfast.explain, tfast.attention):
            with pytest.raises(tfast.BackendError, match="TRITON_INTERPRET=1"):
                call(q, q, q)
