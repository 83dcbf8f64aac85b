"""TensorFlow dialect against its oracle and the tutorial's examples."""

import pytest
import torch
from dialect_cases import MEMORY, SRC, TF_COMBINED, TF_LAYER, TF_MASKS, TF_PADDING, TF_STACK, TRG, X, x
from dialect_parity import Case, pair
from torch import nn

import transformer_fast as tfast
from transformer_fast.dialects import tensorflow as tf
from transformer_fast.reference.dialects import tensorflow as oracle

EXAMPLES = [  # the tutorial's: a query that is a key's direction, one between two keys, and three at once
    ([[0, 10, 0]], [[0, 1, 0, 0]], [[10, 0]]),
    ([[0, 0, 10]], [[0, 0, 0.5, 0.5]], [[550, 5.5]]),
    ([[10, 10, 0]], [[0.5, 0.5, 0, 0]], [[5.5, 0]]),
    ([[0, 0, 10], [0, 10, 0], [10, 10, 0]], None, [[550, 5.5], [10, 0], [5.5, 0]]),
]


@pytest.mark.parametrize(("q", "weights", "out"), EXAMPLES)
def test_the_tutorials_attention_example(q, weights, out):
    k = torch.tensor([[10.0, 0, 0], [0, 10, 0], [0, 0, 10], [0, 0, 10]])
    v = torch.tensor([[1.0, 0], [10, 0], [100, 5], [1000, 6]])
    found, found_weights = tf.scaled_dot_product_attention(torch.tensor(q).float(), k, v, None)
    assert torch.allclose(found, torch.tensor(out).float(), atol=1e-4)
    assert weights is None or torch.allclose(found_weights, torch.tensor(weights).float(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_dot_product_attention_of_every_rank(dtype):
    for axes in (2, 3, 4):
        q, k, v = (x(3, 2, n, d)[(0,) * (4 - axes)].to(dtype) for n, d in ((4, 8), (5, 8), (5, 6)))
        mask = (x(*(1,) * (axes - 2), 4, 5) > 0).float()
        mine = tf.scaled_dot_product_attention(q, k, v, mask)
        exact = oracle.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
        for part, expected in zip(mine, exact, strict=True):
            assert part.dtype == dtype and part.shape == expected.shape
            assert torch.allclose(part.double(), expected, atol=0.03 if dtype == torch.bfloat16 else 1e-6)


def test_the_tutorials_masks():
    ids = torch.tensor([[7, 6, 0, 0, 1], [1, 2, 3, 0, 0], [0, 0, 0, 4, 5]])
    assert torch.equal(
        tf.create_padding_mask(ids)[:, 0, 0], torch.tensor([[0.0, 0, 1, 1, 0], [0, 0, 0, 1, 1], [1, 1, 1, 0, 0]])
    )
    assert tf.create_padding_mask(ids).shape == (3, 1, 1, 5)
    assert torch.equal(tf.create_look_ahead_mask(3), torch.tensor([[0.0, 1, 1], [0, 0, 1], [0, 0, 0]]))
    inp, both, out = tf.create_masks(SRC, TRG)
    assert torch.equal(inp, (SRC == 0).float()[:, None, None]) and torch.equal(inp, out)
    assert torch.equal(both > 0, (TRG == 0)[:, None, None] | ~torch.ones(4, 4).tril().bool())
    assert inp.dtype == both.dtype == torch.float32


def test_angles_and_positions():
    angles = tf.get_angles(torch.arange(60)[:, None], torch.arange(15)[None], 15)
    assert angles.dtype == torch.float64 and angles.shape == (60, 15)
    # An exponent of i/d doubled, or taken over i instead of i // 2, is a mistake that circulates.
    assert float(tf.get_angles(3, 4, 8)) == pytest.approx(3 / 10000 ** (4 / 8)) == float(tf.get_angles(3, 5, 8))
    for position, d in ((60, 15), (2048, 512), (50, 512), (1, 1)):
        table = tf.positional_encoding(position, d)
        assert table.shape == (1, position, d) and table.dtype == torch.float32
        assert torch.allclose(table, oracle.positional_encoding(position, d), atol=1e-6)
    half = tf.positional_encoding(60, 16)[0, 1:]  # sine in one column and cosine in the next: not sine twice
    assert torch.allclose(half[:, 0::2].square() + half[:, 1::2].square(), torch.ones(59, 8), atol=1e-6)


def test_a_row_without_keys_is_uniform_at_any_score():
    """The tutorial's -1e9 in fp32 gives a uniform row for small scores only; the dialect does so by definition."""
    q, k, v = 100 * x(1, 1, 4, 8), x(1, 1, 5, 8), x(1, 1, 5, 8)
    for dtype in (torch.float32, torch.float64, torch.float16):
        out, weights = tf.scaled_dot_product_attention(*(t.to(dtype) for t in (q, k, v)), torch.ones(1, 1, 1, 5))
        assert torch.allclose(weights, torch.full_like(weights, 0.2), atol=1e-4)
        assert torch.allclose(out, v.to(dtype).mean(2, keepdim=True).expand_as(out), atol=2e-3)


def test_weights_only_where_somebody_wants_them():
    fast, slow = pair(tf, oracle, Case("Transformer", (*TF_STACK, 12, 50, 50), ()))
    fast.eval(), slow.eval()
    logits, weights = fast(SRC, TRG, *TF_MASKS)
    assert (
        list(weights)
        == [f"decoder_layer{n}_block{b}" for n in (1, 2) for b in (1, 2)]
        == list(slow(SRC, TRG, *TF_MASKS)[1])
    )
    assert weights["decoder_layer2_block1"].shape == (3, 4, 4, 4)
    assert weights["decoder_layer2_block2"].shape == (3, 4, 4, 5)
    same, none = fast(SRC, TRG, *TF_MASKS, need_weights=False)
    assert none is None and torch.allclose(same, logits, atol=1e-5)
    layer = fast.decoder.dec_layers[0]
    assert layer(X, MEMORY, TF_COMBINED, TF_PADDING, need_weights=False)[1:] == (None, None)


def test_weights_are_before_dropout_and_sum_to_one_in_training():
    fast, _ = pair(tf, oracle, Case("DecoderLayer", (*TF_LAYER, 0.5), ()))
    _, weights_1, weights_2 = fast.train()(X, MEMORY, TF_COMBINED, TF_PADDING)
    for weights in (weights_1, weights_2):
        assert torch.allclose(weights.sum(-1), torch.ones(3, 4, 4))


def test_norms_and_names() -> None:
    fast = tf.Transformer(*TF_STACK, 12, 50, 50)
    assert {"encoder.enc_layers.1.mha.wq.bias", "decoder.dec_layers.1.layernorm3.weight"} <= set(fast.state_dict())
    norms = [m for m in fast.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 2 * 3 and all(norm.eps == 1e-6 for norm in norms)


def test_a_checkpoint_may_lack_the_positions():
    fast = tf.Encoder(*TF_STACK, 50)
    state = {name: t for name, t in fast.state_dict().items() if name != "pos_encoding"}
    other = tf.Encoder(*TF_STACK, 20)
    assert other.load_state_dict(state) == ([], [])
    assert torch.equal(other.pos_encoding[0], tfast.positional_table(20, 16))


ATTEND = tf.MultiHeadAttention(16, 4)
WRONG = {
    "a bool mask": (lambda: ATTEND(X, X, X, TF_COMBINED.bool()), TypeError, r"two ways.*mask\.float\(\).*keep\(mask\)"),
    "an integer mask": (lambda: ATTEND(X, X, X, TF_COMBINED.long()), TypeError, "int64.*two ways"),
    "an additive mask": (lambda: ATTEND(X, X, X, TF_COMBINED * -1e9), ValueError, r"1.0 for blocked.*bias\(mask\)"),
    "no tensor": (lambda: ATTEND(X, X, X, [1.0]), TypeError, "got list"),
    "the head axis is missing": (
        lambda: ATTEND(X, X, X, TF_COMBINED[:, 0]),
        ValueError,
        r"mask\[:, None\].*mask\[None\]",
    ),
    "a (B, L) mask": (lambda: ATTEND(X, X, X, (TRG == 0).float()), ValueError, r"\(B, 1, 1, Lk\)"),
    "more axes than scores": (
        lambda: tf.scaled_dot_product_attention(X, X, X, TF_COMBINED),
        ValueError,
        r"\(3, 1, 4, 4\) does not fit scores of 3",
    ),
    "order k, q, v": (lambda: ATTEND(X, MEMORY, X, TF_PADDING), ValueError, "v must be of shape"),
    "heads do not divide": (lambda: tf.MultiHeadAttention(16, 3), ValueError, "16 and 3 heads"),
    "five axes": (lambda: tf.scaled_dot_product_attention(*[x(1, 1, 2, 2, 2)] * 3, None), ValueError, "2, 2, 2"),
}


@pytest.mark.parametrize(("call", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_inputs(call, error, says):
    with pytest.raises(error, match=says):
        call()
