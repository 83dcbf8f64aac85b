"""FlashMask's function against a mask made key by key, as its paper describes the rows, and its published examples."""

from __future__ import annotations

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.compat import flashmask_attention, startend_mask

B, H, HKV, LQ, LK, D = 2, 4, 2, 37, 41, 16


def drawn(heads: int, columns: int, keys: int = LK) -> torch.Tensor:
    return torch.randint(0, LQ + 3, (B, heads, keys, columns), dtype=torch.int32)


def hidden_rows(bounds: list[int], causal: bool, key: int) -> set[int]:
    """Queries that do not see a key."""
    rows = set(range(max(0, key - (LK - LQ)))) if causal else set()
    if len(bounds) == 1:
        return rows | set(range(bounds[0], LQ))
    if causal:
        return rows | set(range(*bounds))
    if len(bounds) == 2:
        return rows | set(range(bounds[0], LQ)) | set(range(bounds[1]))
    return rows | set(range(*bounds[:2])) | set(range(*bounds[2:]))


def key_by_key(indices: torch.Tensor, causal: bool) -> torch.Tensor:
    seen = torch.ones(*indices.shape[:2], LQ, LK, dtype=torch.bool)
    for b, h, j in torch.cartesian_prod(*map(torch.arange, indices.shape[:3])).tolist():
        rows = [i for i in hidden_rows(indices[b, h, j].tolist(), causal, j) if i < LQ]
        seen[b, h, rows, j] = False
    return seen


@pytest.mark.parametrize("heads", [1, HKV, H])
@pytest.mark.parametrize(("columns", "causal"), [(1, True), (2, True), (2, False), (4, False)])
def test_outputs_and_gradients_with_dropout_and_a_bias(columns, causal, heads):
    """Against the reference with a dense mask. A bias has a gradient, and dropout draws the same mask."""
    indices = drawn(heads, columns)
    q, k, v = (torch.randn(B, n, h, D, requires_grad=True) for n, h in ((LQ, H), (LK, HKV), (LK, HKV)))
    bias = torch.randn(H, LQ, LK, requires_grad=True)
    torch.manual_seed(2)
    ours = flashmask_attention(q, k, v, indices, causal=causal, dropout=0.2, bias=bias, return_softmax_lse=True)
    seen = key_by_key(indices, causal).repeat_interleave(H // HKV if heads == HKV else 1, 1)
    torch.manual_seed(2)
    with tfast.backend("reference"):
        out, lse = tfast.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), AttentionMask.keep(seen.expand(B, H, LQ, LK)), bias=bias,
            dropout_p=0.2, empty_rows="zero", return_logsumexp=True,
        )  # fmt: skip
    pairs = [*zip(ours, (out.transpose(1, 2), lse), strict=True)]
    inputs, grad = (q, k, v, bias), torch.randn(B, LQ, H, D)
    gradients = (torch.autograd.grad(t, inputs, grad) for t in (pairs[0][0], pairs[0][1]))
    pairs += zip(*gradients, strict=True)
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("ends", "mask"),
    [
        ([8] * 10, AttentionMask.causal() & AttentionMask.intervals(None, torch.tensor([10] * 8 + [0] * 2))),
        ([3, 4, 5, 6, 7, 8, 9, 10, 10, 10], AttentionMask.window(2)),
        (
            [4, 4, 4, 4, 7, 7, 7, 10, 10, 10],
            AttentionMask.causal() & AttentionMask.documents(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])),
        ),
    ],
    ids=["causal", "sliding window", "causal documents"],
)
def test_published_examples(ends, mask):
    """The rows that the function's documentation gives for these masks."""
    indices = torch.tensor(ends, dtype=torch.int32).view(1, 1, 10, 1)
    assert torch.equal(startend_mask(indices, 10, causal=True).dense(10, 10), mask.dense(10, 10))


