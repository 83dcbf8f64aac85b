"""The table of hand-written modules: forms of the classic code, The Annotated Transformer, BERT by hand, and ports."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import layers
from ..dialects import annotated
from ..layers import hooks
from ..layers.torch_modules import Embedding
from . import form_calls as calls
from .form import (
    Form,
    Test,
    any_module,
    has_table,
    is_dropout,
    is_embedding,
    is_linear,
    is_norm,
    layer_children,
    list_of,
    of_form,
    width_of,
)
from .form_calls import Size
from .ported_forms import PORTED

LINEARS: dict[str, Callable[[Any], list[nn.Module]]] = {
    "ClassicHeads": lambda m: [m.q_linear, m.k_linear, m.v_linear, m.out],
    "AnnotatedHeads": lambda m: list(m.linears),
    "BertHeads": lambda m: [*m.linear_layers, m.output_linear],
}
"""Linear layers of attention over keep masks, by form."""


def _heads(name: str, children: dict[str, Test], head_axis: bool = True, stored: Any = ()) -> Form:
    linears = LINEARS[name]

    def run(
        m: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *others: Any, cache: Any = None
    ) -> Any:
        if any(other is not None and other is not False for other in others):  # such as verbose in the classic code
            return None
        inputs = query, key, value
        return annotated.heads(m, linears(m), inputs, mask, head_axis=head_axis, stores=bool(stored))

    def fits(m: Any) -> bool:
        widths = [getattr(x, "out_features", None) for x in linears(m)]
        return len(widths) == 4 and set(widths) == {m.h * m.d_k}

    mask = calls.same if head_axis else calls.with_head_axis
    return Form(
        name,
        run,
        lambda m, size: calls.attention(size, [x.in_features for x in linears(m)[:3]], mask),  # type: ignore
        {**children, "dropout": is_dropout, "attention": lambda m: not any(True for _ in m.parameters())},
        optional=("attention",),
        fits=fits,
        keywords=("cache",),
        stored=stored,
        roles=(hooks.TAKES_MASKS,),
        same=("attention",),
        attends=True,
    )


def _norm(name: str, gain: str, shift: str, kind: str = "std") -> Form:
    def try_it(m: Any, size: Size) -> calls.Calls:
        x = size.x(getattr(m, gain).shape[0])
        x[0, -1] *= 1e-3  # the norm of a row this small depends on eps
        return [(x,)]

    return Form(
        name,
        functools.partial(annotated.norm, names=(gain, shift), kind=kind),
        try_it,
        parameters=(gain, shift),
        attributes=("eps",),
        fits=lambda m: (
            isinstance(m.eps, float)
            and getattr(m, gain).dim() == 1
            and getattr(m, gain).shape == getattr(m, shift).shape
        ),
        arguments=1,
        keywords=("residual", "dropout_p"),
        roles=(hooks.TAKES_RESIDUAL,),
        by_author=annotated.norm_by_author,
        exact=True,
    )


def _sublayer(name: str, run: Any, *roles: str) -> Form:
    call = lambda m, size: [(size.x(width_of(m.norm) or 0), lambda x: x.tanh() + 0.5)]  # noqa: E731
    return Form(name, run, call, {"norm": is_norm, "dropout": is_dropout}, arguments=2, roles=roles)


def _network(name: str, first: str, second: str, run: Any = annotated.feed_forward, **others: Any) -> Form:
    if run is annotated.feed_forward:
        run = functools.partial(run, first=first, second=second)
    same = tuple(name for name in others if name == "relu")
    children = {first: is_linear, second: is_linear, **others}
    return Form(name, run, lambda m, size: [(size.x(getattr(m, first).in_features),)], children, same=same)


def _classic(name: str, kind: Any, norm_first: bool) -> Form:
    decodes = kind is layers.DecoderLayer
    attentions = ("attn_1", "attn_2") if decodes else ("attn",)
    return Form(
        name,
        functools.partial(annotated.classic_layer, kind=kind, norm_first=norm_first),
        lambda m, size: calls.layer(size, width_of(m.norm_1), decodes),
        layer_children(attentions, "ClassicHeads", "ff", "norm_", "dropout_"),
        attributes=("norm_first",),
        padding="",
        decodes=decodes,
    )


def _classic_stack(name: str, *kinds: str) -> Form:
    decodes = name == "Decoder"
    return Form(
        name,
        annotated.classic_stack,
        lambda m, size: calls.layer(size, m.embed.lut.weight.shape[1], decodes, m.embed.lut),
        {
            "embed": of_form("Embedder"),
            "pe": of_form("Positional", "LengthFirstPositional"),
            "layers": list_of(of_form(*kinds)),
            "norm": any_module,
        },
        embeds=annotated.classic_embedded,
        padding="",
        decodes=decodes,
    )


def _annotated(decodes: bool) -> tuple[Form, Form]:
    """Layer and stack of The Annotated Transformer."""
    kind = "Decoder" if decodes else "Encoder"
    attentions = ("self_attn", "src_attn") if decodes else ("self_attn",)
    role = hooks.ANNOTATED_DECODER if decodes else hooks.ANNOTATED_ENCODER
    steps = annotated.decoder_steps if decodes else annotated.encoder_steps

    def layer_calls(m: Any, size: Size) -> calls.Calls:
        mask = calls.same if has_head_axis(m) else calls.with_head_axis
        return calls.layer(size, width_of(m.sublayer[0].norm), decodes, mask=mask)

    def has_head_axis(m: Any) -> bool:
        return not of_form("BertHeads")(getattr(m, attentions[0]))

    heads = of_form("ClassicHeads", "AnnotatedHeads", "BertHeads")
    sublayers = list_of(of_form("Sublayer"))
    layer = Form(
        f"Annotated{kind}Layer",
        functools.partial(annotated.annotated_layer, steps=steps),
        layer_calls,
        {**dict.fromkeys(attentions, heads), "feed_forward": any_module, "sublayer": sublayers},
        fits=lambda m: len(m.sublayer) == 1 + len(attentions),
        arguments=4 if decodes else 2,
        roles=(role,),
        padding="",
        normal=lambda m, mask, length: annotated.keep_mask(mask, has_head_axis(m)),
        decodes=decodes,
    )
    stack = Form(
        f"Annotated{kind}",
        functools.partial(annotated.annotated_stack, steps=steps, role=role),
        lambda m, size: layer_calls(m.layers[0], size),
        {"layers": list_of(of_form(layer.name)), "norm": is_norm},
        arguments=layer.arguments,
        padding="",
        normal=lambda m, mask, length: layer.normal(m.layers[0], mask, length),
        decodes=decodes,
    )
    return layer, stack


def _positional(name: str, table: str, axis: int = 1) -> Form:
    def try_it(m: Any, size: Size) -> calls.Calls:
        x = size.x(getattr(m, table).shape[-1])
        return [(x if axis == 1 else x.transpose(0, 1).contiguous(),)]

    return Form(
        name,
        functools.partial(annotated.positional, name=table, axis=axis),
        try_it,
        {"dropout": is_dropout},
        attributes=(table,),
        fits=has_table(axis, table),
        roles=(hooks.ADDS_POSITIONS,) if axis == 1 else (),
    )


def _is_token_embedding(m: Any) -> bool:
    if not isinstance(m, nn.Embedding) or type(m).forward is not nn.Embedding.forward:
        return False
    return not (m.max_norm is not None or m.sparse or m.scale_grad_by_freq)


_ALL = [
    _heads("ClassicHeads", dict.fromkeys(("q_linear", "k_linear", "v_linear", "out"), is_linear)),
    _heads("AnnotatedHeads", {"linears": list_of(is_linear)}, stored=("attn",)),
    _heads("BertHeads", {"linear_layers": list_of(is_linear), "output_linear": is_linear}, False),
    Form(
        "Embedder",
        annotated.embedder,
        lambda m, size: [(size.ids(m.lut),)],
        {"lut": is_embedding},
        attributes=("d_model",),
        fits=lambda m: hasattr(m, "d_model"),
        roles=(hooks.SCALED_LOOKUP,),
    ),
    _positional("Positional", "pe"),
    _positional("LengthFirstPositional", "pe", 0),
    _positional("D2lPositional", "P"),
    Form(
        "BertEmbedding",
        annotated.bert_embedding,
        lambda m, size: [tuple(size.ids(child) for child in (m.token, m._modules.get("segment")) if child is not None)],
        {"token": is_embedding, "position": any_module, "segment": is_embedding, "dropout": is_dropout},
        optional=("segment",),
        fits=lambda m: has_table(1, "pe")(m.position) and not m.position.pe.requires_grad,
        same=("position",),
    ),
    Form(
        "TokenEmbedding",
        annotated.token_embedding,
        lambda m, size: [(size.ids(m),)],
        parameters=("weight",),
        attributes=tuple(nn.Embedding.__constants__),
        fits=_is_token_embedding,
        bases=(Embedding,),
        roles=(hooks.LOOKS_UP,),
    ),
    _network("FeedForward", "linear_1", "linear_2", dropout=is_dropout),
    _network("AnnotatedFeedForward", "w_1", "w_2", dropout=is_dropout),
    _network(
        "ActivatedFeedForward",
        "w_1",
        "w_2",
        annotated.activated_feed_forward,
        dropout=is_dropout,
        activation=any_module,
    ),
    _network("D2lFeedForward", "dense1", "dense2", relu=any_module),
    _norm("Norm", "alpha", "bias"),
    _norm("BiasedNorm", "alpha", "bias", "layer"),
    _norm("AnnotatedNorm", "a_2", "b_2"),
    _sublayer("Sublayer", annotated.pre_norm_sublayer, hooks.PRE_NORM),
    _sublayer("PostNormSublayer", annotated.post_norm_sublayer),
    Form(
        "AddNorm",
        annotated.add_norm,
        lambda m, size: [(size.x(width_of(m.ln) or 0), size.x(width_of(m.ln) or 0))],
        {"dropout": is_dropout, "ln": is_norm},
        arguments=2,
    ),
    _classic("EncoderLayer", layers.EncoderLayer, True),
    _classic("PostNormEncoderLayer", layers.EncoderLayer, False),
    _classic("DecoderLayer", layers.DecoderLayer, True),
    _classic("PostNormDecoderLayer", layers.DecoderLayer, False),
    _classic_stack("Encoder", "EncoderLayer", "PostNormEncoderLayer"),
    _classic_stack("Decoder", "DecoderLayer", "PostNormDecoderLayer"),
    *_annotated(False),
    *_annotated(True),
    Form(
        "BertBlock",
        annotated.bert_block,
        lambda m, size: calls.layer(size, width_of(m.input_sublayer.norm), False, mask=calls.with_head_axis),
        {
            "attention": of_form("BertHeads"),
            "feed_forward": any_module,
            "input_sublayer": of_form("Sublayer"),
            "output_sublayer": of_form("Sublayer"),
            "dropout": is_dropout,
        },
        arguments=2,
        padding="",
        normal=lambda m, mask, length: annotated.keep_mask(mask, False),
    ),
    *PORTED,
]
FORMS: dict[str, Form] = {form.name: form for form in _ALL}
"""All forms, those of children first."""
