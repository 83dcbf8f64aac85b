"""The forms of model that generation knows, each brought to one: encode, decode a prefix, and a decoder with a cache.

A decoder of `transformer_fast` takes a cache as it is. For the decoder of The Annotated Transformer, once `accelerate`
has proven what it computes, one is made on the same parameters. Any other model is called over the whole prefix.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..accelerate.patterns.attention import Heads
from ..accelerate.patterns.base import Accelerated, pattern_of, swapped_by
from ..accelerate.patterns.embedding import Embedder as EmbedderPattern
from ..accelerate.patterns.embedding import Positional
from ..accelerate.patterns.feed_forward import ANNOTATED_FEED_FORWARD
from ..accelerate.patterns.norm import width_of
from ..accelerate.patterns.sublayer import DECODER
from ..layers import (
    DecoderLayer,
    Embedder,
    EncoderLayer,
    LayerNorm,
    MultiHeadAttention,
    Norm,
    PositionalEncoder,
    RMSNorm,
)
from ..layers import torch_modules as swapped
from ..layers.hooks import is_plain
from ..models import Decoder, Encoder
from .weights import DROPOUTS, EMBEDDINGS

_ANNOTATED = ("encoder", "decoder", "src_embed", "tgt_embed", "generator")


@dataclass(frozen=True)
class Form:
    """`transformer_fast.Transformer`, and any model with `encoder(src, src_mask)`,
    `decoder(trg, memory, src_mask, trg_mask)` and `out`."""

    model: nn.Module

    @property
    def out(self) -> nn.Module:
        """(..., d_model) -> (..., vocabulary): logits, or anything else whose softmax is the model's."""
        return self.model.out

    @property
    def vocabulary(self) -> int | None:
        """How many target tokens there are, where the model says so."""
        return getattr(self.out, "out_features", None)

    def has_own_encoder(self) -> bool:
        """True where the encoder is one of this package, and nobody changed what mixes its positions."""
        encoder = self.model.encoder
        if not is_plain(encoder, Encoder) or not all(is_plain(layer, EncoderLayer) for layer in encoder.layers):
            return False
        return all(is_plain(layer.attn, MultiHeadAttention) for layer in encoder.layers)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """src (B, S), keep mask (B, 1, S) -> the encoder's outputs (B, S, d_model)."""
        return self.model.encoder(src, src_mask)

    def decode(self, tokens: Tensor, memory: Tensor, src_mask: Tensor | None, causal: Tensor) -> Tensor:
        """tokens (B, t), keep mask (1, t, t) -> what `out` takes, (B, t, d_model)."""
        return self.model.decoder(tokens, memory, src_mask, causal)

    def cached_decoder(self, memory: Tensor, src_mask: Tensor | None, longest: int) -> Decoder | None:
        """A decoder that takes a cache and computes what `decode` does, for prefixes of up to `longest` tokens; None
        where there is none."""
        return self.model.decoder if cache_obstacle(self.model.decoder) is None else None

    def no_cache(self) -> str:
        """The reason why `cached_decoder` gives None, for an error."""
        reason = cache_obstacle(self.model.decoder) if isinstance(self.model.decoder, Decoder) else None
        return "there is no cached decoder for this model" + (f": {reason}" if reason else "")

    def reader(self) -> tuple[nn.Module, nn.Module, nn.Module] | None:
        """The last layer's attention to the source, its linear layer of queries, and that of keys; None where these
        parts have other names."""
        layers = getattr(self.model.decoder, "layers", None)
        attention = getattr(layers[-1], "attn_2", None) if layers else None
        found = attention, getattr(attention, "q_linear", None), getattr(attention, "k_linear", None)
        return None if None in found or not hasattr(attention, "h") else found


