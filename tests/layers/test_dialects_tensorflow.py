"""The dialect of TensorFlow's tutorial, held to its oracle and to the tutorial's own examples."""

import math

import pytest
import torch
from dialect_parity import Case, check_evaluation, check_training, pair, parametrized
from torch import nn

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.dialects import tensorflow as tf
from transformer_fast.reference.dialects import tensorflow as oracle

INP = torch.tensor([[7, 6, 2, 9, 1], [1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])
TAR = torch.tensor([[3, 5, 1, 8], [4, 2, 0, 0], [1, 1, 1, 0]])
MASKS = oracle.create_masks(INP, TAR)
PADDING, COMBINED, _ = MASKS
LOOK_AHEAD = oracle.create_look_ahead_mask(4)
EMPTY = PADDING.clone()
EMPTY[1] = 1


def x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, MEMORY = x(3, 4, 16), x(3, 5, 16)
LAYER = (16, 4, 24)
STACK = (2, 16, 4, 24, 11)
CASES = [
    Case("MultiHeadAttention", (16, 4), (X, X, X), (LOOK_AHEAD,)),
    Case("MultiHeadAttention", (16, 4), (X, X, X), (COMBINED,)),
    Case("MultiHeadAttention", (16, 2), (MEMORY, MEMORY, X), (EMPTY,)),
    Case("MultiHeadAttention", (16, 2), (MEMORY, x(3, 5, 16) + 1, X)),
    Case("point_wise_feed_forward_network", (16, 24), (X,)),
    Case("EncoderLayer", LAYER, (MEMORY,), (PADDING,)),
    Case("EncoderLayer", (*LAYER, 0.5), (MEMORY,), (EMPTY,)),
    Case("DecoderLayer", LAYER, (X, MEMORY), (COMBINED, PADDING)),
    Case("Encoder", (*STACK, 50, 0.3), (INP,), (PADDING,)),
    Case("Encoder", (*STACK, 3), (INP,)),
    Case("Decoder", (*STACK, 50, 0.3), (TAR, MEMORY), (COMBINED, PADDING)),
    Case("Transformer", (*STACK, 12, 50, 3, 0.3), (INP, TAR), MASKS),
    Case("AdditiveAttention", (6, 16, 10), (MEMORY, MEMORY, x(3, 4, 10)), (PADDING[:, 0],)),
    Case("AdditiveAttention", (6, 9, 16), (MEMORY, x(3, 5, 9), X)),
    Case("BilinearAttention", (6, 16, 10), (MEMORY, MEMORY, x(3, 4, 10)), (EMPTY[:, 0],)),
    Case("BilinearAttention", (6, 16, 16), (X, X, X), (LOOK_AHEAD,)),
]


@parametrized(CASES)
def test_outputs_weights_and_gradients(case, device):
    check_evaluation(tf, oracle, case, device)


@parametrized(CASES)
def test_training_with_the_same_dropout(case):
    check_training(tf, oracle, case)


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
    for mine, theirs in zip(tf.create_masks(INP, TAR), MASKS, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == torch.float32


def test_angles_and_positions():
    pos, i = torch.arange(60)[:, None], torch.arange(15)[None]
    angles = tf.get_angles(pos, i, 15)
    assert angles.dtype == torch.float64 and torch.allclose(angles, oracle.get_angles(pos.double(), i.double(), 15))
    # An exponent of i/d doubled, or taken over i instead of i // 2, is a mistake that circulates.
    assert float(tf.get_angles(3, 4, 8)) == pytest.approx(3 / 10000 ** (4 / 8)) == float(tf.get_angles(3, 5, 8))
    for position, d in ((60, 15), (2048, 512), (50, 512), (1, 1)):
        table = tf.positional_encoding(position, d)
        assert table.shape == (1, position, d) and table.dtype == torch.float32
        assert torch.allclose(table, oracle.positional_encoding(position, d), atol=1e-6)
    half = tf.positional_encoding(60, 16)[0, 1:]  # sine in one column and cosine in the next: not sine twice
    assert torch.allclose(half[:, 0::2].square() + half[:, 1::2].square(), torch.ones(59, 8), atol=1e-6)


def test_a_row_without_keys_is_uniform_at_any_score():
    """Adding -1e9 in fp32 leaves a fully blocked row uniform only for small scores; here it is so by definition."""
    q, k, v = 100 * x(1, 1, 4, 8), x(1, 1, 5, 8), x(1, 1, 5, 8)
    for dtype in (torch.float32, torch.float64, torch.float16):
        out, weights = tf.scaled_dot_product_attention(*(t.to(dtype) for t in (q, k, v)), torch.ones(1, 1, 1, 5))
        assert torch.allclose(weights, torch.full_like(weights, 0.2), atol=1e-4)
        assert torch.allclose(out, v.to(dtype).mean(2, keepdim=True).expand_as(out), atol=2e-3)


def test_blocked_keys_cannot_leak():
    k, v = MEMORY[:, None].clone(), MEMORY[:, None].clone()
    expected = tf.scaled_dot_product_attention(X[:, None], k, v, PADDING)[0]
    blocked = PADDING.bool()[:, 0, 0]
    k[blocked[:, None]] = math.nan
    v[blocked[:, None]] = math.inf
    assert torch.equal(tf.scaled_dot_product_attention(X[:, None], k, v, PADDING)[0], expected)


def test_weights_only_where_somebody_wants_them():
    fast, slow = pair(tf, oracle, Case("Transformer", (*STACK, 12, 50, 50), ()))
    fast.eval(), slow.eval()
    logits, weights = fast(INP, TAR, *MASKS)
    assert (
        list(weights)
        == [f"decoder_layer{n}_block{b}" for n in (1, 2) for b in (1, 2)]
        == list(slow(INP, TAR, *MASKS)[1])
    )
    assert weights["decoder_layer2_block1"].shape == (3, 4, 4, 4)
    assert weights["decoder_layer2_block2"].shape == (3, 4, 4, 5)
    same, none = fast(INP, TAR, *MASKS, need_weights=False)
    assert none is None and torch.allclose(same, logits, atol=1e-5)
    layer = fast.decoder.dec_layers[0]
    assert layer(X, MEMORY, COMBINED, PADDING, need_weights=False)[1:] == (None, None)


def test_weights_are_before_dropout_and_sum_to_one_in_training():
    fast, _ = pair(tf, oracle, Case("DecoderLayer", (*LAYER, 0.5), ()))
    _, weights_1, weights_2 = fast.train()(X, MEMORY, COMBINED, PADDING)
    for weights in (weights_1, weights_2):
        assert torch.allclose(weights.sum(-1), torch.ones(3, 4, 4))


def test_masks_of_ours_go_in_as_well():
    fast, _ = pair(tf, oracle, Case("Transformer", (*STACK, 12, 50, 50), ()))
    fast.eval()
    padding = AttentionMask.lengths(torch.tensor([5, 3, 1]))
    look_ahead = AttentionMask.causal() & AttentionMask.lengths(torch.tensor([4, 2, 3]))
    expected, _ = fast(INP, TAR, *MASKS)
    assert torch.allclose(fast(INP, TAR, padding, look_ahead, padding)[0], expected, atol=1e-5)


def test_it_does_not_see_the_future():
    fast, _ = pair(tf, oracle, Case("Transformer", (*STACK, 12, 50, 50), ()))
    fast.eval()
    expected = fast(INP, TAR, None, LOOK_AHEAD, None)[0]
    other = TAR.clone()
    other[:, 2:] = 9
    assert torch.equal(fast(INP, other, None, LOOK_AHEAD, None)[0][:, :2], expected[:, :2])


def test_the_tutorials_shapes():
    with torch.inference_mode():
        attend = tf.MultiHeadAttention(512, 8)
        y = torch.rand(1, 60, 512)
        out, weights = attend(y, k=y, q=y, mask=None)
        assert out.shape == (1, 60, 512) and weights.shape == (1, 8, 60, 60)
        assert tf.point_wise_feed_forward_network(512, 2048)(torch.rand(2, 50, 512)).shape == (2, 50, 512)
        encoded = tf.EncoderLayer(512, 8, 2048)(torch.rand(2, 43, 512), None)
        assert encoded.shape == (2, 43, 512)
        decoded, *_ = tf.DecoderLayer(512, 8, 2048)(torch.rand(2, 50, 512), encoded, None, None)
        assert decoded.shape == (2, 50, 512)
        model = tf.Transformer(2, 512, 8, 2048, 8500, 8000, 10000, 6000)
        logits, _ = model(torch.randint(0, 200, (4, 38)), torch.randint(0, 200, (4, 36)))
        assert logits.shape == (4, 36, 8000)


def test_names_and_norms():
    fast = tf.Transformer(*STACK, 12, 50, 50)
    names = set(fast.state_dict())
    for part in ("mha1.wq", "mha2.wk", "mha2.wv", "mha1.dense", "ffn.0", "ffn.2", "layernorm3"):
        assert f"decoder.dec_layers.1.{part}.weight" in names
    assert {"encoder.embedding.weight", "encoder.enc_layers.0.mha.wq.bias", "final_layer.weight"} <= names
    norms = [m for m in fast.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 2 * 2 + 2 * 3 and all(norm.eps == 1e-6 for norm in norms)


def test_a_checkpoint_may_lack_the_positions():
    fast = tf.Encoder(*STACK, 50)
    state = {name: t for name, t in fast.state_dict().items() if name != "pos_encoding"}
    other = tf.Encoder(*STACK, 20)
    assert other.load_state_dict(state) == ([], [])
    assert torch.equal(other.pos_encoding[0], tfast.positional_table(20, 16))


ATTEND = tf.MultiHeadAttention(16, 4)
WRONG = {
    "a bool mask": (lambda: ATTEND(X, X, X, COMBINED.bool()), TypeError, r"two ways.*mask\.float\(\).*keep\(mask\)"),
    "an integer mask": (lambda: ATTEND(X, X, X, COMBINED.long()), TypeError, "int64.*two ways"),
    "an additive mask": (lambda: ATTEND(X, X, X, COMBINED * -1e9), ValueError, r"1.0 for blocked.*bias\(mask\)"),
    "no tensor": (lambda: ATTEND(X, X, X, [1.0]), TypeError, "got list"),
    "the head axis is missing": (lambda: ATTEND(X, X, X, COMBINED[:, 0]), ValueError, r"mask\[:, None\].*mask\[None\]"),
    "a (B, L) mask": (lambda: ATTEND(X, X, X, (TAR == 0).float()), ValueError, r"\(B, 1, 1, Lk\)"),
    "more axes than scores": (
        lambda: tf.scaled_dot_product_attention(X, X, X, COMBINED),
        ValueError,
        r"\(3, 1, 4, 4\) does not fit scores of 3",
    ),
    "order k, q, v": (lambda: ATTEND(X, MEMORY, X, PADDING), ValueError, "k and v"),
    "heads do not divide": (lambda: tf.MultiHeadAttention(16, 3), ValueError, "16 and 3 heads"),
    "five axes": (lambda: tf.scaled_dot_product_attention(*[x(1, 1, 2, 2, 2)] * 3, None), ValueError, "2, 2, 2"),
}


@pytest.mark.parametrize(("call", "error", "says"), WRONG.values(), ids=WRONG)
def test_wrong_inputs(call, error, says):
    with pytest.raises(error, match=says):
        call()
