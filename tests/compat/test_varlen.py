"""``varlen_attn`` against a plain computation of torch's documentation; its signature against the installed torch."""

from __future__ import annotations

import inspect

import pytest
import torch
from attention_kernels import in_pages, starts
from peers import assert_alike, plain_packed, tokens
from torch.nn.attention import varlen

from transformer_fast.compat import AuxRequest, varlen_attn

H, D = 4, 8
LENGTHS = [([3, 0, 5, 1], [3, 0, 5, 1]), ([3, 0, 5, 2], [7, 4, 2, 0]), ([4], [6])]
WINDOWS = [(-1, -1), (-1, 0), (2, 0), (1, 1), (2, -1)]


@pytest.mark.parametrize(("lengths_q", "lengths_k"), LENGTHS)
@pytest.mark.parametrize("Hkv", [4, 2])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_every_option(lengths_q, lengths_k, Hkv, window, scale, backend):
    leaves = [tokens(lengths_q, H, D), *(tokens(lengths_k, Hkv, D) for _ in range(2))]
    packing = starts(lengths_q), starts(lengths_k), max(lengths_q), max(lengths_k)
    options = {"scale": scale, "window_size": window, "enable_gqa": Hkv != H}
    out, logsumexp = varlen_attn(*leaves, *packing, return_aux=varlen.AuxRequest(lse=True), **options)
    expected, rows, _ = plain_packed(*leaves, lengths_q, lengths_k, window=window, scale=scale)
    assert_alike((out, logsumexp), (expected, rows))
    assert torch.equal(varlen_attn(*leaves, *packing, return_aux=AuxRequest(), **options), out)
    grad = torch.randn_like(out)
    assert_alike(*(torch.autograd.grad(t, leaves, grad) for t in (out, expected)))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("in_a_pool", [False, True])
@pytest.mark.parametrize("lengths_q", [[1, 1, 1, 1], [3, 0, 5, 2]])
def test_keys_in_use(window, in_a_pool, lengths_q, backend):
    """The last query is at the last key in use; the keys behind it are NaN."""
    used, room = [7, 4, 2, 0], [9, 4, 5, 3]
    q = torch.randn(sum(lengths_q), H, D, dtype=torch.float64)
    caches = torch.randn(2, 4, 2, 9, D, dtype=torch.float64)
    k, v = (torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(used)]) for t in caches)
    seqused_k = torch.tensor(used, dtype=torch.int32)
    for b, n in enumerate(used):
        caches[:, b, :, n:] = torch.nan
    if in_a_pool:
        *stored, table = in_pages(tuple(caches), 4, seqused_k)
        given, cu_seq_k = {"block_table": table}, None
    else:
        stored = [torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(room)]) for t in caches]
        given, cu_seq_k = {}, starts(room)
    packing = starts(lengths_q), cu_seq_k, max(lengths_q), 9
    given |= {"seqused_k": seqused_k, "window_size": window, "enable_gqa": True}
    found = varlen_attn(q, *stored, *packing, return_aux=AuxRequest(lse=True), **given)
    assert_alike(found, plain_packed(q, k, v, lengths_q, used, window=window)[:2])
    assert torch.equal(varlen_attn(q, *stored, *packing, **given), found[0])


def test_what_torch_accepts_is_accepted_here():
    ours, theirs = (inspect.signature(f).parameters for f in (varlen_attn, varlen.varlen_attn))
    assert [name for name in theirs if name not in ours] == []
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind and ours[name].default == parameter.default, name
    assert set(varlen.AuxRequest._fields) <= set(AuxRequest._fields)


Q, CU = torch.randn(5, 4, 8), starts([2, 3])
USED = torch.tensor([2, 3], dtype=torch.int32)
PAGES, TABLE = torch.randn(3, 4, 4, 8), torch.zeros(2, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"query": Q[0]}, ValueError, r"query must be \(Tq, H, D\)"),
        ({"key": Q[:, :2], "value": Q[:, :2]}, ValueError, "share their heads unless enable_gqa=True, got 4 and 2"),
        ({"cu_seq_q": None}, TypeError, r"cu_seq_q must be an int32 tensor \(B \+ 1,\), got NoneType"),
        ({"cu_seq_k": starts([2, 4])}, ValueError, "cu_seq_k must rise from 0 to 5"),
        ({"max_k": 2}, ValueError, "max_k is 2, but"),
        ({"key": PAGES, "value": PAGES, "block_table": TABLE}, ValueError, "block_table needs seqused_k"),
        ({"seqused_k": USED + 1}, ValueError, r"at most the lengths of cu_seq_k, \[2, 3\], got \[3, 4\]"),
        ({"seqused_k": USED.float()}, TypeError, r"seqused_k must be an int32 tensor \(N,\)"),
        (
            {
                "key": PAGES,
                "value": PAGES,
                "block_table": TABLE,
                "seqused_k": USED,
                "query": Q.clone().requires_grad_(),
            },
            RuntimeError,
            "no gradient with block_table",
        ),
    ],
)
def test_wrong_calls_say_what_is_expected(change, error, said):
    given = {"query": Q, "key": Q, "value": Q, "cu_seq_q": CU, "cu_seq_k": CU, "max_q": 3, "max_k": 3}
    with pytest.raises(error, match=said):
        varlen_attn(**{**given, **change})
