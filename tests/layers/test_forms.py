"""Interfaces of the four families: constructors, submodules and order of arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from transformer_fast import dialects, layers, reference

# Name: constructor, what it holds (None: not fixed), forward; arguments that may be given by place.
MODULES = {
    "layers": {
        "Embedder": ("vocab, d_model", "lut", "x"),
        "PositionalEncoder": ("d_model, dropout, max_len=5000", "dropout pe", "x"),
        "MultiHeadAttention": (
            "heads, d_model, dropout=0.1",
            "q_linear v_linear k_linear dropout out",
            "q, k, v, mask=None, verbose=False",
        ),
        "Norm": ("d_model, eps=1e-06", "alpha bias", "x"),
        "FeedForward": ("d_model, d_ff=2048, dropout=0.1", "linear_1 dropout linear_2", "x"),
        "EncoderLayer": ("d_model, heads, dropout=0.1", "norm_1 norm_2 attn ff dropout_1 dropout_2", "x, mask"),
        "Encoder": ("vocab_size, d_model, N, heads, dropout", "embed pe layers norm", "src, mask"),
        "DecoderLayer": (
            "d_model, heads, dropout=0.1",
            "norm_1 norm_2 norm_3 dropout_1 dropout_2 dropout_3 attn_1 attn_2 ff",
            "x, e_outputs, src_mask, trg_mask",
        ),
        "Decoder": (
            "vocab_size, d_model, N, heads, dropout", "embed pe layers norm", "trg, e_outputs, src_mask, trg_mask",
        ),
        "Transformer": (
            "src_vocab, trg_vocab, d_model, N, heads, dropout", "encoder decoder out", "src, trg, src_mask, trg_mask",
        ),
    },
    "bert": {
        "TokenEmbedding": ("vocab_size, embed_size=512", "weight", "input"),
        "PositionalEmbedding": ("d_model, max_len=512", "pe", "x"),
        "Attention": ("", "", "query, key, value, mask=None, dropout=None"),
        "MultiHeadedAttention": (
            "h, d_model, dropout=0.1", "linear_layers attention output_linear dropout", "query, key, value, mask=None",
        ),
    },
    "tensorflow": {
        "MultiHeadAttention": ("d_model, num_heads", "wq wk wv dense", "v, k, q, mask=None"),
        "EncoderLayer": (
            "d_model, num_heads, dff, rate=0.1", "mha ffn layernorm1 layernorm2 dropout1 dropout2", "x, mask=None",
        ),
        "DecoderLayer": (
            "d_model, num_heads, dff, rate=0.1",
            "mha1 mha2 ffn layernorm1 layernorm2 layernorm3 dropout1 dropout2 dropout3",
            "x, enc_output, look_ahead_mask=None, padding_mask=None",
        ),
        "AdditiveAttention": ("units, key_size, query_size", "W v", "v, k, q, mask=None"),
        "BilinearAttention": ("units, key_size, query_size", "W_k W_q", "v, k, q, mask=None"),
    },
    "d2l": {
        "DotProductAttention": ("dropout", "dropout", "queries, keys, values, valid_lens=None"),
        "AdditiveAttention": ("num_hiddens, dropout", "W_q W_k w_v dropout", "queries, keys, values, valid_lens=None"),
        "MultiHeadAttention": (
            "num_hiddens, num_heads, dropout, bias=False",
            "attention W_q W_k W_v W_o",
            "queries, keys, values, valid_lens=None",
        ),
        "PositionWiseFFN": ("ffn_num_hiddens, pw_num_outputs", "dense1 relu dense2", "X"),
        "AddNorm": ("normalized_shape, dropout", "dropout ln", "X, Y"),
        "PositionalEncoding": ("num_hiddens, dropout, max_len=1000", "dropout P", ""),
        "EncoderBlock": (
            "num_hiddens, ffn_num_hiddens, num_heads, dropout, use_bias=False",
            "attention addnorm1 ffn addnorm2",
            "X, valid_lens",
        ),
        "TransformerEncoder": (
            "vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_layers, dropout, use_bias=False",
            "embedding pos_encoding blks",
            "X, valid_lens",
        ),
        "DecoderBlock": (
            "num_hiddens, ffn_num_hiddens, num_heads, dropout, i",
            "attention1 addnorm1 attention2 addnorm2 ffn addnorm3",
            "X, state",
        ),
        "TransformerDecoder": (
            "vocab_size, num_hiddens, ffn_num_hiddens, num_heads, num_layers, dropout",
            "embedding pos_encoding blks dense",
            "X, state",
        ),
        "EncoderDecoder": ("encoder, decoder", None, "enc_X, dec_X"),
    },
}  # fmt: skip

FUNCTIONS = {
    "layers": {"attention": "q, k, v, d_k, mask=None, dropout=None, verbose=False", "subsequentmask": "size"},
    "tensorflow": {
        "get_angles": "pos, i, d_model",
        "positional_encoding": "position, d_model",
        "scaled_dot_product_attention": "q, k, v, mask",
        "point_wise_feed_forward_network": "d_model, dff",
        "create_padding_mask": "ids",
        "create_look_ahead_mask": "size",
    },
    "d2l": {
        "transpose_qkv": "X, num_heads",
        "transpose_output": "X, num_heads",
        "masked_softmax": "X, valid_lens",
    },
}

SIZES = {  # for one module of each kind
    "vocab": 11, "vocab_size": 11, "src_vocab": 11, "trg_vocab": 11, "d_model": 8, "N": 1, "heads": 2, "h": 2,
    "num_heads": 2, "dropout": 0.1, "dff": 12, "units": 6, "key_size": 8, "query_size": 8, "num_hiddens": 8,
    "ffn_num_hiddens": 12, "pw_num_outputs": 8, "normalized_shape": 8, "i": 0, "num_layers": 1, "num_inputs": 8,
}  # fmt: skip


def family(name: str) -> tuple[Any, Any]:
    """Return the fast module and its oracle."""
    if name == "layers":
        return layers, reference.layers
    return getattr(dialects, name), getattr(reference.dialects, name)


def by_place(function: Callable[..., Any]) -> str:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    placed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in placed)


@pytest.mark.parametrize("name", [f"{f}.{name}" for f, modules in MODULES.items() for name in modules])
def test_modules(name: str) -> None:
    where, kind = name.split(".")
    constructor, holds, forward = MODULES[where][kind]
    for found in (getattr(module, kind) for module in family(where)):
        assert by_place(found.__init__).startswith(constructor)
        assert by_place(found.forward).startswith(forward)
        if holds is None:
            continue
        wanted = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty and p.name in SIZES]
        made = found(**{p.name: SIZES[p.name] for p in wanted})
        stored = {k for k, b in made._buffers.items() if b is not None and not k.startswith("_")}
        names = {*made._modules, *made._parameters, *stored}
        assert {*holds.split()} <= names | vars(made).keys()
        if found is getattr(family(where)[0], kind):
            assert names == {*holds.split()}


@pytest.mark.parametrize("name", [f"{f}.{name}" for f, functions in FUNCTIONS.items() for name in functions])
def test_functions(name: str) -> None:
    where, kind = name.split(".")
    for module in family(where):
        assert by_place(getattr(module, kind)).startswith(FUNCTIONS[where][kind])


def test_what_a_multi_head_attention_says_of_its_heads() -> None:
    m = layers.MultiHeadAttention(4, 32)
    assert (m.h, m.d_k) == (4, 8)
    assert layers.subsequentmask(3).tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]


def test_the_layers_of_a_stack_start_from_copies_of_one() -> None:
    stack = layers.Encoder(11, 8, 3, 2, 0.1).layers
    first = stack[0].state_dict()
    for layer in stack[1:]:
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, first[name]) and tensor.data_ptr() != first[name].data_ptr()
