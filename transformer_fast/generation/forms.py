"""Forms of models that generation supports, with one interface: encode, decode a prefix, and a decoder with a cache.

A decoder of `transformer_fast` takes a cache as it is. The decoder of The Annotated Transformer gets a `Decoder` on the
same parameters, once `accelerate` has proven what it computes. Any other model is called over the whole prefix.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layers import DecoderLayer, Embedder, EncoderLayer, MultiHeadAttention, PositionalEncoder
from ..layers.hooks import is_plain
from ..models import Decoder, Encoder
from .weights import DROPOUTS, EMBEDDINGS

decoder_makers: list[Callable[[nn.Module, nn.Module, int], Decoder | None]] = []
"""Functions ``(decoder, embedding, longest)`` that make a `Decoder` on the parameters of an Annotated Transformer's, or
return None. ``accelerate`` adds the one for what it has proven."""

_ANNOTATED = ("encoder", "decoder", "src_embed", "tgt_embed", "generator")


@dataclass(frozen=True)
class Form:
    """Model like `transformer_fast.Transformer`: `encoder(src, src_mask)`, `decoder(trg, memory, src_mask,
    trg_mask)` and `out`."""

    model: nn.Module

    @property
    def out(self) -> nn.Module:
        """Output layer, (..., d_model) -> (..., vocabulary): logits, or values with the same softmax."""
        return self.model.out

    @property
    def vocabulary(self) -> int | None:
        """Number of target tokens; None if the model does not have one."""
        return getattr(self.out, "out_features", None)

    def has_own_encoder(self) -> bool:
        """Return True if the encoder is one of this package, whose layers and attention are plain."""
        encoder = self.model.encoder
        if not is_plain(encoder, Encoder) or not all(is_plain(layer, EncoderLayer) for layer in encoder.layers):
            return False
        return all(is_plain(layer.attn, MultiHeadAttention) for layer in encoder.layers)

    def encode(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Encode src (B, S) with a keep mask (B, 1, S) -> (B, S, d_model)."""
        return self.model.encoder(src, src_mask)

    def decode(self, tokens: Tensor, memory: Tensor, src_mask: Tensor | None, causal: Tensor) -> Tensor:
        """Decode tokens (B, t) with a keep mask (1, t, t) -> inputs of `out`, (B, t, d_model)."""
        return self.model.decoder(tokens, memory, src_mask, causal)

    def cached_decoder(self, memory: Tensor, src_mask: Tensor | None, longest: int) -> Decoder | None:
        """Return a decoder that takes a cache and computes what `decode` does, for prefixes of up to `longest`
        tokens; None if there is none."""
        return self.model.decoder if cache_obstacle(self.model.decoder) is None else None

    def no_cache(self) -> str:
        """Return the reason why `cached_decoder` returns None, for an error."""
        reason = cache_obstacle(self.model.decoder) if isinstance(self.model.decoder, Decoder) else None
        return "there is no cached decoder for this model" + (f": {reason}" if reason else "")

    def reader(self) -> tuple[nn.Module, nn.Module, nn.Module] | None:
        """Return the last layer's attention to the source, its query projection, and its key projection; None if
        these parts have other names."""
        layers = getattr(self.model.decoder, "layers", None)
        attention = getattr(layers[-1], "attn_2", None) if layers else None
        found = attention, getattr(attention, "q_linear", None), getattr(attention, "k_linear", None)
        return None if None in found or not hasattr(attention, "h") else found


class AnnotatedForm(Form):
    """The Annotated Transformer's `EncoderDecoder(encoder, decoder, src_embed, tgt_embed, generator)`, called by its
    methods `encode` and `decode` if it has them."""

    @property
    def out(self) -> nn.Module:
        return self.model.generator

    @property
    def vocabulary(self) -> int | None:
        linears = [m for m in self.out.modules() if isinstance(m, nn.Linear)]
        return linears[0].out_features if len(linears) == 1 else None  # of several, the last may be another layer

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
        made = (make(self.model.decoder, self.model.tgt_embed, longest) for make in decoder_makers)
        decoder = next((one for one in made if one is not None), None)
        # The comparison below finds a `decode` that does more than call the modules; it is called at every step.
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
    """Return the form of a model.

    Raises:
        ValueError: for a model of no form; says what it lacks.
    """
    missing = [name for name in ("encoder", "decoder", "out") if not hasattr(model, name)]
    if not missing:
        return Form(model)
    kind = type(model).__name__
    lacks = [name for name in _ANNOTATED if not hasattr(model, name)]
    if lacks:
        absent = missing if len(missing) <= len(lacks) else lacks
        raise ValueError(
            "model must have encoder, decoder and out, like transformer_fast.Transformer, or encoder, decoder, "
            f"src_embed, tgt_embed and generator, like The Annotated Transformer; {kind} has no {', '.join(absent)}"
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
    """Reason why a decoder takes no cache; None for a `Decoder` whose layers have equal numbers of heads.

    The embedding must be plain, since a cached step reads its weights. Attention must be plain, since the cache does
    its work. Linear layers, norms, feed-forward layers and dropouts may be of any class: a step calls those that are
    not plain with the newest position.
    """
    if not is_plain(decoder, Decoder):
        return "the decoder is not a plain transformer_fast Decoder"
    for name, kinds in _EMBEDDING.items():
        if not is_plain(operator.attrgetter(name)(decoder), *kinds):
            return f"decoder.{name} is not a plain {kinds[0].__name__}"
    if decoder.embed.lut.max_norm is not None:
        return "decoder.embed.lut has max_norm, and changes its weight when it is called"
    for index, layer in enumerate(decoder.layers):
        if not is_plain(layer, DecoderLayer):
            return f"decoder.layers.{index} is not a plain DecoderLayer"
        for name in ("attn_1", "attn_2"):
            attention = getattr(layer, name)
            if not is_plain(attention, MultiHeadAttention) or not is_plain(attention.dropout, *DROPOUTS):
                return f"decoder.layers.{index}.{name}, or its dropout, is not a plain MultiHeadAttention"
    alike = len({(layer.attn_1.h, layer.attn_2.h) for layer in decoder.layers}) == 1
    return None if alike else "its layers have different numbers of heads"


_EMBEDDING = {
    "embed": (Embedder,),
    "embed.lut": EMBEDDINGS,
    "pe": (PositionalEncoder,),
    "pe.dropout": DROPOUTS,
}
"""The modules of a decoder that are read before its first layer, in this order, and their classes."""
