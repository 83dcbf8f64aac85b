"""d2l dialect against its oracle and the chapter's examples."""

import copy
import math
import pickle

import pytest
import torch
from dialect_cases import D2L, D2L_STACK, DK, DQ, DV, EACH, EMPTY_LENS, FAMILIES, LENS, SRC, TRG, X, x
from dialect_parity import Case, pair

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.dialects import d2l
from transformer_fast.reference.dialects import d2l as oracle

FAST, ORACLE, _ = FAMILIES["d2l"]


def test_transpose_and_back():
    for heads in (1, 2, 4):
        folded = d2l.transpose_qkv(X, heads)
        assert folded.shape == (3 * heads, 4, 16 // heads)
        assert torch.equal(folded[:heads], torch.stack(X[0].chunk(heads, -1)))
        assert torch.equal(d2l.transpose_output(folded, heads), X)


def test_sequence_mask():
    ones = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(d2l.sequence_mask(ones, torch.tensor([1, 2])), torch.tensor([[1, 0, 0], [4, 5, 0]]))
    deep, expected = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    expected[0, 1:] = expected[1, 2:] = -1
    assert torch.equal(d2l.sequence_mask(deep, torch.tensor([1, 2]), value=-1), expected)
    assert torch.all(deep == 1)  # the argument stays as it was


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_masked_softmax(dtype):
    scores = 3 * x(3, 4, 5)
    for lens in (None, LENS, EMPTY_LENS, EACH):
        mine, theirs = scores.to(dtype).requires_grad_(), scores.to(dtype).requires_grad_()
        out, expected = d2l.masked_softmax(mine, lens), oracle.masked_softmax(theirs, lens)
        assert out.dtype == dtype and torch.equal(out, expected)
        out.square().sum().backward(), expected.square().sum().backward()
        assert torch.equal(mine.grad, theirs.grad) and mine.grad.isfinite().all()
    assert torch.allclose(d2l.masked_softmax(scores, EMPTY_LENS)[1], torch.tensor(0.2))
    weights = d2l.masked_softmax(scores, AttentionMask.causal())
    assert torch.equal(weights > 0, torch.ones(3, 4, 5).tril() > 0)
    # The chapter's two examples: what is past a valid length has weight zero, the rest sums to one.
    for lens in (torch.tensor([2, 3]), torch.tensor([[1, 3], [2, 4]])):
        weights = d2l.masked_softmax(torch.rand(2, 2, 4), lens)
        assert torch.equal(weights > 0, torch.arange(4) < lens.view(2, -1, 1).expand(2, 2, 1))
        assert torch.allclose(weights.sum(-1), torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["dot product", "additive", "MLP"])
def test_the_chapters_attention_example(kind):
    """Equal keys: the output is the mean of the valid values."""
    keys, values = torch.ones(2, 10, 2), torch.arange(40.0).reshape(1, 10, 4).repeat(2, 1, 1)
    if kind == "dot product":
        attention, queries = d2l.DotProductAttention(0.5), torch.randn(2, 1, 2)
    else:
        attention = (d2l.AdditiveAttention if kind == "additive" else d2l.MLPAttention)(8, 0.1)
        queries = torch.randn(2, 1, 20)  # queries have another width than the keys
    attention.eval()
    out = attention(queries, keys, values, torch.tensor([2, 6]))
    assert torch.allclose(out, torch.tensor([[[2.0, 3, 4, 5]], [[10, 11, 12, 13]]]), atol=1e-5)
    expected = torch.zeros(2, 1, 10)
    expected[0, 0, :2], expected[1, 0, :6] = 1 / 2, 1 / 6
    assert torch.allclose(attention.attention_weights, expected, atol=1e-6)


def test_sizes_from_the_first_call():
    lazy = d2l.MultiHeadAttention(16, 4, 0.0)
    with pytest.raises(ValueError, match="uninitialized"):
        sum(p.numel() for p in lazy.parameters())
    lazy(DQ, DK, DV, LENS)
    assert [W.weight.shape[1] for W in (lazy.W_q, lazy.W_k, lazy.W_v, lazy.W_o)] == [6, 7, 8, 16]
    given = d2l.MultiHeadAttention(16, 4, 0.0, query_size=6, key_size=7, value_size=8)
    given.load_state_dict(lazy.state_dict())
    fresh = d2l.MultiHeadAttention(16, 4, 0.0)
    fresh.load_state_dict(given.state_dict())
    for same in (given, fresh):
        assert torch.equal(same(DQ, DK, DV, LENS), lazy(DQ, DK, DV, LENS))
    assert d2l.PositionWiseFFN(4, 8)(X).shape == (3, 4, 8)


@pytest.mark.parametrize("name", ["DotProductAttention", "AdditiveAttention", "MultiHeadAttention"])
@pytest.mark.parametrize("lens", [None, LENS, EMPTY_LENS, EACH], ids=["none", "lens", "empty", "each"])
def test_weights_when_they_are_asked_for(name, lens):
    """Weights of the last call are those before dropout, without gradient."""
    case = next(c for c in D2L if c.name == name)
    fast, slow = pair(d2l, oracle, case)
    last, expected = (getattr(m, "attention", m) for m in (fast, slow))
    assert last.attention_weights is None
    for inputs in (tuple(t + 1 for t in case.inputs), case.inputs):
        fast.train()(*inputs, lens), slow.train()(*inputs, lens)
        weights = last.attention_weights
        assert not weights.requires_grad and torch.allclose(weights, expected.attention_weights, atol=1e-6)
    for same in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert getattr(same, "attention", same).attention_weights is None
        assert torch.equal(same.eval()(*case.inputs, lens), fast.eval()(*case.inputs, lens))


def test_weights_of_a_whole_model():
    fast, slow = pair(FAST, ORACLE, Case("Whole", (D2L_STACK, 0.3), ()))
    for model in (fast, slow):
        model.eval()(SRC, TRG, LENS)
    fast, slow = fast.model, slow.model
    for mine, theirs in (
        (fast.encoder.attention_weights, slow.encoder.attention_weights),
        *zip(fast.decoder.attention_weights, slow.decoder.attention_weights, strict=True),
    ):
        assert len(mine) == 2
        for weights, expected in zip(mine, theirs, strict=True):
            assert weights.shape == expected.shape and torch.allclose(weights, expected, atol=1e-6)


def test_the_state_decodes_step_by_step_what_training_computed_at_once():
    fast, slow = pair(FAST, ORACLE, Case("Whole", (D2L_STACK, 0.0), ()))
    encoder, decoder = fast.model.encoder, fast.model.decoder
    expected = fast.train()(SRC, TRG, LENS)
    fast.eval(), slow.eval()
    state = decoder.init_state(encoder(SRC, LENS), LENS)
    theirs = slow.model.decoder.init_state(slow.model.encoder(SRC, LENS), LENS)
    for t in range(4):
        logits, state = decoder(TRG[:, t : t + 1], state)
        assert torch.allclose(logits[:, 0], expected[:, t], atol=1e-4)
        their_logits, theirs = slow.model.decoder(TRG[:, t : t + 1], theirs)
        assert torch.allclose(logits, their_logits, atol=1e-4)
        for seen, their_seen in zip(state[2], theirs[2], strict=True):
            assert seen.shape == (3, t + 1, 16) and torch.allclose(seen, their_seen, atol=1e-4)
    # All at once, or in pieces, where each new position sees only those before it.
    causal = d2l.TransformerDecoder(*D2L_STACK, 0.0, causal_eval=True).eval()
    causal.load_state_dict(decoder.state_dict())
    state = causal.init_state(encoder(SRC, LENS), LENS)
    pieces = [causal(piece, state)[0] for piece in (TRG[:, :1], TRG[:, 1:])]
    assert torch.allclose(torch.cat(pieces, 1), expected, atol=1e-4)


def test_a_learned_bias_goes_in_as_a_mask():
    bias = x(3, 1, 4, 5).requires_grad_()
    mask = AttentionMask.bias(bias) & AttentionMask.lengths(LENS)
    scores = x(3, 4, 6) @ x(3, 5, 6).mT / math.sqrt(6)
    expected = oracle.masked_softmax(scores + bias[:, 0], LENS)
    for attention, inputs in (
        (d2l.DotProductAttention(0.0), (x(3, 4, 6), x(3, 5, 6))),
        (d2l.AdditiveAttention(8, 0.0), (DQ, DK)),
    ):
        out = attention(*inputs, DV, mask)
        weights = attention.attention_weights
        assert not weights.requires_grad and torch.allclose(weights @ DV, out, atol=1e-6)
        assert torch.autograd.grad(out.square().sum(), bias)[0].abs().sum() > 0
        if isinstance(attention, d2l.DotProductAttention):
            assert torch.allclose(weights, expected, atol=1e-6)


def test_names():
    model = d2l.EncoderDecoder(d2l.TransformerEncoder(*D2L_STACK, 0.1), d2l.TransformerDecoder(*D2L_STACK, 0.1))
    names = {"encoder.blks.block1.attention.W_q.weight", "decoder.blks.block0.attention2.W_v.weight"}
    assert names <= set(model.state_dict()) and "encoder.blks.block0.attention.W_q.bias" not in model.state_dict()
    assert d2l.PositionalEncoding(16, 0.1).P.shape == (1, 1000, 16)
    # The chapter's own checkpoints have no P.
    without = {name: t for name, t in model.state_dict().items() if not name.endswith(".P")}
    assert model.load_state_dict(without) == ([], [])
    assert torch.equal(model.encoder.pos_encoding.P[0], tfast.positional_table(1000, 16))


ATTEND = d2l.MultiHeadAttention(16, 4, 0.1, query_size=16, key_size=16, value_size=16)
WRONG = {
    "a bool keep mask": (lambda: ATTEND(X, X, X, TRG > 0), TypeError, r"got torch.bool.*AttentionMask\.keep\(mask\)"),
    "float lengths": (lambda: ATTEND(X, X, X, LENS.float()), TypeError, r"got torch.float32.*blocked\(mask\)"),
    "no tensor": (lambda: ATTEND(X, X, X, [1, 2, 3]), TypeError, "got list"),
    "lengths of another batch": (lambda: ATTEND(X, X, X, LENS[:2]), ValueError, r"\(B,\) = \(3,\).*\(2,\)"),
    "a length past the keys": (lambda: ATTEND(X, X, X, LENS), ValueError, "Lk = 4.*5"),
    "heads in the inputs": (lambda: ATTEND(X[:, None], X, X, LENS), ValueError, "batch, length, width"),
    "heads do not divide": (lambda: d2l.MultiHeadAttention(100, 8, 0.5), ValueError, "100 and 8 heads"),
    "X and Y differ": (lambda: d2l.AddNorm(16, 0.1)(X, X[:, :1]), ValueError, r"one shape.*4, 16\).*1, 16\)"),
    "a norm over positions": (
        lambda: d2l.AddNorm([100, 24], 0.5),
        ValueError,
        r"\(100, 24\) would normalise over positions",
    ),
    "scores of two axes": (lambda: d2l.masked_softmax(X[0], LENS), ValueError, r"\(B, Lq, Lk\), got shape \(4, 16\)"),
    "lengths for sequence_mask": (lambda: d2l.sequence_mask(X, LENS[:2]), ValueError, r"each of 3, got \(2,\)"),
}


@pytest.mark.parametrize(("call", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_inputs(call, error, says):
    with pytest.raises(error, match=says):
        call()
