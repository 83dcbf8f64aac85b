"""Models of transformers around stacks that compute tokens alone: which calls may, output layers and losses.

The output layer and the loss of a model that predicts tokens run on tokens too. The logits that such a model returns
are 0 at padding.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.padded_calls import GAPS, NO_SOURCE, StaysPaddedError, padded_calls
from ..masks.packing import Packing, packings_of, take
from . import supported
from .blocks import Fast
from .door import CACHED, Call, Stack, current, entered, has_cache
from .logits import TokenLogits, TokensHead, held_logits, padded_logits
from .tokens import PACKING, with_note

READS_PADDING = "the loss reads padding: labels at padding, or after it, are not all -100"
UNKNOWN_LOSS = "the loss is not transformers' own; it may read padding"
READS = "the model's head reads a position that is padding"
IGNORED = -100
"""Label that the losses of transformers ignore."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Head of the models in some tables of transformers.

    Attributes:
        tables: names of the tables, ``MODEL_FOR_..._MAPPING_NAMES``; "" is that of models without a head.
        on_tokens: True if the output layer and the loss may run on tokens alone.
        shifts: True if the loss compares the logits of a position with the label of the next position.
        labels_per_token: True if there is one label for each position.
        one_position: True if the head reads one position of a row, the first or the last; others read each by itself.
    """

    tables: tuple[str, ...]
    on_tokens: bool = False
    shifts: bool = False
    labels_per_token: bool = False
    one_position: bool = False


ROW = Head(("SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION"), one_position=True)
HEADS = (
    Head(("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM"), on_tokens=True, labels_per_token=True),
    Head(("CAUSAL_LM",), on_tokens=True, shifts=True, labels_per_token=True),
    Head(("TOKEN_CLASSIFICATION",), labels_per_token=True),
    ROW,
    Head(("QUESTION_ANSWERING",)),
    Head(("TEXT_ENCODING", "")),
    Head(("PRETRAINING",), one_position=True),
)
"""Heads in the order of the search. A new one is a line here, and one in docs/packed.md; the tests take both."""


@functools.cache
def listed(table: str) -> frozenset[str]:
    """Names of the classes in a table of transformers; "" is the table of models without a head."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    found = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES", {})
    return frozenset(name for names in found.values() for name in ((names,) if isinstance(names, str) else names))


@functools.cache
def head_of(name: str) -> Head | None:
    """Head of a class of transformers; None for classes in none of the tables."""
    head = next((head for head in HEADS if any(name in listed(table) for table in head.tables)), None)
    return dataclasses.replace(head, shifts=False) if head and name in supported.NOT_SHIFTED else head