class AnnotatedForm(Form):
    """The Annotated Transformer's `EncoderDecoder(encoder, decoder, src_embed, tgt_embed, generator)`, by its `encode`
    and `decode` where it has them."""

    @property
    def out(self) -> nn.Module:
        return self.model.generator

    @property
    def vocabulary(self) -> int | None:
        linears = [m for m in self.out.modules() if isinstance(m, nn.Linear)]
        return linears[0].out_features if len(linears) == 1 else None  # of several, the last in order need not be it

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        model = self.model
        if getattr(model, "encode", None) is not None:
            return model.encode(src, src_mask)
        return model.encoder(model.src_embed(src), src_mask)

    def decode(self, tokens: Tensor, memory: Tensor, src_mask: Tensor | None, causal: Tensor) -> Tensor:
        if getattr(self.model, "decode", None) is not None:
            return self.model.decode(memory, src_mask, tokens, causal)
        return self._decode_by_modules(tokens, memory, src_mask, causal)

    def cached_decoder(self, memory: Tensor, src_mask: Tensor | None, longest: int) -> Decoder | None:
        decoder = as_decoder(self.model.decoder, self.model.tgt_embed, longest)
        # A `decode` that does more than call the modules is called at every step.
        if decoder is None or getattr(self.model, "decode", None) is None:
            return decoder
        length, device = min(3, longest), memory.device
        tokens = torch.arange(length, device=device)[None] % (self.vocabulary or 1)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        given = tokens, memory[:1], None if src_mask is None else src_mask[:1], causal
        return decoder if torch.equal(self.decode(*given), self._decode_by_modules(*given)) else None

    def reader(self) -> tuple[nn.Module, nn.Module, nn.Module] | None:
        layers = getattr(self.model.decoder, "layers", None)
        attention = getattr(layers[-1], "src_attn", None) if layers else None
        linears = getattr(attention, "linears", None)
        return None if linears is None or len(linears) != 4 else (attention, linears[0], linears[1])

    def _decode_by_modules(self, tokens: Tensor, memory: Tensor, src_mask: Tensor | None, causal: Tensor) -> Tensor:
        return self.model.decoder(self.model.tgt_embed(tokens), memory, src_mask, causal)


def form_of(model: nn.Module) -> Form:
    """The form of a model.

    Raises:
        ValueError: for a model of no form; says what it lacks.
    """
    missing = [name for name in ("encoder", "decoder", "out") if not hasattr(model, name)]
    if not missing:
        return Form(model)
    kind = type(model).__name__
    lacks = [name for name in _ANNOTATED if not hasattr(model, name)]
    if lacks:
        nearer = missing if len(missing) <= len(lacks) else lacks
        raise ValueError(
            "model must have encoder, decoder and out, like transformer_fast.Transformer, or encoder, decoder, "
            f"src_embed, tgt_embed and generator, like The Annotated Transformer; {kind} has no {', '.join(nearer)}"
        )
    for name, expected in (("encode", ("src", "src_mask")), ("decode", ("memory", "src_mask", "tgt", "tgt_mask"))):
        method, module = getattr(model, name, None), getattr(model, f"{name}r")
        if method is not None:
            taken = tuple(parameter.replace("trg", "tgt") for parameter in inspect.signature(method).parameters)
            if taken != expected:
                raise ValueError(f"{kind}.{name} takes {taken}; expected {expected}, as The Annotated Transformer")
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{kind}.{name}r is a {type(module).__name__}, which cannot be called")
    return AnnotatedForm(model)


def cache_obstacle(decoder: nn.Module | None) -> str | None:
    """The reason why a decoder takes no cache, or None for a `Decoder` of layers alike in their heads.

    Its embedding must be plain, since a cached step reads it, and so must be what mixes positions, whose work a cache
    does. Linear layers, norms, feed-forward layers and dropouts may be anything: where they are not plain, a step calls
    them with the newest position.
    """
    if not is_plain(decoder, Decoder):
        return "the decoder is no plain transformer_fast Decoder"
    for name, kinds in _EMBEDDING.items():
        if not is_plain(operator.attrgetter(name)(decoder), *kinds):
            return f"decoder.{name} is no plain {kinds[0].__name__}"
    if decoder.embed.lut.max_norm is not None:
        return "decoder.embed.lut has max_norm, and changes its weight when it is called"
    for index, layer in enumerate(decoder.layers):
        if not is_plain(layer, DecoderLayer):
            return f"decoder.layers.{index} is no plain DecoderLayer"
        for name in ("attn_1", "attn_2"):
            attention = getattr(layer, name)
            if not is_plain(attention, MultiHeadAttention) or not is_plain(attention.dropout, *DROPOUTS):
                return f"decoder.layers.{index}.{name}, or its dropout, is no plain MultiHeadAttention"
    alike = len({(layer.attn_1.h, layer.attn_2.h) for layer in decoder.layers}) == 1
    return None if alike else "its layers have different numbers of heads"


_EMBEDDING = {
    "embed": (Embedder,),
    "embed.lut": EMBEDDINGS,
    "pe": (PositionalEncoder,),
    "pe.dropout": DROPOUTS,
}
"""The modules of a decoder that are read before its first layer, in this order, and their classes."""


