"""The four families of layers together: equal attention with their own names and masks, and common mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dialect_cases import LENS, SRC, TRG, keep
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.dialects import bert, d2l, tensorflow

KEEP = torch.arange(5) < LENS[:, None]
X = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
MASKS = {
    "layers": KEEP[:, None],
    "bert": KEEP[:, None, None],
    "tensorflow": tensorflow.create_padding_mask(SRC),
    "d2l": LENS,
}
SIZES = dict.fromkeys(("query_size", "key_size", "value_size"), 16)
MODELS = ["layers", "tensorflow", "d2l"]


def same_attention() -> dict[str, Callable[[Tensor, Tensor, Any], Tensor]]:
    """Return multi-head attention of every family, with equal weights, as functions of (x, memory, mask)."""
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
    others = {name: lambda x, m, mask, name=name: modules[name](x, m, m, mask) for name in ("layers", "bert", "d2l")}
    return others | {"tensorflow": lambda x, m, mask: modules["tensorflow"](m, m, x, mask)[0]}


def test_four_names_and_four_masks_are_one_attention() -> None:
    attentions = same_attention()
    expected = attentions["layers"](X, X, MASKS["layers"])
    for family, attention in attentions.items():
        for mask in (MASKS[family], AttentionMask.lengths(LENS), AttentionMask.keep(KEEP[:, None, None])):
            assert torch.allclose(attention(X, X, mask), expected, atol=1e-6), family


@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize("family", MASKS)
def test_what_stands_in_padding_does_not_matter(family: str, fill: float) -> None:
    attention, poisoned = same_attention()[family], X.masked_fill(~KEEP[..., None], fill)
    assert torch.equal(attention(X, poisoned, MASKS[family]), attention(X, X, MASKS[family]))
    additive = d2l.AdditiveAttention(8, 0.5).eval()
    assert torch.equal(additive(X, poisoned, poisoned, LENS), additive(X, X, X, LENS))


@pytest.mark.parametrize("family", MASKS)
@pytest.mark.parametrize("origin", MASKS)
def test_a_mask_of_another_family_is_an_error(family: str, origin: str) -> None:
    """A mask read the wrong way would hide the words and show padding and future."""
    if family == origin:
        return
    with pytest.raises((TypeError, ValueError), match=r"mask|valid_lens"):
        same_attention()[family](X, X, MASKS[origin])


@pytest.mark.parametrize("family", ["layers", "bert", "tensorflow"])
def test_a_padding_mask_without_its_axes_is_an_error(family: str) -> None:
    mask = (~KEEP).float() if family == "tensorflow" else KEEP
    with pytest.raises(ValueError, match=r"3, 5\)"):
        same_attention()[family](X, X, mask)


def encodings(length: int, d: int) -> dict[str, Tensor]:
    return {
        "layers": layers.PositionalEncoder(d, 0.0, max_len=length).pe,
        "bert": bert.PositionalEmbedding(d, max_len=length)(torch.zeros(1, length)),
        "tensorflow": tensorflow.positional_encoding(length, d),
        "d2l": d2l.PositionalEncoding(d, 0.0, max_len=length).P,
    }


@pytest.mark.parametrize("d", [8, 7])
@pytest.mark.parametrize("family", MASKS)
def test_the_encoding_of_positions(family: str, d: int) -> None:
    """Common mistakes: the sine twice, a doubled exponent 2i/d, a scaled amplitude."""
    table = encodings(40, d)[family]
    assert table.shape == (1, 40, d) and table.dtype == torch.float32
    for position in (0, 1, 17, 39):
        for dimension in range(d):
            angle = position / 10000 ** ((dimension - dimension % 2) / d)
            expected = math.cos(angle) if dimension % 2 else math.sin(angle)
            assert table[0, position, dimension].item() == pytest.approx(expected, abs=1e-6)


def test_what_is_scaled_by_sqrt_d_is_the_embedding_alone() -> None:
    tf_encoder, d2l_encoder = tensorflow.Encoder(0, 16, 4, 24, 11, 50), d2l.TransformerEncoder(11, 16, 24, 4, 0, 0.1)
    embedder, token = layers.Embedder(11, 16), bert.BERTEmbedding(11, 16).eval()
    for scale, table, embedded in (
        (4, tf_encoder.embedding, tf_encoder.eval()(SRC)),
        (4, d2l_encoder.embedding, d2l_encoder.eval()(SRC, None)),
        (4, embedder.lut, layers.PositionalEncoder(16, 0.0)(embedder(SRC))),
        (1, token.token, token(SRC)),
    ):
        assert torch.allclose(embedded, scale * table.weight[SRC] + tfast.positional_table(5, 16), atol=1e-5)


def test_post_norm_layers_end_in_their_norm() -> None:
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


def test_the_norm_is_not_over_the_time_axis() -> None:
    """Other positions must not change a position that cannot see them."""
    alone, others, first = X.clone(), X.clone(), AttentionMask.causal()
    others[:, 1:] += 3
    for module in (tensorflow.EncoderLayer(16, 4, 24).eval(), d2l.EncoderBlock(16, 24, 4, 0.1).eval()):
        assert torch.equal(module(alone, first)[:, 0], module(others, first)[:, 0])


def whole_model(family: str) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
    """Return a model in evaluation mode with ids and masks. For BERT: its attention, and rows."""
    if family == "bert":
        return bert.MultiHeadedAttention(4, 16).eval(), (X, X, X), (MASKS["bert"],)
    if family == "layers":
        masks = keep(5, 3, 1), layers.subsequentmask(4)
        return layers.Transformer(11, 11, 16, 1, 4, 0.1, d_ff=24).eval(), (SRC, TRG), masks
    if family == "tensorflow":
        model = tensorflow.Transformer(1, 16, 4, 24, 11, 11, 50, 50)
        return model.eval(), (SRC, TRG), tensorflow.create_masks(SRC, TRG)
    sizes = (11, 16, 24, 4, 1, 0.1)
    pair = d2l.TransformerEncoder(*sizes), d2l.TransformerDecoder(*sizes)
    return d2l.EncoderDecoder(*pair).eval(), (SRC, TRG), (LENS,)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def test_training_does_not_see_the_future_nor_padding() -> None:
    for family in MODELS:
        model, (src, trg), masks = whole_model(family)
        without_dropout(model).train()
        expected = first(model(src, trg, *masks))
        other_src, other_trg = src.where(KEEP, 9), trg.clone()
        other_trg[:, 2:] = 9
        assert torch.equal(first(model(other_src, other_trg, *masks))[:, :2], expected[:, :2]), family


PADDINGS = (AttentionMask.lengths(LENS), AttentionMask.keep(KEEP[:, None, None]))
LOOK_AHEAD = AttentionMask.causal()
TARGETS = LOOK_AHEAD & AttentionMask.lengths(torch.tensor([4, 2, 3]))
OURS: dict[str, list[tuple[Any, ...]]] = {  # other masks that mean the same
    "layers": [
        (keep(5, 3, 1).int(), layers.subsequentmask(4).int()),
        (PADDINGS[0], LOOK_AHEAD),
        (AttentionMask.blocked(~KEEP[:, None, None]), AttentionMask.keep(layers.subsequentmask(4))),
        (keep(5, 3, 1), layers.subsequentmask(4).expand(3, 4, 4)),
    ],
    "tensorflow": [(padding, TARGETS, padding) for padding in PADDINGS],
    "d2l": [(mask,) for mask in (*PADDINGS, LENS.int())],
}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_masks_of_every_form_agree(family: str, norm_first: bool) -> None:
    model, ids, masks = whole_model(family)
    if family == "layers":
        model = layers.Transformer(11, 11, 16, 2, 4, 0.1, d_ff=24, norm_first=norm_first).eval()
    expected = first(model(*ids, *masks))
    for others in OURS[family]:
        assert torch.allclose(first(model(*ids, *others)), expected, atol=1e-5)


@pytest.mark.parametrize("family", MASKS)
def test_dropout_is_switched_off_in_evaluation_and_at_its_modules(family: str) -> None:
    model, ids, masks = whole_model(family)

    def is_repeated() -> bool:
        return torch.equal(first(model(*ids, *masks)), first(model(*ids, *masks)))

    assert is_repeated()
    model.train()
    assert not is_repeated()
    without_dropout(model)
    assert is_repeated()
