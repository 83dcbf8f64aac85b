"""Models of transformers that skip padding: arguments, output layer and loss.

Each layer packs its own inputs (see layer.py). The model runs its output layer and its loss on tokens too, and decides
which calls must keep their padding.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.unpadded import Unpadded, current, known
from ...layers.padded_calls import NO_SOURCE, PaddedCalls, padded_calls
from ...masks.packing import Packing, take, unpack
from ...tensors import takes_fused_ops
from ...tracing import is_traced
from ..output_layer import OutputLayer
from .classes import Arguments, Forward, argument_names, part, positional_names
from .layer import CACHED, has_cache
from .logits import TokenLogits, padded_logits
from .origin import bare, made_by, names_of_forward
from .watch import WATCH, Watch, is_packed

MODEL, HEAD = "model", "head"
"""Names of these parts."""

READS_PADDING = "the loss reads padding: labels at padding, or after it, are not all -100"
UNKNOWN_LOSS = "the loss is not transformers' own; it may read padding"
ROUTERS = "the logits of routers are requested (output_router_logits)"
"""Reasons why a call keeps its padding."""

IGNORED = -100
"""Label that the losses of transformers ignore."""


@part(HEAD)
def head_forward(base: type[nn.Module]) -> Forward:
    """Make the ``forward`` of an output layer: on tokens alone if the model of the running call is packed."""

    def forward(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = None if torch.compiler.is_compiling() else current()
        if call is None or call.head is None or hidden.shape[:2] != (call.head.batch, call.head.length):
            return base.forward(self, hidden, *args, **kwargs)
        call.head_was_called = True
        logits = base.forward(self, take(hidden, call.head).unsqueeze(0), *args, **kwargs)
        if not call.packs_logits:
            return unpack(logits.squeeze(0), call.head)
        return TokenLogits.of(logits, call.head) if logits.requires_grad else logits

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
        outer, watch = current(), self.__dict__[WATCH]
        call = Unpadded(padded_calls(self) or PaddedCalls()) if outer is None else outer
        if outer is None and (reason := watch.obstacle(self)):
            call.hold_back(reason)
            call.is_plain = True
        changes: dict[str, Any] = {}
        # A loss needs no cache. Without labels, in evaluation, the config decides, as in the plain model.
        open_ = given.get("use_cache") is None and not has_cache(given) and (self.training or _has_labels(given))
        if "use_cache" in names and open_ and not call.is_plain:
            changes["use_cache"] = False
        if outer is None and not call.is_plain:
            if reason := _obstacle(self, watch, given, names, call):
                call.hold_back(reason)
            else:
                changes |= _changes(self, watch, given, names, call)
        args, kwargs = arguments.replaced(changes)
        if outer is not None:  # a submodel of the model that was called
            return base.forward(self, *args, **kwargs)
        with call.entered():
            result = base.forward(self, *args, **kwargs)
        if call.head is not None:
            watch.calls_head = call.head_was_called
        return _with_padding(result, call.head) if call.packs_logits else result

    return forward


def _obstacle(model: nn.Module, watch: Watch, given: dict[str, Any], names: frozenset[str], call: Unpadded) -> str:
    """Reason why a whole call keeps its padding, or "". Also sets which positions of the output are read."""
    name = type(model).__name__
    config = model.config
    mask, ids, positions = given.get("attention_mask"), given.get("input_ids"), given.get("start_positions")
    padded = isinstance(mask, Tensor) and 2 <= mask.dim() <= 3
    routers = given.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if routers is None else routers:
        return ROUTERS
    if has_cache(given):  # the mask then has the length of the cache too
        return CACHED
    if (given.get("labels") is not None or positions is not None) and _loss(model) is None:
        return UNKNOWN_LOSS
    if positions is not None:
        return f"the loss of {name} reads all positions, padding included"
    decodes = config.is_encoder_decoder and "decoder_input_ids" in names
    if watch.head.labels_per_token and not watch.head.on_tokens and decodes:
        return f"the head of {name} reads positions of the decoder"
    if not watch.head.one_position:
        return ""
    if getattr(config, "summary_type", "first") not in ("first", "cls_index"):
        return f"the head of {name} is unknown; it may read padding"
    if config.is_encoder_decoder:
        given_mask = given.get("decoder_attention_mask") is not None
        return f"the head of {name} reads one position of the decoder" if given_mask else ""
    if padded:
        rows = mask.flatten(0, -2)
        call.read = _last_positions(ids.flatten(0, -2) if isinstance(ids, Tensor) else ids, config, rows)
    return ""


def _last_positions(ids: Any, config: Any, mask: Tensor) -> Tensor:
    """Last position per row whose id is not the padding id, int64 (B,)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    pad = getattr(config, "pad_token_id", None)
    if pad is None or not isinstance(ids, Tensor) or ids.shape != mask.shape:
        return positions[-1:].expand(mask.shape[0])
    return (positions * (ids != pad)).amax(1)


