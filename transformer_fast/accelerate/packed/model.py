"""Models of transformers that skip padding: arguments, output layer and loss.

Each layer packs its own inputs (see layer.py). The model runs its output layer and its loss on tokens too, and decides
which calls must keep their padding.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.unpadded import Unpadded, current
from ...layers.padded_calls import NO_SOURCE, PaddedCalls, padded_calls
from ...masks.packing import Packing, take, unpack
from ...tensors import takes_fused_ops
from ...tracing import is_traced
from .classes import Arguments, Forward, Packed, argument_names, part, positional_names

MODEL, HEAD = "model", "head"
"""Names of these parts."""

CALLED = "_makes_logits"
"""Attribute of an output layer: True if the model calls the layer to make logits."""

READS_PADDING = "the loss reads padding: labels at padding, or after it, are not all -100"
"""Reason why a call keeps its padding."""

IGNORED = -100
"""Label that the losses of transformers ignore."""

_PER_TOKEN = (
    "ForMaskedLM", "ForTokenClassification", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel",
    "ForQuestionAnswering",
)  # fmt: skip
"""Suffixes of model names whose head computes each position separately."""
_PER_ROW = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining")
"""Suffixes of model names whose head reads one position per row."""


@part(HEAD)
def head_forward(base: type[nn.Module]) -> Forward:
    """Make the ``forward`` of an output layer: on tokens alone if the model of the running call is packed."""

    def forward(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else current()
        if call is None or call.head is None or hidden.shape[:2] != (call.head.batch, call.head.length):
            return base.forward(self, hidden, *args, **kwargs)
        call.head_was_packed = True
        return base.forward(self, take(hidden, call.head).unsqueeze(0), *args, **kwargs)

    return forward


@part(MODEL)
def model_forward(base: type[nn.Module]) -> Forward:
    """Make the ``forward`` of a transformers model."""
    positional, names = positional_names(base.forward), argument_names(base.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(positional, args, kwargs)
        given = arguments.given
        if torch.compiler.is_compiling() or is_traced() or not arguments.fits or not takes_fused_ops(*given.values()):
            return base.forward(self, *args, **kwargs)
        changes: dict[str, Any] = {}
        if "use_cache" in names and given.get("use_cache") is None and given.get("past_key_values") is None:
            changes["use_cache"] = False
        if current() is not None:  # a submodel of the model that was called
            args, kwargs = arguments.replaced(changes)
            return base.forward(self, *args, **kwargs)
        call = Unpadded(padded_calls(self) or PaddedCalls())
        reason = _obstacle(self, given, call)
        if reason:
            call.hold_back(reason)
        else:
            changes |= _labels(self, given, names, call)
        if call.head is not None and _head(self).__dict__.get(CALLED) is None:
            return _first_run(self, base.forward, arguments, changes, call)
        return _run(self, base.forward, arguments.replaced(changes), call)

    return forward


def _run(model: nn.Module, forward: Forward, arguments: tuple[tuple[Any, ...], dict[str, Any]], call: Unpadded) -> Any:
    args, kwargs = arguments
    with call.entered():
        result = forward(model, *args, **kwargs)
    return _with_padding(result, call.head) if call.head is not None and call.head_was_packed else result


def _first_run(
    model: nn.Module, forward: Forward, arguments: Arguments, changes: dict[str, Any], call: Unpadded
) -> Any:
    """Run the first call with packed logits. If the model did not call its output layer, run the model again,
    padded."""
    head, state = _head(model), torch.get_rng_state()
    try:
        result = _run(model, forward, arguments.replaced(changes), call)
    except Exception:
        if call.head_was_packed:
            raise
    else:
        if call.head_was_packed:
            head.__dict__[CALLED] = True
            return result
    torch.set_rng_state(state)
    call.head = None
    result = _run(model, forward, arguments.replaced({k: v for k, v in changes.items() if k != "labels"}), call)
    head.__dict__[CALLED] = False  # only after the call succeeded: an error may be the caller's
    return result


def _obstacle(model: nn.Module, given: dict[str, Any], call: Unpadded) -> str:
    """Reason why a whole call keeps its padding, or "". Also sets which positions of the output are read."""
    name = type(model).__name__
    config = model.config
    mask, ids = given.get("attention_mask"), given.get("input_ids")
    flat = isinstance(mask, Tensor) and mask.dim() == 2
    if config.is_encoder_decoder and flat and not bool(mask.bool().any(1).all()):
        return NO_SOURCE
    if name.endswith("ForQuestionAnswering") and given.get("start_positions") is not None:
        return f"the loss of {name} reads all positions, padding included"
    if name.endswith(_PER_TOKEN):
        return ""
    pools = getattr(model, "pooler", None) is not None
    if getattr(model, "base_model", None) is model and not pools:
        return ""
    if not (pools or name.endswith(_PER_ROW)):
        return f"the head of {name} is unknown; it may read padding"
    if config.is_encoder_decoder:
        given_mask = given.get("decoder_attention_mask") is not None
        return f"the head of {name} reads one position of the decoder" if given_mask else ""
    if flat:
        call.read = _last_positions(ids, config, mask)
    return ""


def _last_positions(ids: Any, config: Any, mask: Tensor) -> Tensor:
    """Last position per row whose id is not the padding id, int64 (B,)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    pad = getattr(config, "pad_token_id", None)
    if pad is None or not isinstance(ids, Tensor) or ids.shape != mask.shape:
        return positions[-1:].expand(mask.shape[0])
    return (positions * (ids != pad)).amax(1)


