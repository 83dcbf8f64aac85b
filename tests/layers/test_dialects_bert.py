"""BERT dialect against its oracle and the text that it comes from."""

import pytest
import torch
from dialect_cases import EMPTY, IDS, MEMORY, PADDING, ROWS, K, Q, V
from dialect_parity import Case, pair
from torch import nn

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.dialects import bert
from transformer_fast.reference.dialects import bert as oracle
from transformer_fast.reference.dropout import attention_keep
from transformer_fast.testing import fixed_dropout_seed


def test_weights_are_returned_after_dropout():
    dropout = nn.Dropout(0.5)
    attend = bert.Attention()
    with fixed_dropout_seed(5) as seed:
        out, weights = attend(Q, K, V, None, dropout)
    kept = attention_keep(seed, 0.5, *weights.shape)
    assert torch.equal(weights != 0, kept) and kept.any() and not kept.all()
    assert torch.allclose(out, weights @ V, atol=1e-6)
    dropout.eval()  # evaluation mode is enough for the weights to sum to 1
    _, weights = attend(Q, K, V, None, dropout)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 2, 6))
    out, none = attend(Q, K, V, None, dropout, need_weights=False)
    assert none is None and torch.allclose(out, weights @ V, atol=1e-6)


def test_lengths_of_inputs_without_heads():
    lengths, inputs = torch.tensor([5, 1, 3]), (Q[:, 0], K[:, 0], V[:, 0])
    expected, _ = oracle.Attention()(*inputs, torch.arange(5) < lengths[:, None, None])
    assert torch.allclose(bert.Attention()(*inputs, AttentionMask.lengths(lengths))[0], expected, atol=1e-6)


def test_a_sentence_of_padding_alone_gets_uniform_weights():
    weights = bert.Attention()(Q, Q, Q, EMPTY)[1]
    assert torch.allclose(weights[2], torch.full((2, 6, 6), 1 / 6))
    fast, _ = pair(bert, oracle, Case("MultiHeadedAttention", (4, 16), (ROWS,)))
    assert fast(ROWS, ROWS, ROWS, EMPTY).isfinite().all()


def test_token_embedding_is_not_scaled_and_its_padding_row_stays_zero():
    embedding = bert.TokenEmbedding(11)
    assert isinstance(embedding, nn.Embedding) and embedding.embedding_dim == 512 and embedding.padding_idx == 0
    out = embedding(IDS)
    assert torch.equal(out, embedding.weight[IDS]) and torch.all(out[IDS == 0] == 0)
    out.sum().backward()
    assert torch.all(embedding.weight.grad[0] == 0)
    with pytest.raises(IndexError, match="11"):
        embedding(torch.tensor([[11]]))


def test_positional_embedding_returns_the_table_alone():
    positions, theirs = bert.PositionalEmbedding(16), oracle.PositionalEmbedding(16)
    assert positions.pe.shape == (1, 512, 16) and list(positions.state_dict()) == ["pe"]
    assert torch.equal(positions(IDS), positions.pe[:, :6]) and torch.equal(positions(ROWS), positions(IDS))
    assert torch.allclose(positions(IDS), theirs(IDS), atol=1e-7)
    assert torch.allclose(positions(torch.zeros(1, 600)), tfast.positional_table(600, 16)[None], atol=1e-7)


ATTEND = bert.MultiHeadedAttention(4, 16)
WRONG = {
    "the head axis is missing": (
        lambda: ATTEND(ROWS, ROWS, ROWS, PADDING[:, 0]),
        ValueError,
        r"\(3, 1, 6\).*unsqueeze\(1\)",
    ),
    "a (B, L) mask": (lambda: ATTEND(ROWS, ROWS, ROWS, IDS > 0), ValueError, r"\(3, 6\).*mask\[:, None, None\]"),
    "a float mask": (lambda: ATTEND(ROWS, ROWS, ROWS, PADDING.float()), TypeError, "two ways.*bias=.*blocked.*kept"),
    "no tensor": (lambda: ATTEND(ROWS, ROWS, ROWS, [1, 0]), TypeError, "got list"),
    "a mask of another length": (lambda: ATTEND(ROWS, MEMORY, MEMORY, PADDING), ValueError, "must be broadcastable"),
    "heads do not divide": (lambda: bert.MultiHeadedAttention(5, 16), ValueError, "16 and 5 heads"),
    "dropout is a number": (lambda: bert.Attention()(Q, K, V, None, 0.1), TypeError, "nn.Module or None, got float"),
    "axes differ": (lambda: bert.Attention()(Q, K[0], V), ValueError, r"\(3, 2, 6, 4\), \(2, 5, 4\)"),
}


@pytest.mark.parametrize(("call", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_inputs(call, error, says):
    with pytest.raises(error, match=says):
        call()