class HeadModel(Fast):
    """A model around stacks: it decides for them which calls keep their padding."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        inner = current() is not None or torch.compiler.is_compiling()
        if inner or len(args) > len(self._former.names):
            return None
        given, call = dict(zip(self._former.names, args)) | kwargs, Call(padded_calls(self))
        changes: dict[str, Any] = {}
        call.look_into(self)
        if not call.reason:
            if self._needs_no_cache(given):
                changes["use_cache"] = False
            if reason := self._obstacle(given):
                call.keep_padding(reason)
            else:
                changes |= self._changes(given, call)
        with entered(call):
            try:
                result = self._former.forward(self, **given | changes)
            except StaysPaddedError as reason:  # of a stack whose tokens the output layer waits for
                call.keep_padding(str(reason))
                changes = {"use_cache": False} if "use_cache" in changes else {}
                result = self._former.forward(self, **given | changes)
        return result if call.head is None else _with_padding(result, call.head, given.get("attention_mask"))

    def _needs_no_cache(self, given: dict[str, Any]) -> bool:
        """Return True for a call that leaves the cache to the model and has a loss; in evaluation without labels the
        config decides, as in the plain model."""
        is_open = "use_cache" in self._former.names and given.get("use_cache") is None and not has_cache(given)
        return is_open and (self.training or any(given.get(name) is not None for name in ("labels", "start_positions")))

    def _obstacle(self, given: dict[str, Any]) -> str:
        """Reason why a whole call keeps its padding, or ""."""
        name, config, positions = type(self).__name__, self.config, given.get("start_positions")
        if has_cache(given):  # the mask then has the length of the cache too
            return CACHED
        if given.get("labels") is not None and not self._has_own_loss():
            return UNKNOWN_LOSS
        if positions is not None:
            return f"the loss of {name} reads all positions, padding included"
        decodes = config.is_encoder_decoder and "decoder_input_ids" in self._former.names
        if self._former.head.labels_per_token and not self._former.head.on_tokens and decodes:
            return f"the head of {name} reads positions of the decoder"
        if not self._former.head.one_position:
            return ""
        if getattr(config, "summary_type", "first") not in ("first", "cls_index"):
            return f"the head of {name} is unknown; it may read padding"
        if config.is_encoder_decoder and given.get("decoder_attention_mask") is not None:
            return f"the head of {name} reads one position of the decoder"
        return ""

    def _has_own_loss(self) -> bool:
        """Return True unless somebody gave the model another loss function."""
        if self.config.is_encoder_decoder and "_loss_function" not in self.__dict__:  # it computes cross entropy itself
            return True
        losses, head = sys.modules["transformers.loss.loss_utils"], self._former.head
        if head.on_tokens and head.shifts:
            return self.loss_function is losses.ForCausalLMLoss
        if head.on_tokens and type(self).__name__ not in supported.NOT_SHIFTED:
            return self.loss_function is losses.ForMaskedLMLoss
        known = (function for name, function in vars(losses).items() if name.endswith(("Loss", "Classification")))
        return self.loss_function in known

    def _reads(self, given: dict[str, Any], keep: Tensor) -> Tensor | None:
        """Bool (), True if the position that the head reads is a token in each row; None if it reads none."""
        pools = getattr(self, "pooler", None) is not None
        if not (self._former.head.one_position or pools) or self.config.is_encoder_decoder:
            return None
        if pools or not self._former.reads_last:
            return keep[:, 0].all()
        ids = given.get("input_ids")
        last = _last_positions(ids.flatten(0, -2) if isinstance(ids, Tensor) else ids, self.config, keep)
        return keep.gather(1, last.to(keep.device)[:, None]).all()

    def _changes(self, given: dict[str, Any], call: Call) -> dict[str, Any]:
        """Changed arguments: masks that hold their packing, and those with which the output layer and the loss run on
        tokens.

        All that must be known of the masks and labels is read at once, since each read waits for a GPU. A call that
        must keep its padding is held.
        """
        labels, names, head = given.get("labels"), self._former.names, self._former.head
        decodes = "decoder_attention_mask" in names and self.config.is_encoder_decoder
        own, per_token = "decoder_attention_mask" if decodes else "attention_mask", _is_per_token(labels)
        masks = {name: given.get(name) for name in ("attention_mask", own)}
        tensors = {name: t for name, t in masks.items() if isinstance(t, Tensor) and 2 <= t.dim() <= 3}
        keeps = {name: t.flatten(0, -2).bool() for name, t in tensors.items()}
        if decodes and masks[own] is None and head.on_tokens and per_token:
            keeps[own] = (labels != IGNORED).flip(1).cumsum(1).flip(1) > 0  # up to the last label that is not ignored
        counts = per_token and own in keeps and labels.shape == keeps[own].shape
        also = [_reads_padding(labels != IGNORED, keeps[own], head.shifts)] if counts else []
        reads = self._reads(given, keeps[own]) if own in keeps else None
        packings, values = packings_of(
            ((keep, *keep.shape, keep.device) for keep in keeps.values()), also if reads is None else [*also, reads]
        )
        found = dict(zip(keeps, packings))
        if reads is not None and not values[-1]:
            call.keep_padding(READS)
            return {}
        if any(packing.has_gaps for packing in packings) and any(map(_counts_distances, self.modules())):
            call.keep_padding(GAPS)
            return {}
        if self.config.is_encoder_decoder and "attention_mask" in found and found["attention_mask"].shortest == 0:
            call.keep_padding(NO_SOURCE)
            return {}
        changes = {
            name: with_note((t if self._former.makes_masks else keeps[name]).detach(), PACKING, found[name])
            for name, t in masks.items()
            if name in keeps and t is not None and t.dim() == 2
        }
        if own in keeps and masks[own] is None:
            ids = None if found[own].is_full else self._decoder_ids(given, labels)
            if ids is None:
                return changes
            changes |= {own: with_note(keeps[own].detach(), PACKING, found[own]), "decoder_input_ids": ids}
        if own not in changes or found[own].is_full or found[own].total == 0:
            return changes
        others = [value for name, value in given.items() if name not in names]
        unclear = any(isinstance(value, Tensor) and value.dim() > 1 for value in others)
        if counts and (values[0] or unclear):
            call.keep_padding(READS_PADDING)
            return {}
        if labels is not None and not counts:
            if head.labels_per_token:
                call.keep_padding(READS_PADDING)
            return changes
        kept = given.get("logits_to_keep")
        if not self.runs_on_tokens() or not (kept is None or (type(kept) is int and kept == 0)) or unclear:
            return changes
        call.head = found[own]
        if labels is not None:
            tokens = take(labels, call.head)
            if head.shifts:  # the last token of a sequence must not predict the first token of the next one
                starts = call.head.cu_seqlens[:-1].long()  # that of empty sequences at the end is T
                tokens = nn.functional.pad(tokens, (0, 1)).index_fill(0, starts, IGNORED)[:-1]
            changes["labels"] = tokens.unsqueeze(0)
        return changes

    def _decoder_ids(self, given: dict[str, Any], labels: Tensor) -> Tensor | None:
        """Ids that a decoder reads, given or made from the labels; None if it does not read ids in one pass."""
        if given.get("decoder_inputs_embeds") is not None:
            return None
        if given.get("decoder_input_ids") is not None:
            return given["decoder_input_ids"]
        if hasattr(self, "prepare_decoder_input_ids_from_labels"):
            return self.prepare_decoder_input_ids_from_labels(labels)
        shift = getattr(sys.modules[self._former.kind.__module__], "shift_tokens_right", None)
        return None if shift is None else shift(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    def runs_on_tokens(self) -> bool:
        """Return True if the output layer runs on tokens. With ``fused_loss`` it skips its logits instead."""
        head = output_layer(self) if self._former.head.on_tokens else None
        return isinstance(head, TokensHead) and not (self.training and head.skips_logits)


def logits_of_tokens(logits: Tensor) -> Tensor:
    """Logits (1, T, V) of an output layer, from which padded logits are made when the call ends."""
    call = None if torch.compiler.is_compiling() else current()
    requested = call is not None and call.head is not None and logits.requires_grad
    return TokenLogits.of(logits, call.head) if requested else logits  # type: ignore[union-attr]


def _counts_distances(module: nn.Module) -> bool:
    return isinstance(module, Stack) and module.counts_distances()


def output_layer(model: Any) -> nn.Module | None:
    """Layer that makes the logits of each position, if it is linear."""
    try:
        head = model.get_output_embeddings()
    except Exception:  # models without an output layer raise different errors
        return None
    return head if isinstance(head, nn.Linear) else None


def _last_positions(ids: Any, config: Any, mask: Tensor) -> Tensor:
    """Last position per row whose id is not the padding id, int64 (B,)."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    pad = getattr(config, "pad_token_id", None)
    if pad is None or not isinstance(ids, Tensor) or ids.shape != mask.shape:
        return positions[-1:].expand(mask.shape[0])
    return (positions * (ids != pad)).amax(1)


def _is_per_token(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def _reads_padding(counted: Tensor, keep: Tensor, shifts: bool) -> Tensor:
    """Bool (), True if labels (B, L) that are not ignored are at padding, or are predicted at padding."""
    at = (counted & ~keep).any()
    return (counted & ~keep)[:, 1:].any() | (counted[:, 1:] & ~keep[:, :-1]).any() if shifts else at


def _with_padding(result: Any, packing: Packing, mask: Any) -> Any:
    """Pad the logits in a model's output, (1, T, V) -> (B, L, V), with zeros."""
    if isinstance(result, dict):
        held = held_logits(result["logits"], packing, mask)
        result["logits"] = padded_logits(result["logits"], packing) if held is None else held
        return result
    values, shape = list(result), (1, packing.total)
    place = next(n for n, value in enumerate(values) if isinstance(value, Tensor) and value.shape[:2] == shape)
    values[place] = padded_logits(values[place], packing)
    return tuple(values)
