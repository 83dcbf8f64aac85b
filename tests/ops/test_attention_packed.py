"""``tfast.attention_packed`` as users call it, and its oracle against the padded one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from attention_kernels import starts

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.masks.packing import packing_of, take
from transformer_fast.reference.attention import attention as padded_reference
from transformer_fast.reference.attention import attention_packed as reference
from transformer_fast.testing import fixed_dropout_seed

LENGTHS_Q, LENGTHS_K = torch.tensor([7, 0, 3, 17, 1]), torch.tensor([7, 4, 0, 33, 1])
H, HKV, D = 4, 2, 20
SCALE = D**-0.5


def batch(self_attention, dtype=torch.float64, device="cpu"):
    """Return a padded batch (q, k, v, grad_out, each (B, L, heads, D)) and the packings of queries and keys."""
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
        "max_seqlen_q": queries.max_length,
        "max_seqlen_k": keys.max_length,
    }


# Causal and window offsets. The last pair leaves queries without keys in sequences that have some.
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
    packed, _, packed_logsumexp = reference(*tokens, **options(queries, keys), **same)
    assert torch.allclose(packed, expected, atol=1e-12)
    assert torch.allclose(packed_logsumexp.t(), take(logsumexp.transpose(1, 2), queries), atol=1e-12)
    for actual, truth in zip(torch.autograd.grad(packed, leaves, take(grad, queries)), grads):
        assert torch.allclose(actual, truth, atol=1e-12)


def packed_batch(self_attention, dtype, device):
    tensors, queries, keys = batch(self_attention, dtype, device)
    packings = (queries, keys, keys, queries)
    return [take(t, packing) for t, packing in zip(tensors, packings)], options(queries, keys)


def test_no_sequences_have_a_longest_one_where_the_lengths_are_not_read():
    """As on a GPU and in graphs."""
    q, cu_seqlens = torch.randn(0, 2, 8), starts([])
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert tfast.attention_packed(q, q, q, cu_seqlens, cu_seqlens, bottom_right=True).shape == q.shape


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logsumexp_and_its_gradient_are_those_of_a_padded_batch(device, backend):
    """Dropout does not change the logsumexp."""
    lengths = torch.tensor([5, 1, 3], device=device)
    packing = tfast.masks.packing_of(lengths, 3, 5, device)
    padded = [torch.randn(3, 5, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    mask = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.causal()
    with tfast.backend(backend), fixed_dropout_seed(4):
        tokens = [tfast.masks.take(t, packing) for t in padded]
        cu = packing.cu_seqlens
        out, logsumexp = tfast.attention_packed(*tokens, cu, cu, causal=True, dropout_p=0.2, return_logsumexp=True)
        q, k, v = (t.transpose(1, 2) for t in padded)
        expected, rows = tfast.attention(q, k, v, mask, dropout_p=0.2, return_logsumexp=True)
    expected = tfast.masks.take(expected.transpose(1, 2), packing)
    rows = tfast.masks.take(rows.transpose(1, 2), packing).T
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logsumexp, rows, atol=1e-5, rtol=1e-5)
    weigh = torch.randn_like(rows)
    # The loss uses the logsumexp alone, or with the output.
    for loss, same in (
        ((logsumexp * weigh).sum(), (rows * weigh).sum()),
        ((logsumexp * weigh).sum() + out.sum(), (rows * weigh).sum() + expected.sum()),
    ):
        ours = torch.autograd.grad(loss, padded, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(same, padded, retain_graph=True, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            a, b = (torch.zeros_like(padded[0]) if t is None else t for t in (a, b))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


OPTIONS = {
    "bias": {"bias": True},
    "bias, from the end": {"bias": True, "causal": True, "bottom_right": True},
    "window, from the end": {"mask": AttentionMask.window(2), "bottom_right": True},
    "relative, from the end": {"relative": True, "bottom_right": True},
    "some keys": {"causal": True, "bottom_right": True, "used": [3, 2, 0, 30, 1]},
    "keep": {"keep": True},
    "keep, documents": {"keep": True, "documents": True, "causal": True},
    "all": {"bias": True, "relative": True, "keep": True, "used": [7, 4, 0, 20, 0], "causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_sequence_alone(name, backend, device):
    """Outputs, weights and gradients are those of ``tfast.attention`` per sequence."""
    given = dict(OPTIONS[name])
    (q, k, v, grad), sequences = packed_batch(False, torch.float64, "cpu")
    lengths = list(zip(LENGTHS_Q.tolist(), LENGTHS_K.tolist()))
    used = given.pop("used", LENGTHS_K.tolist())
    keep, ids = torch.rand(len(k)) > 0.3, [torch.arange(len(t)) // 5 for t in (q, k)]
    biases = [torch.randn(H, n, m, dtype=q.dtype).requires_grad_() for n, m in lengths]
    weight = torch.randn(8, H, dtype=q.dtype, requires_grad=True)
    has = {part: given.pop(part, False) for part in ("bias", "relative", "keep", "documents")}
    causal, ends = given.pop("causal", False), given.pop("bottom_right", False)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    learned = [*leaves, *(biases if has["bias"] else ()), *([weight] if has["relative"] else ())]

    outs, weights = [], []
    for b, (start_q, start_k) in enumerate(zip(starts(LENGTHS_Q).tolist()[:-1], starts(LENGTHS_K).tolist()[:-1])):
        of_q, of_k = slice(start_q, start_q + lengths[b][0]), slice(start_k, start_k + used[b])
        shift = used[b] - lengths[b][0] if ends else 0
        mask = AttentionMask.causal(shift) if causal else AttentionMask()
        if "mask" in given:
            mask = mask & AttentionMask.window(2, offset=shift)
        if has["relative"]:
            mask = mask & AttentionMask.relative(weight, 20, offset=shift)
        if has["keep"]:
            mask = mask & AttentionMask.keep(keep[of_k])
        if has["documents"]:
            mask = mask & AttentionMask.documents(ids[0][of_q][None], ids[1][of_k][None])
        if has["bias"]:
            mask = mask & AttentionMask.bias(biases[b][None, :, :, : used[b]])
        q_b, k_b, v_b = (t.transpose(0, 1)[None] for t in (q[of_q], k[of_k], v[of_k]))
        with tfast.backend("reference"):
            out, found = tfast.attention(
                q_b, k_b, v_b, mask, empty_rows="zero", return_weights=True, softcap=given.get("softcap")
            )
        outs.append(out[0].transpose(0, 1))
        weights.append(found[0])
    expected = torch.cat(outs)
    exact = torch.autograd.grad(expected, learned, grad, allow_unused=True)

    mask = given.pop("mask", AttentionMask())
    if has["relative"]:
        mask = mask & AttentionMask.relative(weight, 20)
    if has["documents"]:
        mask = mask & AttentionMask.documents(*(t[None] for t in ids))
    if has["keep"]:
        mask = mask & AttentionMask.keep(keep)
    given |= {"mask": mask, "causal": causal, "bottom_right": ends, "empty_rows": "zero"}
    given |= {"bias": biases} if has["bias"] else {}
    given |= {"seqused_k": torch.tensor(used).int()} if used != LENGTHS_K.tolist() else {}
    with tfast.backend(backend):
        out, found = tfast.attention_packed(*leaves, **sequences, **given, return_weights=True)
        grads = torch.autograd.grad(out, learned, grad, allow_unused=True)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(found, weights, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(grads, exact, strict=True):
        zero = torch.zeros(()) if ours is None or theirs is None else None
        torch.testing.assert_close(
            *(t if t is not None else zero.expand_as(o) for t, o in ((ours, theirs), (theirs, ours)))
        )


@pytest.mark.parametrize("heads", [1, H])
def test_a_bias_as_one_tensor(heads):
    """The tensor is the flattened and joined list; dropped weights belong to the output."""
    (q, k, v, _), sequences = packed_batch(False, torch.float64, "cpu")
    lengths = list(zip(LENGTHS_Q.tolist(), LENGTHS_K.tolist()))
    biases = [torch.randn(heads, n, m, dtype=q.dtype) for n, m in lengths]
    whole = torch.cat([bias.flatten(1) for bias in biases], 1)
    found = []
    for bias in (biases, tuple(biases), whole):
        with fixed_dropout_seed(3):
            found.append(
                tfast.attention_packed(q, k, v, **sequences, bias=bias, dropout_p=0.5, return_weights="dropped")
            )
    assert all(torch.equal(found[0][0], out) for out, _ in found[1:])
    values = v.repeat_interleave(H // HKV, 1).split(LENGTHS_K.tolist())
    outs = [torch.einsum("hij,jhd->ihd", w, own) for w, own in zip(found[0][1], values, strict=True)]
    torch.testing.assert_close(torch.cat(outs), found[0][0])