def _changes(
    model: nn.Module, watch: Watch, given: dict[str, Any], names: frozenset[str], call: Unpadded
) -> dict[str, Any]:
    """Changed arguments: masks that are known, and those with which the output layer and the loss run on tokens.

    All that must be known of the masks and labels is read at once, since each read waits for a GPU. A call that must
    keep its padding is held back.
    """
    labels, decodes = given.get("labels"), "decoder_attention_mask" in names and model.config.is_encoder_decoder
    own, per_token = "decoder_attention_mask" if decodes else "attention_mask", _is_per_token(labels)
    masks = {name: given.get(name) for name in ("attention_mask", own)}
    keeps = {name: t.flatten(0, -2).bool() for name, t in masks.items() if isinstance(t, Tensor) and 2 <= t.dim() <= 3}
    is_causal = getattr(getattr(model.config, "decoder", None), "is_decoder", True)
    if decodes and masks[own] is None and watch.head.on_tokens and per_token and is_causal:
        keeps[own] = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0  # up to the last label that is not ignored
    shifts = None if labels is None else _shifts_labels(model)
    counts = per_token and own in keeps and labels.shape == keeps[own].shape
    packings, reads = call.look_at(
        keeps.values(), [_reads_padding(labels != IGNORED, keeps[own], shifts)] if counts else []
    )
    found = dict(zip(keeps, packings))
    if model.config.is_encoder_decoder and "attention_mask" in found and found["attention_mask"].shortest == 0:
        call.hold_back(NO_SOURCE)
        return {}
    changes = {name: known(t, keeps[name]) for name, t in masks.items() if name in keeps and t is not None}
    if own in keeps and masks[own] is None:
        ids = None if found[own].is_full else _decoder_ids(model, given, labels)
        if ids is None:
            return changes
        changes |= {own: known(keeps[own].long(), keeps[own]), "decoder_input_ids": ids}
    if own not in changes or changes[own].dim() != 2 or found[own].is_full:
        return changes
    others = [value for name, value in given.items() if name not in names]
    unclear = any(isinstance(value, Tensor) and value.dim() > 1 for value in others)
    if counts and (reads[0] or unclear):
        call.hold_back(READS_PADDING)
        return {}
    if labels is not None and not counts:
        if watch.head.labels_per_token:
            call.hold_back(READS_PADDING)
        return changes
    if not _runs_on_tokens(model, watch) or given.get("logits_to_keep") or unclear:
        return changes
    call.head = call.packing(keeps[own], *keeps[own].shape, keeps[own].device, causal=None)
    call.packs_logits = call.head is not None and bool(watch.calls_head) and (labels is None or shifts is not None)
    if call.packs_logits and labels is not None:
        tokens = take(labels, call.head)
        if shifts:  # the last token of a sequence must not predict the first token of the next sequence
            starts = call.head.cu_seqlens[:-1].long()  # that of empty sequences at the end is T
            tokens = nn.functional.pad(tokens, (0, 1)).index_fill(0, starts, IGNORED)[:-1]
        changes["labels"] = tokens.unsqueeze(0)
    return changes


def _has_labels(given: dict[str, Any]) -> bool:
    return any(given.get(name) is not None for name in ("labels", "start_positions"))


def _is_per_token(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _reads_padding(counted: Tensor, keep: Tensor, shifts: bool | None) -> Tensor:
    """Bool (), True if labels (B, L) that are not ignored are at padding, or are predicted at padding."""
    at, after = counted & ~keep, counted[:, 1:] & ~keep[:, :-1]
    if shifts is False:
        return at.any()
    return (at if shifts is None else at[:, 1:]).any() | after.any()


def _decoder_ids(model: nn.Module, given: dict[str, Any], labels: Tensor) -> Tensor | None:
    """Ids that a decoder reads, given or made from the labels; None if it does not read ids in one pass."""
    if given.get("decoder_inputs_embeds") is not None or has_cache(given):
        return None
    if given.get("decoder_input_ids") is not None:
        return given["decoder_input_ids"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
    shift = inspect.unwrap(type(model).forward).__globals__.get("shift_tokens_right")
    config = model.config
    return None if shift is None else shift(labels, config.pad_token_id, config.decoder_start_token_id)


def _runs_on_tokens(model: nn.Module, watch: Watch) -> bool:
    """Return True if the output layer of a model runs on tokens. With ``fused_loss`` it skips its logits instead."""
    head = output_layer(model) if watch.head.on_tokens and watch.calls_head is not False else None
    return head is not None and is_packed(head, HEAD) and not (model.training and isinstance(head, OutputLayer))


def output_layer(model: nn.Module) -> nn.Module | None:
    """Layer that makes the logits of each position, if it is linear."""
    try:
        head = model.get_output_embeddings()  # type: ignore[operator]
    except Exception:  # models without an output layer raise different errors
        return None
    return head if isinstance(head, nn.Linear) else None


def _loss(model: nn.Module) -> Any:
    """Loss function of a model, one of transformers' or torch's class; None for another one."""
    kind = bare(type(model))
    used = names_of_forward(kind)  # transformers' own code
    if "loss_function" not in used:
        return nn.CrossEntropyLoss if "CrossEntropyLoss" in used | made_by(kind) else None
    losses = sys.modules["transformers.loss.loss_utils"]
    return next((loss for name in _LOSSES if model.loss_function is (loss := getattr(losses, name))), None)


_LOSSES = {
    "ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False,
    "ForSequenceClassificationLoss": None, "ForQuestionAnsweringLoss": None,
}  # fmt: skip
"""Losses of transformers; True if one compares the logits of a position with the label of the next position."""


def _shifts_labels(model: nn.Module) -> bool | None:
    """Return True if a loss compares the logits of a position with the label of the next position; None if unknown."""
    loss = _loss(model)
    if loss is not nn.CrossEntropyLoss:
        return _LOSSES[loss.__name__]
    used = names_of_forward(bare(type(model)))
    return None if any(name.startswith("shift") and not name.endswith("_right") for name in used) else False


def _with_padding(result: Any, packing: Packing) -> Any:
    """Pad the logits in a model's output, (1, T, V) -> (B, L, V), with zeros."""
    if isinstance(result, dict):
        result["logits"] = padded_logits(result["logits"], packing)
        return result
    values, shape = list(result), (1, packing.total)
    place = next(n for n, value in enumerate(values) if isinstance(value, Tensor) and value.shape[:2] == shape)
    values[place] = padded_logits(values[place], packing)
    return tuple(values)
