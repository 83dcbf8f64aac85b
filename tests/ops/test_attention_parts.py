"""Meaning of documents, ALiBi, relative positions, softcap and sinks.

That every path computes them is held by tests/fuzz/fuzz.py, of which tests/fuzz/test_fuzz.py runs some.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from attention_kernels import assert_same_bits

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.masks.distance import relative_buckets
from transformer_fast.testing import assert_as_exact_as_eager

B, H, L, D = 2, 4, 70, 16


def inputs(*, L: int = L, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(L)
    return [torch.randn(B, H, L, D, generator=generator).to(dtype) for _ in range(3)]


def plain(q, k, v, allowed=None, bias=None, softcap=None, sinks=None):
    """Compute attention by its formula, in the dtype of the inputs."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -1e9)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def held(actual, dtype=torch.float32, **parts):
    """Compare the result, of the first queries or of all, with the plain computation."""
    q, k, v = inputs(dtype=dtype)
    q = q[:, :, : actual.shape[2]]
    wide = {
        name: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for name, t in parts.items()
    }
    assert_as_exact_as_eager(actual, plain(q, k, v, **parts), plain(q.double(), k.double(), v.double(), **wide))


@pytest.mark.parametrize("length", [17, L])
def test_prefix(length):
    """Output and gradients against a keep mask in the reference, with padding, also with fewer queries than keys."""
    prefix, offset = torch.tensor([40, 0]), L - length
    mask = AttentionMask.prefix(prefix, offset) & AttentionMask.lengths(torch.tensor([L, 51]))
    q, k, v = (t[:, :, -n:].contiguous().requires_grad_() for t, n in zip(inputs(), (length, L, L), strict=True))
    i, j = torch.arange(length)[:, None] + offset, torch.arange(L)
    allowed = ((j < prefix[:, None, None, None]) | (j <= i)) & (j < torch.tensor([L, 51])[:, None, None, None])
    for options in ({}, {"dropout_p": 0.3}, {"empty_rows": "zero", "sinks": torch.ones(H)}):
        results = []
        for backend, given in (("native", mask), ("reference", AttentionMask.keep(allowed))):
            torch.manual_seed(5)
            with tfast.backend(backend):
                out = tfast.attention(q, k, v, given, **options)
                results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_prefixes_that_look_like_a_keep_mask():
    """Ends per query that are all 0 or 1 are no values that a user gave."""
    q, k, v = inputs()
    mask = AttentionMask.prefix(torch.tensor([0, 1]), -1)
    assert torch.equal(tfast.attention(q[:, :, :2], k, v, mask), tfast.attention(q[:, :, :2], k, v, mask.dense(2, L)))


def test_explain_names_a_prefix_and_counts_its_tiles():
    q = torch.empty(1, 1, 256, 8)
    text = tfast.explain(q, q, q, AttentionMask.prefix(torch.tensor([200])))
    assert (
        "mask: (intervals(None, int64 (1, 1, 1)) | causal())\nintervals and unions: read as lengths per query\n" in text
    )
    assert "100.0% of 8 tiles of 64 queries x 128 keys" in text  # the look-ahead alone visits 6


def test_documents():
    ids = torch.arange(L).div(30, rounding_mode="floor").expand(B, L)
    actual = tfast.attention(*inputs(), AttentionMask.documents(ids) & AttentionMask.causal())
    allowed = (ids[:, None, :, None] == ids[:, None, None, :]) & torch.ones(L, L, dtype=torch.bool).tril()
    held(actual, allowed=allowed)


def test_documents_anywhere_and_wide_ids():
    ids = torch.tensor([2**40, 5, -(2**40)])[torch.arange(2 * L).view(B, L) % 3]
    other = ids.roll(7, 1)
    actual = tfast.attention(*inputs(), AttentionMask.documents(ids, other))
    held(actual, allowed=ids[:, None, :, None] == other[:, None, None, :])


def test_two_documents_both_count():
    first, second = torch.arange(L).expand(B, L) // 30, torch.arange(L).expand(B, L) % 5
    actual = tfast.attention(*inputs(), AttentionMask.documents(first) & AttentionMask.documents(second))
    same = [ids[:, None, :, None] == ids[:, None, None, :] for ids in (first, second)]
    held(actual, allowed=same[0] & same[1])


@pytest.mark.parametrize("shape", [(H,), (B, H)])
def test_alibi(shape):
    slopes, offset = torch.rand(shape), 5
    distances = (torch.arange(L) - torch.arange(L).unsqueeze(1) - offset).abs()
    actual = tfast.attention(*inputs(), AttentionMask.alibi(slopes, offset))
    held(actual, bias=-slopes[..., None, None] * distances)


def test_biases_add_up():
    slopes, bias = torch.rand(H), torch.randn(1, 1, L, L)
    distances = (torch.arange(L) - torch.arange(L).unsqueeze(1)).abs()
    actual = tfast.attention(*inputs(), AttentionMask.alibi(slopes) & AttentionMask.bias(bias))
    held(actual, bias=bias - slopes[:, None, None] * distances)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_is_t5s(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-700, 700)
    expected = t5.T5Attention._relative_position_bucket(distances, bidirectional, 32, 128)
    assert torch.equal(relative_buckets(distances, 32, 128, bidirectional), expected)
    weight = torch.randn(32, H)
    actual = tfast.attention(*inputs(), AttentionMask.relative(weight, bidirectional=bidirectional))
    distances = torch.arange(L) - torch.arange(L).unsqueeze(1)
    buckets = t5.T5Attention._relative_position_bucket(distances, bidirectional, 32, 128)
    held(actual, bias=weight[buckets].permute(2, 0, 1).unsqueeze(0))


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0, 1e6])
def test_softcap(softcap):
    held(tfast.attention(*inputs(), softcap=softcap), softcap=softcap)


