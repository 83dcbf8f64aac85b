"""Cached steps with all layers in one C++ call, and several steps of a search in one: the use of `DecoderSession` of
`csrc/inference/decoder_session.cpp`.

Calling some hundred small ops takes a fifth of a step on one CPU thread, and more on two, because nothing runs in
parallel with the calls. A session is used only if it computes what the modules would compute; the modules are its
oracle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import backends, extension
from ..inference.prepacked import PrepackedLinear
from ..layers import DecoderLayer, LayerNorm, Norm, PositionalEncoder, RMSNorm
from ..layers.hooks import is_plain
from .cache import DecoderCache
from .config import GenerationConfig
from .weights import DROPOUTS, StepFeedForward

_KINDS: dict[type[nn.Module], str] = {Norm: "std", LayerNorm: "layer", RMSNorm: "rms"}
"""Kind of the norm op, by the class of the norm."""


class _Layer(NamedTuple):
    """Parts of a decoder layer in the order of `Part` in decoder_session.cpp, and options that must be equal in all
    layers."""

    norms: list[Tensor]  # weight and bias of each; RMSNorm has an empty bias
    linears: list[PrepackedLinear]
    options: tuple[bool, str, float, str]  # norm_first, kind of the norms, eps, activation


class _OutputParts(NamedTuple):
    """Parts after the last layer: parameters of a norm, or None, and the linear layer that makes logits."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    out: PrepackedLinear


class BeamSteps(NamedTuple):
    """Steps of beams, from `DecoderSession.beam`.

    history (rows, steps), origin, reached (rows,): the tokens of all steps but the last, the row's number before the
    steps, and its log-probability. total, parent, token (units, candidates): of the last step, the cumulative
    log-probability, the row that is continued, and the token. normalizer (rows,): in any order.
    """

    history: Tensor
    origin: Tensor
    reached: Tensor
    total: Tensor
    parent: Tensor
    token: Tensor
    normalizer: Tensor


class Session:
    """`DecoderSession` for a prepacked decoder with its cache; made by `new_session`."""

    def __init__(
        self,
        native: Any,
        cache: DecoderCache,
        layers: list[_Layer],
        positions: PositionalEncoder,
        end: _OutputParts | None,
    ) -> None:
        self._native, self._cache, self._layers, self._positions, self._end = native, cache, layers, positions, end
        self._rows, self._takes_rows = 0, False

    def prepare(self, rows: int, steps: int = 0, *, cells: bool = False) -> Any | None:
        """Return the `DecoderSession` for this number of rows, with room in the cache for at least a step.

        steps: largest number for a call of `greedy` or `beam`; 0 for `step`. Returns None if modules must be called,
        if there are steps but no output layer to choose tokens with, or, with `cells`, if there is no table of
        cells.
        """
        cache = self._cache
        general_mask = cache.source_mask is not None and cache.source_lengths is None
        if general_mask or torch.is_autocast_enabled("cpu") or (steps > 0 and self._end is None):
            return None
        if rows != self._rows:
            self._rows, self._takes_rows = rows, self._set_weights(rows)
        if not self._takes_rows:
            return None
        own, table = cache.own_in_cells(rows, always=cells)
        if cells and table is None:
            return None
        slots, entries, _ = cache.grid or (None, None, 0)
        self._native.set_cache(
            own=own,
            cross=cache.cross,
            positions=self._positions.table(cache.length + max(1, steps)),
            length=cache.length,
            cells=table,
            source_lengths=cache.source_lengths,
            row_of_slot=slots,
            slot_of_row=entries,
        )
        return self._native

    def _set_weights(self, rows: int) -> bool:
        """Set the weights in the layout for this number of rows. Returns False if modules must multiply with these
        weights."""
        tensors = []
        for layer in self._layers:
            tensors += layer.norms
            for linear in layer.linears:
                weight = linear.operand(rows)
                if weight is None:
                    return False
                tensors += [weight, linear.bias]
        if self._end is not None:
            norm_weight, norm_bias, out = self._end
            weight = out.operand(rows)
            if weight is None:
                return False
            self._native.set_end(
                norm_weight=norm_weight,
                norm_bias=norm_bias,
                out=weight,
                out_bias=out.bias,
                vocabulary=out.outputs,
            )
        self._native.set_layers(tensors)
        return True