def test_the_last_query_sees_all_keys():
    """As in the function's own tests: with fewer queries than keys, the look-ahead is aligned with the last key."""
    seen = startend_mask(torch.full((1, 1, 7, 1), 4).int(), 4, causal=True).dense(4, 7)[0, 0]
    assert torch.equal(seen, torch.ones(4, 7).tril(3).bool())


def test_windows_blocks_and_a_mask_made_once():
    q, k, v = (torch.randn(1, 300, 2, D) for _ in range(3))
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    for causal, given, window in ((False, (5, 2), (5, 2)), (True, 4, (4, 0))):
        expected = tfast.attention(*heads, AttentionMask.window(*window)).transpose(1, 2)
        assert torch.equal(flashmask_attention(q, k, v, window_size=given, causal=causal), expected)
    indices = torch.full((1, 1, 300, 1), 300, dtype=torch.int32)
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.int32)
    blocks[..., 2, 0] = 0
    seen = torch.ones(300, 300).tril().bool()
    seen[256:, :128] = False
    found = flashmask_attention(q, k, v, indices, causal=True, block_mask=blocks)
    torch.testing.assert_close(found, tfast.attention(*heads, AttentionMask.keep(seen)).transpose(1, 2))
    made = flashmask_attention(q, k, v, startend_mask(indices, 300, causal=True), causal=True)
    assert torch.equal(made, flashmask_attention(q, k, v, indices, causal=True, dropout=0.5, training=False))


def test_a_query_without_keys_is_zero():
    q = torch.randn(1, LQ, 1, D, requires_grad=True)
    out, lse = flashmask_attention(q, q, q, torch.zeros(1, 1, LQ, 1).int(), causal=True, return_softmax_lse=True)
    assert not out.any() and (lse == float("-inf")).all() and not torch.autograd.grad(out.sum(), q)[0].any()


X = torch.ones(B, LK, HKV, D)
WRONG = {
    "int64": (lambda: flashmask_attention(X, X, X, drawn(1, 1).long(), causal=True), TypeError, "int32 tensor"),
    "columns": (lambda: flashmask_attention(X, X, X, drawn(1, 4), causal=True), ValueError, "with 1 or 2 columns"),
    "columns without causal": (lambda: flashmask_attention(X, X, X, drawn(1, 1)), ValueError, "with 2 or 4 columns"),
    "keys": (lambda: flashmask_attention(X, X, X, drawn(1, 2, 9)), ValueError, "each of the 41 keys"),
    "heads": (lambda: flashmask_attention(X, X, X, drawn(3, 2)), ValueError, "must have 1, 2 or 2 heads"),
    "batch": (lambda: flashmask_attention(X, X, X, drawn(1, 2)[:1].expand(3, -1, -1, -1)), ValueError, "broadcast"),
    "no tensor": (lambda: flashmask_attention(X, X, X, [1]), TypeError, "int32 tensor, got list"),
    "a window of no bound": (lambda: flashmask_attention(X, X, X, window_size=(2, -1)), ValueError, "got (2, -1)"),
    "a window of three": (lambda: flashmask_attention(X, X, X, window_size=(2, 1, 1)), ValueError, "one or two ints"),
    "a window of fewer queries": (lambda: flashmask_attention(X[:, 1:], X, X, window_size=3), ValueError, "40 and 41"),
    "other blocks": (
        lambda: flashmask_attention(X, X, X, drawn(1, 2), block_mask=torch.ones(1, 1, 2, 2).int()), ValueError,
        "must be (B, H, 1, 1)",
    ),
    "a window too": (lambda: flashmask_attention(X, X, X, drawn(1, 2), window_size=3), ValueError, "got both"),
    "blocks alone": (lambda: flashmask_attention(X, X, X, block_mask=X.int()), ValueError, "startend_row_indices"),
    "three axes": (lambda: flashmask_attention(X[0], X, X), ValueError, "query must be (B, L, H, D), got"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    wrong, error, words = WRONG[name]
    with pytest.raises(error) as raised:
        wrong()
    assert words in str(raised.value)