def test_uniform_rows_beside_capped_scores_of_other_documents():
    """A tile of keys without the queries' documents is skipped, and so is the slope of the cap."""
    q, k, v = (t.requires_grad_() for t in inputs())
    ids = torch.zeros(B, L, dtype=torch.int64)
    # The first call leaves NaN in the memory that the kernels keep, also where the slopes are.
    for keys, mask in ((torch.full_like(k, math.nan), None), (k, AttentionMask.documents(ids, ids + 1))):
        out = tfast.attention(q, keys, v, mask, softcap=5.0)
        grads = torch.autograd.grad(out.sum(), (q, v))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("queries", [1, L])  # few queries take other kernels
def test_sinks_are_one_more_key(queries):
    q, k, v = inputs()
    sinks = torch.randn(H)
    held(tfast.attention(q[:, :, :queries], k, v, sinks=sinks), sinks=sinks)


def test_a_sink_takes_its_share_of_the_returned_weights():
    q, k, v = inputs()
    out, weights = tfast.attention(q, k, v, sinks=torch.randn(H), return_weights=True)
    torch.testing.assert_close(weights @ v, out)


def test_a_row_without_keys_leaves_all_to_its_sink():
    out, logsumexp = tfast.attention(
        *inputs(), AttentionMask.causal(-1), sinks=torch.full((H,), 2.0), return_logsumexp=True
    )
    assert torch.equal(out[:, :, 0], torch.zeros(B, H, D)) and torch.equal(logsumexp[:, :, 0], torch.full((B, H), 2.0))


def test_sinks_get_the_gradient_of_the_logsumexp():
    q, k, v = inputs(dtype=torch.float64)
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    ours = tfast.attention(q, k, v, sinks=sinks, return_logsumexp=True)[1]
    scores = q @ k.mT / math.sqrt(D)
    theirs = torch.cat([scores, sinks.view(H, 1, 1).expand(B, H, L, 1)], -1).logsumexp(-1)
    grad = torch.randn_like(ours)
    assert torch.allclose(*(torch.autograd.grad(t, sinks, grad)[0] for t in (ours, theirs)), rtol=1e-9)


@pytest.mark.parametrize("queries", [2, L])
def test_learned_parts_have_the_gradients_of_the_plain_computation(queries):
    q, k, v = inputs(dtype=torch.float64)
    q = q[:, :, :queries]
    leaves = {
        "slopes": torch.rand(H, dtype=torch.float64), "weight": torch.randn(32, H, dtype=torch.float64),
        "sinks": torch.randn(H, dtype=torch.float64),
    }  # fmt: skip
    for t in leaves.values():
        t.requires_grad_()
    mask = AttentionMask.alibi(leaves["slopes"]) & AttentionMask.relative(leaves["weight"])
    ours = tfast.attention(q, k, v, mask, softcap=3.0, sinks=leaves["sinks"])
    distances = torch.arange(L) - torch.arange(queries).unsqueeze(1)
    bias = -leaves["slopes"][:, None, None] * distances.abs()
    bias = bias + leaves["weight"][relative_buckets(distances, 32, 128, True)].permute(2, 0, 1)
    theirs = plain(q, k, v, bias=bias, softcap=3.0, sinks=leaves["sinks"])
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(t, leaves.values(), grad) for t in (ours, theirs)), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_of_distances_are_the_same_for_any_number_of_threads():
    q, k, v = inputs(L=300)
    weight = torch.randn(32, H, requires_grad=True)

    def gradient():
        return torch.autograd.grad(tfast.attention(q, k, v, AttentionMask.relative(weight)).square().sum(), weight)

    assert_same_bits(gradient, threads=(1, 2, 3))


MEMORY = """
import torch
import transformer_fast as tfast
from transformer_fast import AttentionMask

def peak():
    # Not ru_maxrss, which begins with the peak of the process that started this one.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0])

L = 16_384
parts = {
    "documents": AttentionMask.documents(torch.arange(L).unsqueeze(0) // 100),
    "alibi": AttentionMask.alibi(torch.rand(1)) & AttentionMask.window(64),
    "relative": AttentionMask.relative(torch.randn(32, 1, requires_grad=True)) & AttentionMask.window(64),
}
q = torch.randn(1, 1, L, 8, requires_grad=True)
tfast.attention(q[:, :, :64], q[:, :, :64], q[:, :, :64]).sum().backward()
for name, mask in parts.items():
    before = peak()
    tfast.attention(q, q, q, mask, softcap=5.0, sinks=torch.zeros(1)).sum().backward()
    print(name, peak() - before)
"""


def test_memory_is_linear_in_the_length():
    """A mask of 16,384 x 16,384 bools takes 262,144 KB. The test runs in a new process, because peak memory never
    falls."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    kilobytes = {name: int(n) for name, n in (line.split() for line in done.stdout.splitlines())}
    assert set(kilobytes) == {"documents", "alibi", "relative"} and max(kilobytes.values()) < 60_000, kilobytes