def new_session(
    decoder: nn.Module, out: nn.Module, cache: DecoderCache, eos: int, config: GenerationConfig
) -> Session | None:
    """Return the session of a prepacked decoder with a cache and of its output layer; None if modules must be
    called.

    eos, config: the tokens that may be chosen, and where the session stops.
    """
    device, dtype, embed = cache.cross.device, cache.cross.dtype, decoder.embed
    if (device.type, dtype, embed.lut.weight.dtype) != ("cpu", torch.float32, torch.float32) or cache.record:
        return None
    if not extension.load() or backends.choose("attention", device, dtype)[0] != "native":
        return None
    layers = [_layer(layer, known.own.project) for layer, known in zip(decoder.layers, cache.layers, strict=True)]
    if None in layers or len({layer.options for layer in layers}) != 1:
        return None
    norm_first, kind, eps, activation = layers[0].options
    native = torch.classes.transformer_fast.DecoderSession(
        embedding=embed.lut.weight,
        scale=embed.scale,
        norm_first=norm_first,
        norm=kind,
        eps=eps,
        activation=activation,
        eos=eos,
        suppressed=sorted({*config.suppress}),
        renormalize=config.renormalize,
    )
    return Session(native, cache, layers, decoder.pe, _end(decoder.norm, out, kind, eps))


def _layer(layer: DecoderLayer, project: object) -> _Layer | None:
    """Return the parts of a decoder layer; None if a module is not plain or not in fp32."""
    if not isinstance(layer.ff, StepFeedForward):
        return None
    norms = layer.norm_1, layer.norm_2, layer.norm_3
    if not all(is_plain(norm, *_KINDS) for norm in norms) or len({(type(n), n.eps) for n in norms}) != 1:
        return None
    linears = [project, layer.attn_1.out, layer.attn_2.q_linear, layer.attn_2.out, layer.ff.linear_1, layer.ff.linear_2]
    if not all(is_plain(one, *DROPOUTS) for one in (layer.dropout_1, layer.dropout_2, layer.dropout_3)):
        return None
    if not all(isinstance(linear, PrepackedLinear) for linear in linears):
        return None
    tensors = [t for norm in norms for t in _parameters(norm)]
    if any(t is None or t.dtype != torch.float32 for t in (*tensors, *(linear.bias for linear in linears))):
        return None
    kind = _KINDS[type(layer.norm_1)]
    return _Layer(tensors, linears, (layer.norm_first, kind, _eps(layer.norm_1), layer.ff.activation))


def _end(norm: nn.Module, out: nn.Module, kind: str, eps: float) -> _OutputParts | None:
    """Return the last norm and `out`; None if one is not plain, not in fp32, or the norm differs from those of the
    layers."""
    if not isinstance(out, PrepackedLinear):
        return None
    if is_plain(norm, nn.Identity):
        return _OutputParts(None, None, out)
    if not is_plain(norm, *_KINDS) or (_KINDS[type(norm)], _eps(norm)) != (kind, eps):
        return None
    parameters = _parameters(norm)
    return None if any(t is None or t.dtype != torch.float32 for t in parameters) else _OutputParts(*parameters, out)


def _eps(norm: Norm | LayerNorm | RMSNorm) -> float:
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # the default of nn.RMSNorm


def _parameters(norm: Norm | LayerNorm | RMSNorm) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm, in the form of `_Layer`."""
    if isinstance(norm, RMSNorm):
        return norm.weight, torch.empty(0)
    return norm.alpha if isinstance(norm, Norm) else norm.weight, norm.bias
