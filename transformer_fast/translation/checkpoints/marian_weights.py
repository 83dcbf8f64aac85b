"""The names of Marian's weights, as Hugging Face has them, and ours."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..model import model_tensors

POSITIONS = {
    "encoder.pe.pe": "model.encoder.embed_positions.weight",
    "decoder.pe.pe": "model.decoder.embed_positions.weight",
}
SHARED, BIAS = "model.shared.weight", "final_logits_bias"

_ATTENTION = {"q_linear": "q_proj", "k_linear": "k_proj", "v_linear": "v_proj", "out": "out_proj"}
_ENCODER = {"attn": "self_attn", "norm_1": "self_attn_layer_norm", "norm_2": "final_layer_norm"}
_DECODER = {
    "attn_1": "self_attn",
    "norm_1": "self_attn_layer_norm",
    "attn_2": "encoder_attn",
    "norm_2": "encoder_attn_layer_norm",
    "norm_3": "final_layer_norm",
}
_FEED_FORWARD = {"ff.linear_1": "fc1", "ff.linear_2": "fc2"}


def layer_names(layers: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Our name and Marian's of every weight in the layers of the encoder and of the decoder."""
    for side, count, parts in (("encoder", layers[0], _ENCODER), ("decoder", layers[1], _DECODER)):
        modules = dict(_FEED_FORWARD)
        for ours, theirs in parts.items():
            inner = _ATTENTION.items() if ours.startswith("attn") else [("", "")]
            modules |= {f"{ours}.{a}".strip("."): f"{theirs}.{b}".strip(".") for a, b in inner}
        for number in range(count):
            for ours, theirs in modules.items():
                for kind in ("weight", "bias"):
                    yield f"{side}.layers.{number}.{ours}.{kind}", f"model.{side}.layers.{number}.{theirs}.{kind}"


def from_marian(
    model: nn.Module, layers: tuple[int, int], tie_weights: bool | str, given: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Convert Marian's tensors to the tensors of `model` (see `model_tensors`).

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape; or two tensors that must be equal differ.
    """
    names = {ours: (theirs,) for ours, theirs in layer_names(layers)}
    names |= {ours: (theirs,) for ours, theirs in (*POSITIONS.items(), ("out.bias", BIAS))}
    names |= _embedding_names(tie_weights)
    wanted = model_tensors(model)
    found: dict[str, Tensor] = {}
    for ours, tensor in wanted.items():
        shape = _marian_shape(ours, tensor)
        values = {theirs: given[theirs] for theirs in names[ours] if theirs in given}
        first = next(iter(values), "")
        for theirs, value in values.items():
            if value.shape != shape:
                raise CheckpointError(f"{theirs} has the shape {tuple(value.shape)}; config.json needs {tuple(shape)}")
            if not torch.equal(value, values[first]):
                raise CheckpointError(f"{theirs} and {first} differ; config.json says that they are one matrix")
        if values:
            found[ours] = values[first].reshape(tensor.shape).clone()
        elif ours in POSITIONS or ours == "out.bias":  # computed (positions) or zero (biases) if missing in the file
            found[ours] = tensor if ours in POSITIONS else torch.zeros_like(tensor)
        else:
            raise CheckpointError(f"the weights have no {names[ours][0]}, which config.json needs")
    known = {theirs for several in names.values() for theirs in several}
    if extra := sorted(given.keys() - known):
        raise CheckpointError(
            f"the weights have {len(extra)} tensors that a Marian model of this config.json does not have, such as"
            f" {extra[0]}"
        )
    return found


def to_marian(
    model: nn.Module, layers: tuple[int, int], tie_weights: bool | str, *, positions: bool
) -> dict[str, Tensor]:
    """Convert the tensors of `model` to Marian's. positions: include the positional tables."""
    own = model_tensors(model)
    tensors = {theirs: own[ours] for ours, theirs in layer_names(layers)}
    tensors |= {several[0]: own[ours] for ours, several in _embedding_names(tie_weights).items()}
    tensors[BIAS] = own["out.bias"][None]
    if positions:
        tensors |= {theirs: own[ours][0] for ours, theirs in POSITIONS.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _embedding_names(tie_weights: bool | str) -> dict[str, tuple[str, ...]]:
    """Marian's names of each of our matrices with one row per token; a file may use any of them."""
    source, target, out = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
    if tie_weights is True:
        return {"encoder.embed.lut.weight": (SHARED, source, target, out)}
    if tie_weights == "decoder":
        return {"encoder.embed.lut.weight": (source,), "decoder.embed.lut.weight": (target, out)}
    return {"encoder.embed.lut.weight": (source,), "decoder.embed.lut.weight": (target,), "out.weight": (out,)}


def _marian_shape(ours: str, tensor: Tensor) -> torch.Size:
    if ours in POSITIONS:
        return tensor.shape[1:]
    return tensor[None].shape if ours == "out.bias" else tensor.shape
