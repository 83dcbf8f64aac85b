"""Forms of ports of TensorFlow's tutorial and of the d2l textbook."""

from __future__ import annotations

import functools
from typing import Any

from ..dialects import d2l, tensorflow
from ..layers import hooks
from . import form_calls as calls
from .form import (
    Form,
    any_module,
    arguments_of,
    has_table,
    is_dropout,
    is_embedding,
    is_linear,
    layer_children,
    list_of,
    of_form,
    width_of,
)

OF_MODULE: dict[str, Any] = {"attributes": ("board",), "saved": ("plot_train_per_epoch", "plot_valid_per_epoch")}
"""Attributes that ``d2l.Module`` sets in d2l 1.x, the base class of its attention heads."""
NOT_TOLD = "it has no lengths of its targets"
"""Reason why a decoder keeps padding: its masks are the lengths 1 to T."""


def _tensorflow(decodes: bool) -> tuple[Form, Form]:
    """Layer and stack of TensorFlow's tutorial."""
    kind, layer_kind = ("Decoder", tensorflow.DecoderLayer) if decodes else ("Encoder", tensorflow.EncoderLayer)
    attentions = ("mha1", "mha2") if decodes else ("mha",)
    children = layer_children(attentions, "TensorflowHeads", "ffn", "layernorm", "dropout")

    tried: dict[str, Any] = {"decodes": decodes, "mask": calls.blocked, "swapped": True}
    options: dict[str, Any] = {
        "padding": "",
        "normal": lambda m, mask, length: tensorflow.ported_mask(mask),
        "decodes": decodes,
        "swaps_masks": decodes,
        "adds_masks": True,
    }
    layer = Form(
        f"Tensorflow{kind}Layer",
        layer_kind.forward,
        lambda m, size: calls.layer(size, width_of(m.layernorm1), **tried),
        children,
        keywords=("need_weights",) if decodes else (),
        roles=(hooks.TAKES_NEED_WEIGHTS,) if decodes else (),
        **options,
    )
    name = "dec_layers" if decodes else "enc_layers"
    stack = Form(
        f"Tensorflow{kind}",
        tensorflow.ported_decoder if decodes else tensorflow.ported_encoder,
        lambda m, size: calls.layer(size, m.embedding.embedding_dim, embedding=m.embedding, **tried),
        {"embedding": is_embedding, "dropout": is_dropout, name: list_of(of_form(layer.name))},
        attributes=("pos_encoding",),
        fits=lambda m: has_table(1, "pos_encoding")(m) and hasattr(m, "d_model"),
        embeds=tensorflow.ported_embedded,
        **options,
    )
    return layer, stack


def _d2l(decodes: bool) -> list[Form]:
    """Block and stacks of the d2l textbook."""
    kind = "Decoder" if decodes else "Encoder"
    attentions = ("attention1", "attention2") if decodes else ("attention",)
    norms = (f"addnorm{n}" for n in range(1, 2 + len(attentions)))
    children = {**dict.fromkeys(attentions, of_form("D2lHeads")), "ffn": any_module}

    padding = NOT_TOLD if decodes else ""
    block = Form(
        f"D2l{kind}Block",
        d2l.ported_decoder_block if decodes else d2l.EncoderBlock.forward,
        lambda m, size: calls.d2l_layer(size, getattr(m, attentions[0]).W_q.in_features, m.i + 1 if decodes else 0),
        {**children, **dict.fromkeys(norms, of_form("AddNorm"))},
        attributes=("i", "causal_eval") if decodes else (),
        arguments=2,
        padding=padding,
        normal=lambda m, mask, length: d2l.ported_lengths(mask, length),
    )
    options: dict[str, Any] = {
        "calls": lambda m, size: calls.d2l_layer(size, m.num_hiddens, len(m.blks) if decodes else 0, m.embedding),
        "children": {
            "embedding": is_embedding,
            "pos_encoding": of_form("D2lPositional"),
            "blks": list_of(of_form(block.name)),
            **({"dense": any_module} if decodes else {}),
        },
        "fits": lambda m: m.num_hiddens == m.embedding.embedding_dim,
        "stored": ("attention_weights", "_attention_weights"),
        "padding": padding,
        "normal": block.normal,
    }
    if not decodes:
        return [block, Form("D2lEncoder", d2l.ported_encoder, embeds=d2l.ported_embedded, **options)]
    counting = {"D2lDecoder": False, "D2lCountingDecoder": True}
    runs = {name: functools.partial(d2l.ported_decoder, counts_on=on) for name, on in counting.items()}
    return [block, *(Form(name, run, **options) for name, run in runs.items())]


PORTED = [
    Form(
        "TensorflowHeads",
        tensorflow.ported_heads,
        lambda m, size: calls.tensorflow_attention(size, [w.in_features for w in (m.wq, m.wk, m.wv)]),
        dict.fromkeys(("wq", "wk", "wv", "dense"), is_linear),
        fits=lambda m: isinstance(m.num_heads, int),
        keywords=("need_weights",),
        roles=(hooks.TAKES_NEED_WEIGHTS, hooks.TAKES_MASKS),
        attends=True,
        adds_masks=True,
    ),
    *_tensorflow(False),
    *_tensorflow(True),
    Form(
        "D2lAttention",
        d2l.ported_attention,
        lambda m, size: calls.d2l_attention(size, (6, 6, 7)),
        {"dropout": is_dropout},
        fits=lambda m: (arguments_of(type(m).forward) or ())[-1].name == "valid_lens",
        arguments=4,
        stored=("attention_weights",),
        roles=(hooks.SCALED_DOT_PRODUCT,),
        attends=True,
    ),
    Form(
        "D2lHeads",
        d2l.ported_heads,
        lambda m, size: calls.d2l_attention(size, [w.in_features for w in (m.W_q, m.W_k, m.W_v)]),
        {**dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), is_linear), "attention": of_form("D2lAttention")},
        fits=lambda m: type(m.num_heads) is int,
        roles=(hooks.TAKES_MASKS,),
        attends=True,
        **OF_MODULE,
    ),
    *_d2l(False),
    *_d2l(True),
]