def _labels(model: nn.Module, given: dict[str, Any], names: frozenset[str], call: Unpadded) -> dict[str, Any]:
    """Changed arguments with which the output layer and the loss run on tokens; empty if they cannot."""
    changes: dict[str, Any] = {}
    labels, decodes = given.get("labels"), model.config.is_encoder_decoder
    mask_name = "decoder_attention_mask" if decodes else "attention_mask"
    mask = given.get(mask_name)
    per_token = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    if decodes and mask is None and per_token and mask_name in names and type(model).__name__.endswith(_PER_TOKEN):
        keep = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0  # up to the last label that is not ignored
        ids = None if bool(keep.all()) else _decoder_ids(model, given, labels)
        if ids is not None:
            mask = keep.long()
            changes |= {mask_name: mask, "decoder_input_ids": ids}
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return changes
    keep = mask.bool()
    if bool(keep.all()):
        return changes
    shifts = _shifts_labels(model)
    if per_token and labels.shape == keep.shape:
        if _reads_padding(labels != IGNORED, keep, shifts):
            call.hold_back(READS_PADDING)
            return {}
    elif labels is not None:
        return changes
    head = _head(model)
    others = [value for name, value in given.items() if name not in names]
    if head is None or given.get("logits_to_keep") or (labels is not None and shifts is None):
        return changes
    if any(isinstance(value, Tensor) and value.dim() > 1 for value in others):
        return changes
    call.head = call.packing(keep, *keep.shape, keep.device, causal=None)
    if call.head is not None and labels is not None:
        tokens = take(labels, call.head)
        if shifts:  # the last token of a sequence must not predict the first token of the next sequence
            starts = call.head.cu_seqlens[:-1].long()
            tokens = tokens.index_fill(0, starts[starts < tokens.shape[0]], IGNORED)
        changes["labels"] = tokens.unsqueeze(0)
    return changes


def _reads_padding(counted: Tensor, keep: Tensor, shifts: bool | None) -> bool:
    """Labels that are not ignored but are at padding, or are predicted at padding: bool (B, L)."""
    at, after = counted & ~keep, counted[:, 1:] & ~keep[:, :-1]
    if shifts is False:
        return bool(at.any())
    return bool(at[:, 1:].any() or after.any()) or (shifts is None and bool(at.any()))


def _decoder_ids(model: nn.Module, given: dict[str, Any], labels: Tensor) -> Tensor | None:
    """Ids that a decoder reads, given or made from the labels; None if it does not read ids in one pass."""
    if given.get("decoder_inputs_embeds") is not None or given.get("past_key_values") is not None:
        return None
    if given.get("decoder_input_ids") is not None:
        return given["decoder_input_ids"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
    shift = inspect.unwrap(type(model).forward).__globals__.get("shift_tokens_right")
    config = model.config
    return None if shift is None else shift(labels, config.pad_token_id, config.decoder_start_token_id)


def _head(model: nn.Module) -> nn.Module | None:
    """Output layer of a model, if it can run on tokens."""
    head = output_layer(model)
    if head is None or not isinstance(head, Packed) or head.__dict__.get(CALLED) is False:
        return None
    return head if type(head).made_by[0] == HEAD else None


def output_layer(model: nn.Module) -> nn.Module | None:
    """Layer that makes the logits of each position, if it is linear."""
    if not type(model).__name__.endswith(_PER_TOKEN):
        return None
    head = model.get_output_embeddings()  # type: ignore[operator]
    return head if isinstance(head, nn.Linear) else None


def _shifts_labels(model: nn.Module) -> bool | None:
    """Return True if a loss compares the logits of a position with the label of the next position; None if unknown."""
    if type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification")):
        return False
    used = _names_of_forward(type(model).forward)
    losses = sys.modules["transformers.loss.loss_utils"]
    if "loss_function" in used:
        known = {losses.ForCausalLMLoss: True, losses.ForMaskedLMLoss: False, losses.ForTokenClassification: False}
        return known.get(model.loss_function)
    return False if "CrossEntropyLoss" in used and not any(name.startswith("shift") for name in used) else None


@functools.cache
def _names_of_forward(forward: Forward) -> frozenset[str]:
    """Names of globals, attributes and local variables that a method uses, without functions."""
    code = inspect.unwrap(forward).__code__
    return frozenset(name for name in (*code.co_names, *code.co_varnames) if not name.endswith("_right"))


def _with_padding(result: Any, packing: Packing) -> Any:
    """Pad the logits in a model's output, (1, T, V) -> (B, L, V), with zeros."""
    if isinstance(result, dict):
        result["logits"] = unpack(result["logits"].squeeze(0), packing)
        return result
    values, shape = list(result), (1, packing.total)
    place = next(n for n, value in enumerate(values) if isinstance(value, Tensor) and value.shape[:2] == shape)
    values[place] = unpack(values[place].squeeze(0), packing)
    return tuple(values)
