"""``attention_mask_of`` recognises the form of block masks, and ``flex_attention`` computes with them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peers import assert_alike, plain_attention
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

from examples import examples
from transformer_fast import AttentionMask
from transformer_fast.compat import attention_mask_of, block_masks, flex_attention

B, H, L = 2, 2, 24
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [5] * 4 + [3] * 20])
MIXED = torch.tensor([[0, 1, 2] * 8, [0, 1] * 12])
LENGTHS, LEFT, PREFIX = torch.tensor([17, 24]), torch.tensor([3, 0]), torch.tensor([9, 4])
NOISE = torch.rand(L, L, generator=torch.Generator().manual_seed(1)) > 0.5


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return q - k <= 5


def documents(b, h, q, k):
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def mixed(b, h, q, k):
    return MIXED[b, q] == MIXED[b, k]


def padding(b, h, q, k):
    return k < LENGTHS[b]


def left_padding(b, h, q, k):
    return k >= LEFT[b]


def query_padding(b, h, q, k):
    return q < LENGTHS[b]


prefix = or_masks(causal, lambda b, h, q, k: k < PREFIX[b])

FORMS = {
    "full": (lambda b, h, q, k: q >= 0, "AttentionMask()"),
    "causal": (causal, "causal()"),
    "causal with an offset": (lambda b, h, q, k: q + 3 >= k, "causal(3)"),
    "strictly causal": (lambda b, h, q, k: q > k, "causal(-1)"),
    "no key after five before": (window, "window(5, None)"),
    "sliding window": (and_masks(causal, window), "window(5)"),
    "window on both sides": (lambda b, h, q, k: (q - k).abs() <= 2, "window(2, 2)"),
    "documents": (documents, f"documents(int32 {(B, L)}, int32 {(B, L)})"),
    "documents, causal": (and_masks(documents, causal), f"causal() & documents(int32 {(B, L)}, int32 {(B, L)})"),
    "documents, window": (
        and_masks(documents, causal, window),
        f"window(5) & documents(int32 {(B, L)}, int32 {(B, L)})",
    ),
    "documents anywhere": (and_masks(mixed, causal), f"causal() & documents(int32 {(B, L)}, int32 {(B, L)})"),
    "documents, padding": (and_masks(documents, padding), f"documents(int32 {(B, L)}, int32 {(B, L)})"),
    "padding": (padding, "lengths(int32 (2,))"),
    "padding, causal": (and_masks(padding, causal), "lengths(int32 (2,)) & causal()"),
    "padding in front, causal": (and_masks(left_padding, causal), f"keep(bool {(B, 1, 1, L)}) & causal()"),
    "padded queries": (and_masks(query_padding, padding), f"lengths(int32 {(B, L)})"),
    "prefix": (prefix, f"lengths(int32 {(B, L)})"),
    "prefix, window": (and_masks(prefix, window), f"lengths(int32 {(B, L)}) & window(5, None)"),
    "no key at all": (lambda b, h, q, k: q < 0, "lengths(int32 (2,))"),
    "noise": (lambda b, h, q, k: NOISE[q, k], f"keep(bool {(B, 1, L, L)})"),
    "by head": (lambda b, h, q, k: q - k <= h, f"keep(bool {(B, H, L, L)})"),
    "some see the first key": (lambda b, h, q, k: (k == 0) & (q > 3), "lengths(int32 (2,)) & causal(-4)"),
    "every fourth sees it": (
        lambda b, h, q, k: (k == 0) & (q % 4 == 1),
        f"documents(int32 {(B, L)}, int32 {(B, L)})",
    ),
}


def allowed_by(function, B=B, H=H, Lq=L, Lk=L):
    """Keys that a function allows, bool (B, H, Lq, Lk)."""
    found = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            q, k = torch.arange(Lq)[:, None], torch.arange(Lk)
            found[b, h] = function(torch.tensor(b), torch.tensor(h), q, k)
    return found


def assert_allows(mask: AttentionMask, expected: torch.Tensor) -> None:
    dense = mask.dense(*expected.shape[2:], device="cpu")
    assert torch.equal(dense.expand_as(expected), expected)


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("block", "at_a_time"), [(128, 2 * B * H * L), (8, 2**18)])
def test_each_form_is_found(name, block, at_a_time, monkeypatch):
    function, expected = FORMS[name]
    monkeypatch.setattr(block_masks, "_AT_A_TIME", at_a_time)
    mask = attention_mask_of(create_block_mask(function, B, H, L, L, device="cpu", BLOCK_SIZE=block))
    assert repr(mask) == expected
    assert_allows(mask, allowed_by(function))


@pytest.mark.parametrize("name", ["sliding window", "documents, window", "padding in front, causal", "prefix"])
def test_long_masks_are_evaluated_again_and_never_kept(name, monkeypatch):
    function, expected = FORMS[name]
    monkeypatch.setattr(block_masks, "MAX_DENSE", 1000)
    mask = create_block_mask(function, B, H, L, L, device="cpu")
    assert repr(attention_mask_of(mask)) == expected
    noise = create_block_mask(FORMS["noise"][0], B, H, L, L, device="cpu")
    with pytest.raises(ValueError, match=rf"\(2, 2, {L}, {L}\).*at most 1000 entries, got {B * H * L * L}"):
        attention_mask_of(noise)


@st.composite
def combinations(draw):
    """Cases (Lq, Lk, mask function): a set of visible keys within any band."""
    Lq, Lk = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    lower, upper = draw(st.integers(-9, 3)), draw(st.integers(-3, 9))
    parts = []
    if draw(st.booleans()):
        parts.append(lambda b, h, q, k: k <= q + upper)
    if draw(st.booleans()):
        parts.append(lambda b, h, q, k: k >= q + lower)
    kind = draw(st.sampled_from(["all", "lengths", "keys", "documents", "two"]))
    numbers = lambda n, most: torch.tensor(draw(st.lists(st.integers(0, most), min_size=2 * n, max_size=2 * n)))  # noqa: E731
    lengths, keys = numbers(1, Lk), numbers(Lk, 1).view(2, Lk).bool()
    of_queries, of_keys = numbers(Lq, 2).view(2, Lq).sort(-1).values, numbers(Lk, 2).view(2, Lk).sort(-1).values
    if kind in ("lengths", "two"):
        parts.append(lambda b, h, q, k: k < lengths[b])
    if kind == "keys":
        parts.append(lambda b, h, q, k: keys[b, k])
    if kind in ("documents", "two"):
        parts.append(lambda b, h, q, k: of_queries[b, q] == of_keys[b, k])
    return Lq, Lk, and_masks(*parts) if parts else FORMS["full"][0]


@examples(25)
@given(combinations())
def test_a_band_of_one_set_of_keys_needs_no_dense_mask(drawn):
    Lq, Lk, function = drawn
    mask = attention_mask_of(create_block_mask(function, 2, 1, Lq, Lk, device="cpu", BLOCK_SIZE=4))
    assert_allows(mask, allowed_by(function, 2, 1, Lq, Lk))
    assert mask.keep_mask is None, mask


def test_blocks_count_before_the_function():
    """Blocks of 4 x 4: row 0 has a full block and a partial one, row 1 only the second."""
    numbers, indices = torch.tensor([[[1, 1]]]), torch.tensor([[[[1, 0], [1, 0]]]])
    full, of_full = torch.tensor([[[1, 0]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    given = {"BLOCK_SIZE": 4, "mask_mod": causal, "seq_lengths": (7, 8)}
    mask = BlockMask.from_kv_blocks(*(t.int() for t in (numbers, indices, full, of_full)), **given)
    expected = torch.zeros(1, 1, 7, 8, dtype=torch.bool)
    expected[..., :4, :4] = True
    expected[..., 4:, 4:] = causal(0, 0, torch.arange(4, 7)[:, None], torch.arange(4, 8))
    assert_allows(attention_mask_of(mask), expected)


@pytest.mark.parametrize("name", ["sliding window", "documents, causal", "prefix", "padded queries", "by head"])
@pytest.mark.parametrize("converted", [False, True])
def test_flex_attention(name, converted, backend):
    function = FORMS[name][0]
    mask = create_block_mask(function, B, 4, L, L, device="cpu")
    if converted:
        mask = attention_mask_of(mask)
    q = torch.randn(B, 4, L, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, 2, L, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"block_mask": mask, "scale": 0.3, "enable_gqa": True}
    out, logsumexp = flex_attention(q, k, v, return_lse=True, **options)
    allowed = allowed_by(function, B, 4)
    results = []
    for b, h in itertools.product(range(B), range(4)):
        one = (t[b, n].unsqueeze(1) for t, n in ((q, h), (k, h // 2), (v, h // 2)))
        results.append(plain_attention(*one, allowed[b, h], scale=0.3))
    outs, rows, _ = zip(*results)
    assert_alike((out.flatten(0, 1), logsumexp.flatten(0, 1)), (torch.cat(outs, 1).transpose(0, 1), torch.cat(rows)))
    expected = torch.cat(outs, 1).transpose(0, 1).view_as(out)
    grad = torch.randn_like(out)
    assert_alike(*(torch.autograd.grad(t, (q, k, v), grad) for t in (out, expected)))
    again, aux = flex_attention(q, k, v, return_aux=torchs.AuxRequest(lse=True), **options)
    assert torch.equal(again, out) and isinstance(aux, torchs.AuxOutput) and torch.equal(aux.lse, logsumexp)
    assert flex_attention(q, k, v, return_aux=torchs.AuxRequest(), **options)[1] == torchs.AuxOutput()


Q = torch.randn(1, 4, 8, 8)
MASK = create_block_mask(causal, None, None, 8, 8, device="cpu")


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flex_attention(Q, Q, Q, lambda s, *_: s), NotImplementedError, "score_mod is not supported.*alibi"),
        (
            lambda: flex_attention(Q, Q, Q, return_aux=torchs.AuxRequest(max_scores=True)),
            NotImplementedError,
            "return_aux with max_scores is not supported",
        ),
        (lambda: flex_attention(Q, Q[:, :2], Q[:, :2]), ValueError, "share their heads unless enable_gqa=True"),
        (lambda: flex_attention(Q[0], Q, Q), ValueError, r"query must be \(B, H, Lq, D\)"),
        (lambda: flex_attention(Q[:, :, :4], Q, Q, block_mask=MASK), ValueError, r"end in \(Lq, Lk\) = \(4, 8\)"),
        (
            lambda: flex_attention(Q, Q, Q, block_mask=causal),
            TypeError,
            r"expected a BlockMask, got function; torch's create_block_mask\(function, B, H, Lq, Lk\)",
        ),
        (lambda: attention_mask_of(MASK[:, :, 0:1]), RuntimeError, "sliced BlockMask"),
    ],
)
def test_wrong_calls_say_what_is_expected(call, error, said):
    with pytest.raises(error, match=said):
        call()
