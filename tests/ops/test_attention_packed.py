"""``tfast.attention_packed`` as users call it, and its oracle against the padded one."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import outcome, starts
from helpers import fixed_seed

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.packing import packing_of, take
from transformer_fast.reference.attention import attention as padded_reference
from transformer_fast.reference.attention import attention_packed as reference

LENGTHS_Q, LENGTHS_K = torch.tensor([7, 0, 3, 17, 1]), torch.tensor([7, 4, 0, 33, 1])
H, HKV, D = 4, 2, 20
SCALE = D**-0.5


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


# Causal and window offsets. Those of the last one leave queries without keys in sequences that have some.
BOUNDS = [(None, None), (0, None), (1, -2), (None, 0), (5, 4)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("self_attention", [False, True])
def test_the_oracle_is_the_padded_one_without_its_padding(self_attention, causal, window, dropout_p):
    (q, k, v, grad), queries, keys = batch(self_attention)
    seed = torch.tensor([11])
    same = {"scale": SCALE, "dropout_p": dropout_p, "seed": seed}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, _, logsumexp = padded_reference(
        *(t.transpose(1, 2) for t in leaves),
        lengths=keys.cu_seqlens.diff(),
        causal=causal,
        window=window,
        empty_rows="zero",
        **same,
    )
    expected = take(out.transpose(1, 2), queries)
    grads = torch.autograd.grad(expected, leaves, take(grad, queries))

    tokens = [take(t, packing) for t, packing in zip(leaves, (queries, keys, keys))]
    same |= {"causal": causal, "window": window, "zero_empty_rows": True}
    packed, packed_logsumexp = reference(*tokens, **options(queries, keys), **same)
    assert torch.allclose(packed, expected, atol=1e-12)
    assert torch.allclose(packed_logsumexp.t(), take(logsumexp.transpose(1, 2), queries), atol=1e-12)
    for actual, truth in zip(torch.autograd.grad(packed, leaves, take(grad, queries)), grads):
        assert torch.allclose(actual, truth, atol=1e-12)


def packed_batch(self_attention, dtype, device):
    tensors, queries, keys = batch(self_attention, dtype, device)
    packings = (queries, keys, keys, queries)
    return [take(t, packing) for t, packing in zip(tensors, packings)], options(queries, keys)


def test_the_mask_of_dropout_is_the_padded_one_and_lengths_are_looked_up(device):
    (q, k, v, _), queries, keys = batch(True, torch.float32, device)
    lengths = AttentionMask.lengths(keys.cu_seqlens.diff())
    with fixed_seed(9):
        padded = tfast.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), lengths, causal=True, dropout_p=0.5, empty_rows="zero"
        )
        tokens = [take(t, packing) for t, packing in zip((q, k, v), (queries, keys, keys))]
        packed = tfast.attention_packed(*tokens, queries.cu_seqlens, keys.cu_seqlens, causal=True, dropout_p=0.5)
    assert torch.allclose(packed, take(padded.transpose(1, 2), queries), atol=1e-6)


def test_strided_inputs_and_another_value_dim(device):
    (q, k, _, grad), sequences = packed_batch(False, torch.float32, device)
    v = torch.randn(k.shape[0], 2 * HKV, 12, device=device)[:, ::2]
    wide = torch.randn(q.shape[0], D, H, device=device)
    tensors, grad = (wide.transpose(1, 2), k.repeat(1, 1, 2)[..., D:], v), grad[:, :1, :12].expand(-1, H, -1)
    actual = outcome(lambda *t: tfast.attention_packed(*t, **sequences), tensors, grad)
    exact = outcome(lambda *t: reference(*t, **sequences, scale=SCALE)[0], [t.double() for t in tensors], grad)
    for a, x in zip(actual, exact):
        assert a.shape == x.shape and torch.allclose(a.double(), x, atol=1e-5)


@pytest.mark.parametrize("lengths", [[], [0, 0], [3]])
def test_few_sequences(lengths, device):
    cu_seqlens = starts(lengths).to(device)
    q = torch.randn(sum(lengths), 2, 8, device=device, requires_grad=True)
    out = tfast.attention_packed(q, q, q, cu_seqlens, cu_seqlens)
    assert out.shape == q.shape and out.isfinite().all()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logsumexp_and_its_gradient_are_those_of_a_padded_batch(device, backend):
    """With dropout too: beside it the logsumexp is what it is without."""
    lengths = torch.tensor([5, 1, 3], device=device)
    packing = tfast.packing.packing_of(lengths, 3, 5, device)
    padded = [torch.randn(3, 5, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    mask = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.causal()
    with tfast.backend(backend), fixed_seed(4):
        tokens = [tfast.packing.take(t, packing) for t in padded]
        cu = packing.cu_seqlens
        out, logsumexp = tfast.attention_packed(*tokens, cu, cu, causal=True, dropout_p=0.2, return_logsumexp=True)
        q, k, v = (t.transpose(1, 2) for t in padded)
        expected, rows = tfast.attention(q, k, v, mask, dropout_p=0.2, return_logsumexp=True)
    expected = tfast.packing.take(expected.transpose(1, 2), packing)
    rows = tfast.packing.take(rows.transpose(1, 2), packing).T
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logsumexp, rows, atol=1e-5, rtol=1e-5)
    weigh = torch.randn_like(rows)
    # The logsumexp alone, and together with the output.
    for loss, same in (
        ((logsumexp * weigh).sum(), (rows * weigh).sum()),
        ((logsumexp * weigh).sum() + out.sum(), (rows * weigh).sum() + expected.sum()),
    ):
        ours = torch.autograd.grad(loss, padded, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(same, padded, retain_graph=True, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            a, b = (torch.zeros_like(padded[0]) if t is None else t for t in (a, b))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_triton_says_how_wide_a_head_may_be(device):
    q, cu = torch.randn(2, 1, 257, device=device), torch.tensor([0, 2], device=device).int()
    if device.type == "cuda":
        with pytest.raises(ValueError, match=r"head_dim up to 256.*\(2, 1, 257\)"):
            tfast.attention_packed(q, q, q, cu, cu)
    else:
        assert tfast.attention_packed(q, q, q, cu, cu).shape == q.shape
