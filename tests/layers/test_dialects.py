"""The families together: one attention under four names and four masks, and the mistakes that circulate with them."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.dialects import bert, d2l, tensorflow

LENGTHS = torch.tensor([5, 3, 1])
KEEP = torch.arange(5) < LENGTHS[:, None]
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.where(KEEP, torch.arange(1, 6), 0)
MASKS = {
    "layers": KEEP[:, None],
    "bert": KEEP[:, None, None],
    "tensorflow": tensorflow.create_padding_mask(IDS),
    "d2l": LENGTHS,
}
SIZES = dict.fromkeys(("query_size", "key_size", "value_size"), 16)


def same_attention() -> dict:
    """Multi-head attention of every family, with the same weights, as functions of (x, mask)."""
    modules = {
        "layers": layers.MultiHeadAttention(4, 16),
        "bert": bert.MultiHeadedAttention(4, 16),
        "tensorflow": tensorflow.MultiHeadAttention(16, 4),
        "d2l": d2l.MultiHeadAttention(16, 4, 0.1, True, **SIZES),
    }
    names = {
        "layers": "q_linear k_linear v_linear out",
        "bert": "linear_layers.0 linear_layers.1 linear_layers.2 output_linear",
        "tensorflow": "wq wk wv dense",
        "d2l": "W_q W_k W_v W_o",
    }
    for family, module in modules.items():
        for name, source in zip(names[family].split(), names["layers"].split(), strict=True):
            module.get_submodule(name).load_state_dict(modules["layers"].get_submodule(source).state_dict())
        module.eval()
    return {
        "layers": lambda x, mask: modules["layers"](x, x, x, mask),
        "bert": lambda x, mask: modules["bert"](x, x, x, mask),
        "tensorflow": lambda x, mask: modules["tensorflow"](x, x, x, mask)[0],
        "d2l": lambda x, mask: modules["d2l"](x, x, x, mask),
    }


def test_four_names_and_four_masks_are_one_attention():
    attentions = same_attention()
    expected = attentions["layers"](X, MASKS["layers"])
    for family, attention in attentions.items():
        for mask in (MASKS[family], AttentionMask.lengths(LENGTHS), AttentionMask.keep(KEEP[:, None, None])):
            assert torch.allclose(attention(X, mask), expected, atol=1e-6), family


@pytest.mark.parametrize("family", MASKS)
@pytest.mark.parametrize("origin", MASKS)
def test_a_mask_of_another_family_is_an_error(family, origin):
    """Never a guess: read the wrong way round, a mask hides the words and shows the padding and the future."""
    if family == origin:
        return
    with pytest.raises((TypeError, ValueError), match=r"mask|valid_lens"):
        same_attention()[family](X, MASKS[origin])


@pytest.mark.parametrize("family", ["layers", "bert", "tensorflow"])
def test_a_padding_mask_without_its_axes_is_an_error(family):
    mask = (~KEEP).float() if family == "tensorflow" else KEEP
    with pytest.raises(ValueError, match=r"3, 5\)"):
        same_attention()[family](X, mask)


def encodings(length: int, d: int) -> dict:
    return {
        "layers": layers.PositionalEncoder(d, 0.0, max_len=length).pe,
        "bert": bert.PositionalEmbedding(d, max_len=length)(torch.zeros(1, length)),
        "tensorflow": tensorflow.positional_encoding(length, d),
        "d2l": d2l.PositionalEncoding(d, 0.0, max_len=length).P,
    }


@pytest.mark.parametrize("d", [8, 7])
@pytest.mark.parametrize("family", MASKS)
def test_the_encoding_of_positions(family, d):
    """A sine and a cosine, not the sine twice; exponent 2i/d, not doubled; amplitude 1, not scaled."""
    table = encodings(40, d)[family]
    assert table.shape == (1, 40, d) and table.dtype == torch.float32
    for position in (0, 1, 17, 39):
        for dimension in range(d):
            angle = position / 10000 ** ((dimension - dimension % 2) / d)
            expected = math.cos(angle) if dimension % 2 else math.sin(angle)
            assert table[0, position, dimension].item() == pytest.approx(expected, abs=1e-6)


def test_what_is_scaled_by_sqrt_d_is_the_embedding_alone():
    tf_encoder, d2l_encoder = tensorflow.Encoder(0, 16, 4, 24, 11, 50), d2l.TransformerEncoder(11, 16, 24, 4, 0, 0.1)
    embedder = layers.Embedder(11, 16)
    for embedding, embedded in (
        (tf_encoder.embedding, tf_encoder.eval()(IDS)),
        (d2l_encoder.embedding, d2l_encoder.eval()(IDS, None)),
        (embedder.lut, layers.PositionalEncoder(16, 0.0)(embedder(IDS))),
    ):
        assert torch.allclose(embedded, 4 * embedding(IDS) + tfast.positional_table(5, 16), atol=1e-5)
    token = bert.BERTEmbedding(11, 16).eval()
    assert torch.allclose(token(IDS), token.token.weight[IDS] + tfast.positional_table(5, 16), atol=1e-6)


def test_post_norm_layers_end_in_their_norm():
    memory = torch.randn(3, 6, 16)
    outputs = {
        "tensorflow encoder": tensorflow.EncoderLayer(16, 4, 24).eval()(X),
        "tensorflow decoder": tensorflow.DecoderLayer(16, 4, 24).eval()(X, memory)[0],
        "d2l encoder": d2l.EncoderBlock(16, 24, 4, 0.1).eval()(X, None),
        "d2l decoder": d2l.DecoderBlock(16, 24, 4, 0.1, 0).eval()(X, [memory, None, [None]])[0],
    }
    for name, out in outputs.items():
        assert torch.allclose(out.mean(-1), torch.zeros(3, 5), atol=1e-5), name
        assert torch.allclose(out.var(-1, unbiased=False), torch.ones(3, 5), atol=1e-2), name


def test_the_norm_is_not_over_the_time_axis():
    """What stands at other positions does not change a position that may not see them."""
    alone, others = X.clone(), X.clone()
    others[:, 1:] += 3
    first = AttentionMask.causal()
    for module in (tensorflow.EncoderLayer(16, 4, 24).eval(), d2l.EncoderBlock(16, 24, 4, 0.1).eval()):
        assert torch.equal(module(alone, first)[:, 0], module(others, first)[:, 0])


def whole_models() -> dict:
    sizes = (11, 16, 24, 4, 1, 0.1)
    pair = d2l.EncoderDecoder(d2l.TransformerEncoder(*sizes), d2l.TransformerDecoder(*sizes))
    transformer = tensorflow.Transformer(1, 16, 4, 24, 11, 11, 50, 50)
    return {
        "bert": (bert.MultiHeadedAttention(4, 16), (X, X, X, MASKS["bert"])),
        "tensorflow": (transformer, (IDS, IDS, *tensorflow.create_masks(IDS, IDS))),
        "d2l": (pair, (IDS, IDS, LENGTHS)),
    }


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("family", ["bert", "tensorflow", "d2l"])
def test_copies_files_dtypes_and_autocast(family):
    model, arguments = whole_models()[family]
    model.eval()
    expected = first(model(*arguments))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(first(same(*arguments)), expected)
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)):
        inputs = [t.to(dtype) if t is X else t for t in arguments]
        out = first(copy.deepcopy(model).to(dtype)(*inputs))
        assert out.dtype == dtype and torch.allclose(out.float(), expected, atol=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        out = first(model(*arguments))
    assert out.dtype == torch.bfloat16 and torch.allclose(out.float(), expected, atol=0.1)


@pytest.mark.parametrize("family", ["bert", "tensorflow", "d2l"])
def test_whole_graphs_compile(family):
    model, arguments = whole_models()[family]
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(first(compiled(*arguments)), first(model(*arguments)), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "tensorflow", "d2l"])
def test_dropout_is_switched_off_at_its_modules(family):
    model, arguments = whole_models()[family]
    model.train()
    assert not torch.equal(first(model(*arguments)), first(model(*arguments)))
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    assert torch.equal(first(model(*arguments)), first(model(*arguments)))
