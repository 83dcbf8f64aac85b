"""A decoding step of all layers as one call into the C++ extension, `csrc/ops/decoder_step.cpp`.

Some hundred calls of small ops a step are a fifth of it on one thread of a CPU, and more on two, since nothing runs
beside them. Taken only where it is sure to compute what the modules would; they are its oracle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import backends, extension
from ..layers import DecoderLayer, LayerNorm, MultiHeadAttention, Norm
from ..layers.hooks import is_plain
from ..models import Decoder
from .cache import DecoderCache
from .weights import StepFeedForward, StepLinear


class FusedStep:
    """Steps of a prepared decoder with its cache; from `fused_step`.

    Args:
        decoder: from `prepared`, all of it plain modules.
        cache: of that decoder.
    """

    def __init__(self, decoder: Decoder, cache: DecoderCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._layers = [
            _parts(layer, known.own.project) for layer, known in zip(decoder.layers, cache.layers, strict=True)
        ]
        first = decoder.layers[0]
        self._form = first.norm_first, type(first.norm_1) is Norm, first.norm_1.eps

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """(rows,) newest ids in the order of the cache -> (rows, d_model) what the last norm gives; the cache has their
        keys and values then. None, and nothing done, where this step needs the modules."""
        rows, cache = tokens.shape[0], self._cache
        if cache.mask_is_general or torch.is_autocast_enabled("cpu"):
            return None
        operands = []
        for norms, linears in self._layers:
            operands += norms
            for linear in linears:
                weight = linear.operand(rows)
                if weight is None:
                    return None
                operands += [weight, linear.bias]
        slots, places, _ = cache.grid or (None, None, 0)
        x = self._decoder.embed.with_positions(tokens[:, None], self._decoder.pe, cache.length).squeeze(1)
        state = cache.own(rows), cache.cross, cache.length, cache.source_lengths, slots, places
        return self._decoder.norm(torch.ops.transformer_fast.decoder_step(x, operands, *state, *self._form))


def fused_step(decoder: nn.Module, cache: DecoderCache) -> FusedStep | None:
    """The fused steps of a prepared decoder, or None where its modules must be called."""
    cross = cache.cross
    here = cross.device.type == "cpu" and cross.dtype == torch.float32 and extension.load()
    if not here or cache.records or backends.choose("attention", cross.device, cross.dtype)[0] != "native":
        return None
    forms = {_form(layer, known.own.project) for layer, known in zip(decoder.layers, cache.layers, strict=True)}
    if len(forms) != 1 or None in forms or not is_plain(decoder, Decoder):
        return None
    return FusedStep(decoder, cache)


def _form(layer: nn.Module, project: object) -> tuple | None:
    """What must be the same in all layers; None for one that is not made of plain modules in fp32."""
    if not is_plain(layer, DecoderLayer):
        return None
    norms, attentions = (layer.norm_1, layer.norm_2, layer.norm_3), (layer.attn_1, layer.attn_2)
    kind = type(layer.norm_1)
    if kind not in (Norm, LayerNorm) or not all(is_plain(norm, kind) for norm in norms):
        return None
    if not all(is_plain(one, MultiHeadAttention) for one in attentions) or not is_plain(layer.ff, StepFeedForward):
        return None
    tensors, linears = _parts(layer, project)
    plain = all(isinstance(linear, StepLinear) and linear.bias is not None for linear in linears)
    if not plain or any(t is None or t.dtype != torch.float32 for t in [*tensors, *(one.bias for one in linears)]):
        return None
    eps = {norm.eps for norm in norms}
    return None if len(eps) > 1 else (layer.norm_first, kind, eps.pop(), layer.attn_1.h, layer.attn_2.h)


def _parts(layer: DecoderLayer, project: StepLinear) -> tuple[list[Tensor | None], list[StepLinear]]:
    """Weights and biases of the norms, and the linear layers, in the order of `Part` in decoder_step.cpp."""
    norms = layer.norm_1, layer.norm_2, layer.norm_3
    tensors = [t for norm in norms for t in (norm.alpha if isinstance(norm, Norm) else norm.weight, norm.bias)]
    linears = [project, layer.attn_1.out, layer.attn_2.q_linear, layer.attn_2.out, layer.ff.linear_1, layer.ff.linear_2]
    return tensors, linears
