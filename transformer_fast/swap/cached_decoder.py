"""The Annotated Transformer's decoder as a `Decoder` that takes a cache, on the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..generation.forms import cache_obstacle
from ..layers import DecoderLayer, LayerNorm, MultiHeadAttention, Norm, RMSNorm
from ..layers import torch_modules as swapped
from ..layers.hooks import has_its_forward, is_plain
from ..models import Decoder
from .form import form_of, of_form, width_of
from .forms import LINEARS
from .swapped import Registered


def as_decoder(decoder: nn.Module, embed: nn.Module, longest: int) -> Decoder | None:
    """Return The Annotated Transformer's decoder and its target embedding as a `Decoder`, on the same parameters.

    None if `accelerate` did not swap the decoder, if a module has hooks or was changed since, if a part differs from
    The Annotated Transformer's, or if the positional table has fewer than `longest` rows.
    """
    if not of_form("AnnotatedDecoder")(decoder) or type(embed) is not nn.Sequential:
        return None
    if not all(map(_is_as_swapped, (*decoder.modules(), *embed.modules()))) or len(embed) != 2:
        return None
    lookup, positions = embed
    if not of_form("Embedder")(lookup) or not _serves(positions, lookup.lut.weight, longest):
        return None
    width, layers = lookup.d_model, list(decoder.layers)
    norms = decoder.norm, *(sublayer.norm for layer in layers for sublayer in layer.sublayer)
    attentions = [attention for layer in layers for attention in (layer.self_attn, layer.src_attn)]
    if not all(map(_serves_as_norm, norms)) or not all(_fits(attention, width) for attention in attentions):
        return None
    with torch.device("meta"):  # replaced below; needs no memory and no random numbers
        ours = Decoder(1, width, len(layers), 1, 0.0, d_ff=1, max_len=1)
        for theirs, layer in zip(layers, ours.layers, strict=True):
            _take_over(layer, theirs, width)
        ours.norm = _norm(decoder.norm)
    ours.embed.lut, ours.pe.pe = lookup.lut, _table(positions)
    return ours if cache_obstacle(ours) is None else None


def _is_as_swapped(module: nn.Module) -> bool:
    """Return True if a module need not be called and still has the class that `accelerate` gave it."""
    if not is_plain(module) or not isinstance(module, Registered):
        return is_plain(module)
    # A subclass of a made class, such as a parametrization makes, has the form of its base class.
    form = form_of(module)
    return form is not None and has_its_forward(type(module)) and form.has_names(module)


def _table(positions: nn.Module) -> Tensor:
    """Table of positions (1, max_len, d)."""
    return positions.P if of_form("D2lPositional")(positions) else positions.pe  # type: ignore[return-value]


def _serves(positions: nn.Module, weight: Tensor, longest: int) -> bool:
    """Return True if a positional table is on the embedding's device, does not widen its dtype, and has enough rows."""
    if not of_form("Positional", "D2lPositional")(positions):
        return False
    table = _table(positions)
    same = table.device == weight.device and torch.promote_types(table.dtype, weight.dtype) == weight.dtype
    return same and longest <= table.shape[1]


def _serves_as_norm(norm: nn.Module) -> bool:
    """Return True for a norm that a norm layer of this package can replace."""
    return width_of(norm) is not None and (
        form_of(norm) is not None or is_plain(norm, swapped.LayerNorm, swapped.RMSNorm)
    )


def _fits(attention: nn.Module, width: int) -> bool:
    """Return True for an attention module that `MultiHeadAttention` can replace."""
    if not of_form("ClassicHeads", "AnnotatedHeads")(attention):
        return False
    linears = _linears(attention)
    square = all(isinstance(one, nn.Linear) and one.in_features == one.out_features == width for one in linears)
    return square and attention.h * attention.d_k == width


def _linears(attention: nn.Module) -> Sequence[nn.Module]:
    return LINEARS[form_of(attention).name](attention)  # type: ignore[union-attr]


def _take_over(layer: DecoderLayer, theirs: nn.Module, width: int) -> None:
    """Move the parameters of The Annotated Transformer's layer into a `DecoderLayer`."""
    layer.norm_1, layer.norm_2, layer.norm_3 = (_norm(sublayer.norm) for sublayer in theirs.sublayer)
    for name, attention in (("attn_1", theirs.self_attn), ("attn_2", theirs.src_attn)):
        ours = MultiHeadAttention(attention.h, width, 0.0)
        ours.q_linear, ours.k_linear, ours.v_linear, ours.out = _linears(attention)
        setattr(layer, name, ours)
    inner = theirs.feed_forward
    if of_form("AnnotatedFeedForward")(inner):
        layer.ff.linear_1, layer.ff.linear_2 = inner.w_1, inner.w_2
    else:
        layer.ff = inner


def _norm(norm: nn.Module) -> Norm | LayerNorm | RMSNorm:
    """Return a norm as a norm of `transformer_fast.layers`, with the same parameters."""
    if isinstance(norm, swapped.RMSNorm):
        rms = RMSNorm(width_of(norm), norm.eps)
        rms.weight = norm.weight
        return rms
    form = form_of(norm)
    gain, shift = ("weight", "bias") if form is None else form.parameters
    kind = LayerNorm if form is None or form.name == "BiasedNorm" else Norm
    ours = kind(width_of(norm), norm.eps)
    setattr(ours, "weight" if kind is LayerNorm else "alpha", getattr(norm, gain))
    ours.bias = getattr(norm, shift)
    return ours
