"""The cached step with all layers in one call of the C++ extension, `csrc/ops/decoder_step.cpp`.

Some hundred calls of small ops a step are a fifth of it on one thread of a CPU, and more on two, since nothing runs
beside them. Taken only where it is sure to compute what the modules would; they are its oracle.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import backends, extension
from ..layers import DecoderLayer, LayerNorm, MultiHeadAttention, Norm, RMSNorm
from ..layers.hooks import is_plain
from ..models import Decoder
from .cache import DecoderCache
from .weights import StepFeedForward, StepLinear

_KINDS: dict[type[nn.Module], str] = {Norm: "std", LayerNorm: "layer", RMSNorm: "rms"}
"""By the class of a norm, the kind of the op that it calls."""


class _Layer(NamedTuple):
    """A decoder layer in the order of `Part` in decoder_step.cpp, and what must be the same in all layers."""

    norms: list[Tensor]  # weight and bias of each; RMSNorm has an empty bias
    linears: list[StepLinear]
    options: tuple[bool, str, float, str]  # norm_first, kind of the norms, eps, activation


class FusedStep:
    """Steps of a prepacked decoder with its cache; from `fused_step`."""

    def __init__(self, decoder: Decoder, cache: DecoderCache, layers: list[_Layer]) -> None:
        self._decoder, self._cache, self._layers = decoder, cache, layers
        self._operands_by_rows: dict[int, list[Tensor] | None] = {}

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """(rows,) newest ids in the order of the cache -> (rows, d_model) what the last norm gives; the cache has their
        keys and values then. None, and nothing done, where this step needs the modules."""
        rows, cache = tokens.shape[0], self._cache
        general_mask = cache.source_mask is not None and cache.source_lengths is None
        if general_mask or torch.is_autocast_enabled("cpu"):
            return None
        if rows not in self._operands_by_rows:
            self._operands_by_rows[rows] = self._operands(rows)
        operands = self._operands_by_rows[rows]
        if operands is None:
            return None
        slots, entries, _ = cache.grid or (None, None, 0)
        offset, length = cache.position(rows)
        x = self._decoder.embed.with_positions(tokens[:, None], self._decoder.pe, offset, length=length).squeeze(1)
        own, cells = cache.own_in_cells(rows)
        state = own, cache.cross, cache.length, cache.keys(), cells, cache.source_lengths, slots, entries
        options = self._layers[0].options
        return self._decoder.norm(torch.ops.transformer_fast.decoder_step(x, operands, *state, *options))

    def _operands(self, rows: int) -> list[Tensor] | None:
        """The tensors of all layers, as so many rows are multiplied with them; None where modules must do that."""
        operands = []
        for layer in self._layers:
            operands += layer.norms
            for linear in layer.linears:
                weight = linear.operand(rows)
                if weight is None:
                    return None
                operands += [weight, linear.bias]
        return operands


def fused_step(decoder: nn.Module, cache: DecoderCache) -> FusedStep | None:
    """The fused steps of a prepacked decoder, or None where its modules must be called."""
    device, dtype = cache.cross.device, cache.cross.dtype
    if device.type != "cpu" or dtype != torch.float32 or cache.record or not is_plain(decoder, Decoder):
        return None
    if not extension.load() or backends.choose("attention", device, dtype)[0] != "native":
        return None
    layers = [_layer(layer, known.own.project) for layer, known in zip(decoder.layers, cache.layers, strict=True)]
    if None in layers or len({layer.options for layer in layers}) != 1:
        return None
    return FusedStep(decoder, cache, layers)


def _layer(layer: nn.Module, project: object) -> _Layer | None:
    """The parts of a decoder layer; None for one that is not made of plain modules in fp32."""
    if not is_plain(layer, DecoderLayer) or not is_plain(layer.ff, StepFeedForward):
        return None
    norms, attentions = (layer.norm_1, layer.norm_2, layer.norm_3), (layer.attn_1, layer.attn_2)
    if not all(is_plain(norm, *_KINDS) for norm in norms) or len({(type(n), n.eps) for n in norms}) != 1:
        return None
    linears = [project, layer.attn_1.out, layer.attn_2.q_linear, layer.attn_2.out, layer.ff.linear_1, layer.ff.linear_2]
    if not all(is_plain(one, MultiHeadAttention) for one in attentions):
        return None
    if not all(isinstance(linear, StepLinear) for linear in linears):
        return None
    tensors = [t for norm in norms for t in _parameters(norm)]
    if any(t is None or t.dtype != torch.float32 for t in (*tensors, *(linear.bias for linear in linears))):
        return None
    kind, eps = _KINDS[type(layer.norm_1)], layer.norm_1.eps
    eps = torch.finfo(torch.float32).eps if eps is None else eps  # as nn.RMSNorm has it
    return _Layer(tensors, linears, (layer.norm_first, kind, eps, layer.ff.activation))


def _parameters(norm: Norm | LayerNorm | RMSNorm) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a norm, as `_Layer` has them."""
    if isinstance(norm, RMSNorm):
        return norm.weight, torch.empty(0)
    return norm.alpha if isinstance(norm, Norm) else norm.weight, norm.bias
