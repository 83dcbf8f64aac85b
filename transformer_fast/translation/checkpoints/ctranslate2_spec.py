"""Conversion of a model to a specification of CTranslate2; needs the package ctranslate2.

Source: Klein et al. 2020, "The OpenNMT Neural Machine Translation Toolkit"; the names are those of `ctranslate2.specs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ctranslate2.specs import common_spec, transformer_spec
from torch import Tensor, nn

from .exported import Exported

ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "swish": common_spec.Activation.SWISH,
    "gelu": common_spec.Activation.GELU,
}
NEVER = -1e4
"""Added to the logits of tokens that are never chosen; fp16 can hold it."""


def make_spec(exported: Exported) -> Any:
    """The specification of a model with LayerNorm or RMSNorm, its weights and its vocabularies.

    Tokens that the run never chooses are made unlikely by the output layer's bias. CTranslate2 adds the end of a source
    sentence by itself.
    """
    model, config, tokenizer = exported.model, exported.config, exported.tokenizer
    spec = transformer_spec.TransformerSpec.from_config(
        config.layers,
        config.heads[0],
        pre_norm=config.norm_first,
        activation=ACTIVATIONS[config.activation],
        rms_norm=config.norm == "rms",
    )
    spec.decoder.num_heads = np.int16(config.heads[1])
    for side, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _array(stack.embed.lut.weight)
        side.scale_embeddings = float(stack.embed.scale)
        side.position_encodings.encodings = _array(stack.pe.pe[0])
        if config.norm_first:
            _set_norm(side.layer_norm, stack.norm)
    for to, layer in zip(spec.encoder.layer, model.encoder.layers, strict=True):
        _set_self_attention(to.self_attention, layer.attn, layer.norm_1)
        _set_feed_forward(to.ffn, layer.ff, layer.norm_2)
    for to, layer in zip(spec.decoder.layer, model.decoder.layers, strict=True):
        _set_self_attention(to.self_attention, layer.attn_1, layer.norm_1)
        _set_linear(to.attention.linear[0], [layer.attn_2.q_linear])
        _set_linear(to.attention.linear[1], [layer.attn_2.k_linear, layer.attn_2.v_linear])
        _set_linear(to.attention.linear[2], [layer.attn_2.out])
        _set_norm(to.attention.layer_norm, layer.norm_2)
        _set_feed_forward(to.ffn, layer.ff, layer.norm_3)
    _set_linear(spec.decoder.projection, [model.out])
    spec.decoder.projection.bias[list(exported.generation.suppress)] = NEVER
    spec.register_source_vocabulary(_tokens(tokenizer.files.vocab, config.src_vocab))
    spec.register_target_vocabulary(_tokens(tokenizer.files.target_vocab or tokenizer.files.vocab, config.trg_vocab))
    spec.config.add_source_eos = True
    spec.config.eos_token, spec.config.unk_token = tokenizer.special["eos"], tokenizer.special["unk"]
    spec.config.decoder_start_token = spec.config.bos_token = tokenizer.pieces([tokenizer.bos])[0]
    spec.config.layer_norm_epsilon = model.decoder.layers[0].norm_1.eps
    return spec


def _set_self_attention(spec: Any, attention: nn.Module, norm: nn.Module) -> None:
    _set_linear(spec.linear[0], [attention.q_linear, attention.k_linear, attention.v_linear])
    _set_linear(spec.linear[1], [attention.out])
    _set_norm(spec.layer_norm, norm)


def _set_feed_forward(spec: Any, module: nn.Module, norm: nn.Module) -> None:
    _set_linear(spec.linear_0, [module.linear_1])
    _set_linear(spec.linear_1, [module.linear_2])
    _set_norm(spec.layer_norm, norm)


def _set_linear(spec: Any, linears: Sequence[nn.Linear]) -> None:
    """Set the weights of linear layers with the same input, stacked along the outputs."""
    spec.weight = _array(torch.cat([linear.weight for linear in linears]))
    spec.bias = _array(torch.cat([linear.bias for linear in linears]))


def _set_norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma = _array(norm.weight)
    if not isinstance(norm, nn.RMSNorm):
        spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def _tokens(vocab: dict[str, int], size: int) -> list[str]:
    """Piece per id; an id without a piece gets a name that occurs in no text."""
    pieces = {id_: piece for piece, id_ in vocab.items()}
    return [pieces.get(id_, f"<no piece {id_}>") for id_ in range(size)]