def as_decoder(decoder: nn.Module, embed: nn.Module, longest: int) -> Decoder | None:
    """The Annotated Transformer's decoder and its target embedding as a `Decoder`, on the same parameters.

    None where `accelerate` has not proven it, a module has hooks or was changed since, the parts are others than The
    Annotated Transformer's, or the positional table has fewer than `longest` rows.
    """
    if not swapped_by(DECODER)(decoder) or type(embed) is not nn.Sequential:
        return None
    if not all(map(_is_as_swapped, (*decoder.modules(), *embed.modules()))) or len(embed) != 2:
        return None
    lookup, positions = embed
    if not swapped_by(EmbedderPattern)(lookup) or not _serves(positions, lookup.lut.weight, longest):
        return None
    width, layers = lookup.d_model, list(decoder.layers)
    norms = decoder.norm, *(sublayer.norm for layer in layers for sublayer in layer.sublayer)
    attentions = [attention for layer in layers for attention in (layer.self_attn, layer.src_attn)]
    if not all(map(_serves_as_norm, norms)) or not all(_fits(attention, width) for attention in attentions):
        return None
    with torch.device("meta"):  # what is made here is replaced, and costs neither memory nor random numbers
        ours = Decoder(1, width, len(layers), 1, 0.0, d_ff=1, max_len=1)
        for theirs, layer in zip(layers, ours.layers, strict=True):
            _take_over(layer, theirs, width)
        ours.norm = _norm(decoder.norm)
    ours.embed.lut, ours.pe.pe = lookup.lut, getattr(positions, pattern_of(positions).table)
    return ours if cache_obstacle(ours) is None else None


def _is_as_swapped(module: nn.Module) -> bool:
    """Whether a module need not be called, and is still what `accelerate` made of it."""
    if not is_plain(module) or not isinstance(module, Accelerated):
        return is_plain(module)
    # A subclass of the class that `accelerate` made, such as that of a parametrization, has the pattern of its base.
    return "pattern_and_class" in vars(type(module)) and pattern_of(module).fits(module)


def _serves(positions: nn.Module, weight: Tensor, longest: int) -> bool:
    """Whether a positional table is the one that a `Decoder` would read, and long enough."""
    if not swapped_by(Positional)(positions) or pattern_of(positions).length_axis != 1:
        return False
    table = getattr(positions, pattern_of(positions).table)
    same = table.device == weight.device and torch.promote_types(table.dtype, weight.dtype) == weight.dtype
    return same and longest <= table.shape[1]


def _serves_as_norm(norm: nn.Module) -> bool:
    """Return True for a norm that a layer of this package computes."""
    return width_of(norm) is not None and (
        pattern_of(norm) is not None or is_plain(norm, swapped.LayerNorm, swapped.RMSNorm)
    )


def _fits(attention: nn.Module, width: int) -> bool:
    """Whether an attention is one that `MultiHeadAttention` computes."""
    if not swapped_by(Heads)(attention) or not pattern_of(attention).head_axis:
        return False
    linears = pattern_of(attention).projections(attention)
    square = all(isinstance(one, nn.Linear) and one.in_features == one.out_features == width for one in linears)
    return square and attention.h * attention.d_k == width


def _take_over(layer: DecoderLayer, theirs: nn.Module, width: int) -> None:
    """Put the parameters of The Annotated Transformer's layer into a `DecoderLayer`."""
    layer.norm_1, layer.norm_2, layer.norm_3 = (_norm(sublayer.norm) for sublayer in theirs.sublayer)
    for name, attention in (("attn_1", theirs.self_attn), ("attn_2", theirs.src_attn)):
        ours = MultiHeadAttention(attention.h, width, 0.0)
        ours.q_linear, ours.k_linear, ours.v_linear, ours.out = pattern_of(attention).projections(attention)
        setattr(layer, name, ours)
    inner = theirs.feed_forward
    if pattern_of(inner) is ANNOTATED_FEED_FORWARD:
        layer.ff.linear_1, layer.ff.linear_2 = inner.w_1, inner.w_2
    else:
        layer.ff = inner


def _norm(norm: nn.Module) -> Norm | LayerNorm | RMSNorm:
    """A norm as one of `transformer_fast.layers`, with the same parameters."""
    if (pattern := pattern_of(norm)) is not None:
        gain, shift, eps, kind = pattern.gain, pattern.shift, pattern.eps, pattern.kind
    else:
        gain, shift, eps, kind = "weight", "bias", "eps", "rms" if isinstance(norm, swapped.RMSNorm) else "layer"
    made = {"std": Norm, "layer": LayerNorm, "rms": RMSNorm}[kind]
    ours = made(width_of(norm), getattr(norm, eps))
    setattr(ours, "alpha" if kind == "std" else "weight", getattr(norm, gain))
    if kind != "rms":
        ours.bias = getattr(norm, shift)
    return ours
