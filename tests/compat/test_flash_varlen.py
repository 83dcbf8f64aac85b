"""``flash_attn_varlen_func`` and its packed forms: each sequence equals ``flash_attn_func`` on it."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import in_pages, starts
from peers import assert_alike, plain_packed, tokens

from transformer_fast.compat import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    ragged,
)

H, D = 4, 8
LENGTHS = {
    "alike": ([3, 0, 5, 1], [3, 0, 5, 1]),
    "ragged": ([3, 0, 5, 2], [7, 4, 2, 0]),
    "one query each": ([1, 1, 0], [4, 9, 2]),
    "one sequence": ([4], [6]),
    "no sequence": ([], []),
}
WINDOWS = [(-1, -1), (1, 1), (2, -1), (2, 0)]


def batch(name, Hkv=2, dtype=torch.float64):
    lengths_q, lengths_k = LENGTHS[name]
    leaves = [tokens(lengths_q, H, D, dtype), *(tokens(lengths_k, Hkv, D, dtype) for _ in range(2))]
    packing = starts(lengths_q), starts(lengths_k), max(lengths_q, default=0), max(lengths_k, default=0)
    return leaves, packing, lengths_q, lengths_k


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("Hkv", [4, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("alibi", ["none", "heads", "sequences"])
def test_every_option(lengths, Hkv, causal, window, softcap, alibi, backend):
    leaves, packing, lengths_q, lengths_k = batch(lengths, Hkv)
    shape = {"none": None, "heads": (H,), "sequences": (len(lengths_q), H)}[alibi]
    slopes = None if shape is None else torch.rand(shape, dtype=torch.float64)
    options = {"causal": causal, "softcap": softcap}
    given = {"window_size": window, "alibi_slopes": slopes}
    out, logsumexp, none = flash_attn_varlen_func(*leaves, *packing, **options, **given, return_attn_probs=True)
    expected, rows, _ = plain_packed(*leaves, lengths_q, lengths_k, window=window, slopes=slopes, **options)
    assert_alike((out, logsumexp), (expected, rows))
    assert none.shape == (0,)
    assert torch.equal(flash_attn_varlen_func(*leaves, *packing, **options, **given), out)
    if lengths_q:
        grad = torch.randn_like(out)
        assert_alike(*(torch.autograd.grad(t, leaves, grad) for t in (out, expected)))


@pytest.mark.parametrize(
    ("lengths", "options", "packed"),
    [
        ("alike", {"causal": True, "window_size": (2, 0), "alibi_slopes": torch.ones(H)}, True),
        ("ragged", {"softcap": 1.0, "dropout_p": 0.5}, True),
        ("one query each", {"window_size": (2, 0)}, True),
        ("ragged", {"causal": True}, True),
        ("alike", {"alibi_slopes": torch.ones(4, H)}, False),
    ],
)
def test_no_padding_but_for_slopes_of_each_sequence(lengths, options, packed, monkeypatch):
    padded = []
    compute = ragged._padded_attention
    monkeypatch.setattr(ragged, "_padded_attention", lambda *args: padded.append(1) or compute(*args))
    leaves, packing, *_ = batch(lengths, dtype=torch.float32)
    flash_attn_varlen_func(*leaves, *packing, **options)
    assert bool(padded) is not packed


@pytest.mark.parametrize("lengths", ["alike", "ragged"])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_say_what_dropout_drops(lengths, causal, backend):
    leaves, packing, lengths_q, lengths_k = batch(lengths)
    out, logsumexp, signed = flash_attn_varlen_func(*leaves, *packing, 0.4, causal=causal, return_attn_probs=True)
    _, rows, weights = plain_packed(*leaves, lengths_q, lengths_k, causal)
    assert_alike((logsumexp,), (rows,))
    assert signed.shape == (len(lengths_q), H, max(lengths_q), max(lengths_k)) and (signed < 0).any()
    parts = out.split(lengths_q), leaves[2].split(lengths_k), weights, signed
    for of_out, v, exact, found in zip(*parts):
        own = found[:, : len(of_out), : len(v)]
        assert_alike((own.abs(),), (exact,))
        assert not found[:, len(of_out) :].any() and not found[:, :, len(v) :].any()
        kept = torch.where(own > 0, own, 0.0) / 0.6
        assert_alike((of_out,), (torch.einsum("hij,jhd->ihd", kept, v.repeat_interleave(2, 1)),), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (2, -1), "softcap": 2.0}])
def test_packed_forms(options):
    qkv, cu = torch.randn(9, 3, H, D), starts([3, 0, 6])
    expected = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 6, 6, **options)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, cu, 6, **options), expected)
    assert torch.equal(flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu, cu, 6, 6, **options), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("alibi", [False, True])
def test_keys_in_pages(causal, window, page_size, alibi, backend):
    lengths_q, lengths_k = [3, 0, 5, 2], [7, 4, 2, 1]
    q = torch.randn(sum(lengths_q), H, D, dtype=torch.float64)
    caches = torch.randn(2, 4, 2, 7, D, dtype=torch.float64)
    *pages, table = in_pages(tuple(caches), page_size, torch.tensor(lengths_k))
    k, v = (torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths_k)]) for t in caches)
    slopes = torch.rand(4, H, dtype=torch.float64) if alibi else None
    packing = starts(lengths_q), starts(lengths_k), 5, 7
    options = {"causal": causal, "window_size": window, "alibi_slopes": slopes, "return_attn_probs": True}
    found = flash_attn_varlen_func(q, *pages, *packing, block_table=table, **options)
    expected = plain_packed(q, k, v, lengths_q, lengths_k, causal, window, slopes=slopes)
    assert_alike(found[:2], expected[:2])
    del options["return_attn_probs"]
    assert torch.equal(flash_attn_varlen_func(q, *pages, *packing, block_table=table, **options), found[0])


def test_a_graph_without_breaks():
    torch._dynamo.reset()
    leaves, packing, *_ = batch("ragged", dtype=torch.float32)
    call = torch.compile(flash_attn_varlen_func, backend="eager", fullgraph=True)
    assert_alike(
        (call(*leaves, *packing, causal=True),), (flash_attn_varlen_func(*leaves, *packing, causal=True),), 1e-6
    )


Q, CU = torch.randn(5, 4, 8), starts([2, 3])
TABLE = torch.zeros(2, 1, dtype=torch.int32)
PAGES = torch.randn(3, 4, 4, 8)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": Q[0]}, ValueError, r"q must be \(Tq, H, D\)"),
        (
            {"v": Q[1:]},
            ValueError,
            r"k and v must have the same \(Tk, Hkv, D\) except D, got \(5, 4, 8\) and \(4, 4, 8\)",
        ),
        ({"cu_seqlens_q": CU.long()}, TypeError, "cu_seqlens_q must be an int32 tensor"),
        ({"cu_seqlens_k": starts([2, 4])}, ValueError, r"cu_seqlens_k must rise from 0 to 5.*got \[0, 2, 6\]"),
        ({"cu_seqlens_k": starts([2, 2, 1])}, ValueError, "as many sequences of keys as of queries, got 2 and 3"),
        ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q is 2, but a sequence of cu_seqlens_q has 3 tokens"),
        ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q must be an int, got float"),
        ({"window_size": (-5, 0)}, ValueError, "at least 0, or -1 for none"),
        ({"alibi_slopes": torch.rand(3, 4)}, ValueError, r"alibi must be \(H,\)"),
        ({"block_table": TABLE}, ValueError, r"k must be \(pages, page_size, Hkv, D\)"),
        (
            {"k": PAGES, "v": PAGES, "block_table": TABLE, "dropout_p": 0.1},
            NotImplementedError,
            "dropout is not supported with block",
        ),
        (
            {"k": PAGES.clone().requires_grad_(), "v": PAGES, "block_table": TABLE},
            RuntimeError,
            "no gradient with block",
        ),
    ],
)
def test_wrong_calls_say_what_is_expected(change, error, said):
    given = {"q": Q, "k": Q, "v": Q, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
    with pytest.raises(error, match=said):
        flash_attn_varlen_func(**{**given, "causal": True, **change})
