"""The cached step with all layers in one call of the C++ extension, `csrc/ops/decoder_step.cpp`; and several steps of a
search in one, `csrc/ops/search_steps.cpp`.

Some hundred calls of small ops a step are a fifth of it on one thread of a CPU, and more on two, since nothing runs
beside them. Taken only where it is sure to compute what the modules would; they are its oracle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import backends, extension
from ..layers import DecoderLayer, Embedder, LayerNorm, MultiHeadAttention, Norm, PositionalEncoder, RMSNorm
from ..layers.hooks import is_plain
from ..models import Decoder
from .cache import DecoderCache
from .config import GenerationConfig
from .topk import Choice
from .weights import DROPOUTS, EMBEDDINGS, StepFeedForward, StepLinear

_KINDS: dict[type[nn.Module], str] = {Norm: "std", LayerNorm: "layer", RMSNorm: "rms"}
"""By the class of a norm, the kind of the op that it calls."""


class _Layer(NamedTuple):
    """A decoder layer in the order of `Part` in decoder_step.cpp, and what must be the same in all layers."""

    norms: list[Tensor]  # weight and bias of each; RMSNorm has an empty bias
    linears: list[StepLinear]
    options: tuple[bool, str, float, str]  # norm_first, kind of the norms, eps, activation


class _Ends(NamedTuple):
    """Parts before the first layer, in the order of search_steps.cpp, and behind the last."""

    embedding: Tensor
    positions: PositionalEncoder
    scale: float
    norm: tuple[Tensor | None, Tensor | None]
    out: StepLinear


class BeamSteps(NamedTuple):
    """Several steps of beams, by their rows. history (rows, steps): the tokens of all but the last step, and origin
    (rows,) the row that each one was before them; reached (rows,): its log-probability. total, parent, token (units,
    candidates): the best continuations of the last step, the row each continues, and its token. normalizer (rows,): of
    the last step, in no order; NaN where a row has a NaN."""

    history: Tensor
    origin: Tensor
    reached: Tensor
    total: Tensor
    parent: Tensor
    token: Tensor
    normalizer: Tensor


class FusedStep:
    """Steps of a prepacked decoder with its cache; from `fused_step`."""

    def __init__(
        self, decoder: Decoder, cache: DecoderCache, layers: list[_Layer], ends: _Ends | None, options: tuple[Any, ...]
    ) -> None:
        self._decoder, self._cache, self._layers, self._ends, self._options = decoder, cache, layers, ends, options
        self._operands_by_rows: dict[int, list[Tensor] | None] = {}

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """(rows,) newest ids in the order of the cache -> (rows, d_model) what the last norm gives; the cache has their
        keys and values then. None, and nothing done, where this step needs the modules."""
        state = self._state(tokens.shape[0])
        if state is None:
            return None
        offset, length = self._cache.position(tokens.shape[0])
        x = self._decoder.embed.with_positions(tokens[:, None], self._decoder.pe, offset, length=length).squeeze(1)
        return self._decoder.norm(torch.ops.transformer_fast.decoder_step(x, *state))

    def greedy(self, tokens: Tensor, most: int) -> Choice | None:
        """(rows,) newest ids -> what each step chose, as `choose` gives it, (rows, steps); the last is the first in
        which a row ended: chose EOS, had nothing to choose, or shows a NaN. The cache has the keys and values of all
        steps then. None as above."""
        given = self._of_several(tokens.shape[0], most)
        if given is None:
            return None
        ends, state = given
        token, best, normalizer = torch.ops.transformer_fast.greedy_steps(tokens, *ends, *state)
        return Choice(best, token, normalizer)

    def beam(self, tokens: Tensor, log_prob: Tensor, width: int, candidates: int, most: int) -> BeamSteps | None:
        """The same for beams of which all hypotheses are open, (units * width,) rows in the caller's order, up to the
        first step in which one of the best `width` continuations may end; who continues whom is in the cache, but for
        the last step."""
        given = self._of_several(tokens.shape[0], most, cells=True)
        if given is None:
            return None
        ends, state = given
        beams = log_prob, self._cache.places(), width, candidates
        return BeamSteps(*torch.ops.transformer_fast.beam_steps(tokens, *ends, *beams, *state))

    def _of_several(
        self, rows: int, most: int, *, cells: bool = False
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """Arguments of search_steps.cpp besides the tokens: parts around the layers, and `_state`. None as there."""
        ends = self._ends
        weight = None if ends is None else ends.out.operand(rows)
        state = None if weight is None else self._state(rows, cells=cells)
        if ends is None or state is None:
            return None
        most = min(most, self._cache.room())
        table = ends.positions.table(self._cache.length + most)
        behind = *ends.norm, weight, ends.out.bias, ends.out.outputs
        return (most, *self._options, ends.embedding, table, ends.scale, *behind), state

    def _state(self, rows: int, *, cells: bool = False) -> tuple[Any, ...] | None:
        """Arguments of decoder_step besides the rows, which have room in the cache then; None where the modules are
        needed, or with `cells` where there is no table of them."""
        cache = self._cache
        general_mask = cache.source_mask is not None and cache.source_lengths is None
        if general_mask or torch.is_autocast_enabled("cpu"):
            return None
        if rows not in self._operands_by_rows:
            self._operands_by_rows[rows] = self._operands(rows)
        operands = self._operands_by_rows[rows]
        if operands is None:
            return None
        slots, entries, _ = cache.grid or (None, None, 0)
        own, table = cache.own_in_cells(rows, always=cells)
        if cells and table is None:
            return None
        state = own, cache.cross, cache.length, cache.keys(), table, cache.source_lengths, slots, entries
        return operands, *state, *self._layers[0].options

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


def fused_step(
    decoder: nn.Module, out: nn.Module, cache: DecoderCache, eos: int, config: GenerationConfig
) -> FusedStep | None:
    """The fused steps of a prepacked decoder and what makes logits of its rows, or None where its modules must be
    called."""
    device, dtype = cache.cross.device, cache.cross.dtype
    if device.type != "cpu" or dtype != torch.float32 or cache.record or not is_plain(decoder, Decoder):
        return None
    if not extension.load() or backends.choose("attention", device, dtype)[0] != "native":
        return None
    layers = [_layer(layer, known.own.project) for layer, known in zip(decoder.layers, cache.layers, strict=True)]
    if None in layers or len({layer.options for layer in layers}) != 1:
        return None
    options = eos, sorted({*config.suppress}), config.renormalize
    return FusedStep(decoder, cache, layers, _ends(decoder, out, layers), options)


def _layer(layer: nn.Module, project: object) -> _Layer | None:
    """The parts of a decoder layer; None for one that is not made of plain modules in fp32."""
    if not is_plain(layer, DecoderLayer) or not isinstance(layer.ff, StepFeedForward):
        return None
    norms, attentions = (layer.norm_1, layer.norm_2, layer.norm_3), (layer.attn_1, layer.attn_2)
    if not all(is_plain(norm, *_KINDS) for norm in norms) or len({(type(n), n.eps) for n in norms}) != 1:
        return None
    linears = [project, layer.attn_1.out, layer.attn_2.q_linear, layer.attn_2.out, layer.ff.linear_1, layer.ff.linear_2]
    if not all(is_plain(one, MultiHeadAttention) for one in attentions):
        return None
    if not all(is_plain(one, *DROPOUTS) for one in (layer.dropout_1, layer.dropout_2, layer.dropout_3)):
        return None
    if not all(isinstance(linear, StepLinear) for linear in linears):
        return None
    tensors = [t for norm in norms for t in _parameters(norm)]
    if any(t is None or t.dtype != torch.float32 for t in (*tensors, *(linear.bias for linear in linears))):
        return None
    kind = _KINDS[type(layer.norm_1)]
    return _Layer(tensors, linears, (layer.norm_first, kind, _eps(layer.norm_1), layer.ff.activation))


def _ends(decoder: Decoder, out: nn.Module, layers: list[_Layer]) -> _Ends | None:
    """The embedding, the last norm and `out`; None if one of them is no plain module in fp32, or the norm another one
    than the layers'."""
    embed, positions, norm = decoder.embed, decoder.pe, decoder.norm
    if (
        not is_plain(embed, Embedder)
        or not is_plain(embed.lut, *EMBEDDINGS)
        or not is_plain(positions, PositionalEncoder)
    ):
        return None
    if not isinstance(out, StepLinear) or embed.lut.weight.dtype != torch.float32:
        return None
    tensors: tuple[Tensor | None, Tensor | None] = (None, None)
    if not is_plain(norm, nn.Identity):
        if not is_plain(norm, *_KINDS) or (_KINDS[type(norm)], _eps(norm)) != layers[0].options[1:3]:
            return None
        tensors = _parameters(norm)
        if any(t is None or t.dtype != torch.float32 for t in tensors):
            return None
    return _Ends(embed.lut.weight, positions, embed.scale, tensors, out)


def _eps(norm: Norm | LayerNorm | RMSNorm) -> float:
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # as nn.RMSNorm has it


def _parameters(norm: Norm | LayerNorm | RMSNorm) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a norm, as `_Layer` has them."""
    if isinstance(norm, RMSNorm):
        return norm.weight, torch.empty(0)
    return norm.alpha if isinstance(norm, Norm) else norm.weight, norm.bias
