"""``Stack``: layers of transformers behind a door, at which padding leaves, and at whose end it comes back.

Inside, the batch is one row of tokens (1, T, d) without a mask. Each layer gets the boundaries of the sequences as a
keyword argument, which it passes on to its attention. A stack that must keep its padding runs as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..layers.padded_calls import GAPS, NO_TOKEN, PaddedCalls, StaysPaddedError, padded_calls, record
from ..layers.padder import Padder, check_reads
from ..masks.packing import Packing, packing_of, take, unpack
from ..tensors import usual_tensors
from .attention import weights_are_captured
from .blocks import Fast
from .inside import is_plain_inside, obstacle_inside
from .interface import is_ours
from .masks import LazyMask
from .tokens import BOUNDARIES, Boundaries, Flat, entered_flat, noted, packing_at, with_note

CACHES = ("cache", "past_key_values")
CACHED = "keys and values are cached (use_cache, past_key_values)"
STATES = "hidden states of the layers are requested (output_hidden_states)"
WEIGHTS = "attention weights are requested (output_attentions)"
DENSE = "its mask is a tensor, not padding or look-ahead"


class Call:
    """One call of a model.

    Attributes:
        reason: reason why the whole call keeps its padding, or "".
        head: packing of the hidden states that stay tokens for the output layer; None if the output layer is padded.
        is_plain: True if no module inside need be called.
    """

    def __init__(self, calls: PaddedCalls | None) -> None:
        self._calls = calls or PaddedCalls()
        self._noted: set[str] = set()
        self.reason = ""
        self.head: Packing | None = None
        self.is_plain = False

    def add(self, reason: str) -> None:
        """Count a reason to keep the padding, once per call."""
        if reason not in self._noted:
            self._noted.add(reason)
            self._calls.add(reason)

    def look_into(self, module: Any) -> None:
        """Look at the modules inside of a stack or of a model, and keep the padding of the call for what is not
        known."""
        self.is_plain = is_plain_inside(module)
        if not self.is_plain and (reason := obstacle_inside(module)):
            self.keep_padding(reason)

    def keep_padding(self, reason: str) -> None:
        """Keep the padding of the whole call."""
        self.reason, self.head = reason, None
        self.add(reason)


_call: ContextVar[Call | None] = ContextVar("call", default=None)


def current() -> Call | None:
    """Call of the model that runs in this thread."""
    return _call.get()


@contextlib.contextmanager
def entered(call: Call) -> Iterator[None]:
    """Make this the current call of this thread."""
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


class Stack(Fast):
    """Layers behind a door. Subclasses say which inputs have one value for each position."""

    inputs: tuple[str, ...] = ("hidden_states",)
    unread: tuple[str, ...] = ()
    """Arguments that are passed on to the layers, which do not read them."""
    makes_masks = False
    """True for a stack that gets padding masks (B, L), and makes its masks of them."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or len(args) > len(self._former.names):
            return None
        call = current()
        if call is None:
            call = Call(padded_calls(self))
            call.look_into(self)
        given = dict(zip(self._former.names, args)) | kwargs
        x = next((t for t in map(given.get, self.inputs) if isinstance(t, Tensor)), None)
        if x is None:
            return None
        if call.reason:
            record(self, x.shape[0] * x.shape[1], None, call.reason)
            return None
        memory = given.get("encoder_hidden_states")
        before = None if memory is None else noted(memory, LEFT)
        if given.get("encoder_attention_mask") is None:
            check_reads(self, before, None)
        try:
            boundaries = self._boundaries(given, x, call.is_plain)
            if boundaries is None:
                return None
            own, changes = boundaries.own, self._changes(given, boundaries)
            with entered_flat(Flat(given, own)):
                result = self._former.forward(self, **given | changes)
        except StaysPaddedError as reason:
            if call.head is not None:
                raise
            call.add(str(reason))
            record(self, x.shape[0] * x.shape[1], None, str(reason))
            return None
        record(self, own.batch * own.length, own)
        return result if call.head is own else _restored(result, own)

    def _boundaries(self, given: dict[str, Any], x: Tensor, is_plain: bool) -> Boundaries | None:
        """Sequences of a call; None if there is no padding.

        Raises:
            StaysPaddedError: if the call must keep its padding.
        """
        batch, length = x.shape[:2]
        own = self._packing(given.get("attention_mask"), batch, length, x.device, self.config_is_causal())
        memory, source = given.get("encoder_hidden_states"), None
        if memory is not None:
            source = self._packing(given.get("encoder_attention_mask"), batch, memory.shape[1], x.device, False)
            check_reads(self, noted(memory, LEFT), source)
        padder = Padder(own, source)
        if not padder.pays:
            return None
        if own.total == 0 or (source is not None and source.total == 0):
            raise StaysPaddedError(NO_TOKEN)
        if self.counts_distances() and (own.has_gaps or (source is not None and source.has_gaps)):
            raise StaysPaddedError(GAPS)
        if source is not None or getattr(self.settings, "is_encoder_decoder", False):
            padder.check_sources()
        self._check(given)
        if source is not None and not all(own.is_causal and not cross.is_causal for own, cross in self.attentions()):
            raise StaysPaddedError("a layer of the decoder is not causal")
        return Boundaries(own, source, self.config_is_causal(), is_plain)

    def attentions(self) -> Iterator[tuple[Any, Any]]:
        """Attention to the own tokens and to the source, of each layer of a decoder."""
        raise StaysPaddedError("its attention to an encoder is not known")

    def _packing(self, mask: Any, batch: int, length: int, device: torch.device, is_causal: bool) -> Packing:
        if mask is None:
            return _full(batch, length, device)
        if isinstance(mask, LazyMask):
            if not mask.is_padding(is_causal):
                raise StaysPaddedError(DENSE)
            return _full(batch, length, device) if mask.keep is None else packing_at(mask.keep)
        if not self.makes_masks or not isinstance(mask, Tensor) or tuple(mask.shape) != (batch, length):
            raise StaysPaddedError(DENSE)
        return packing_at(mask)

    @property
    def settings(self) -> Any:
        """Config of the layers."""
        return self.config

    def _check(self, given: dict[str, Any]) -> None:
        config = self.settings
        if not is_ours(config._attn_implementation):
            raise StaysPaddedError("its attention is not fused")
        if given.get("is_causal") is not None or (self.config_is_causal() and not getattr(config, "is_causal", True)):
            raise StaysPaddedError("is_causal says what its tokens see")
        if has_cache(given) or self.makes_cache(given):
            raise StaysPaddedError(CACHED)
        if _requested("output_attentions", given, config) or weights_are_captured():
            raise StaysPaddedError(WEIGHTS)
        if _requested("output_hidden_states", given, config) or weights_are_captured("hidden_states"):
            raise StaysPaddedError(STATES)
        known = _KNOWN.union(self.inputs, self.unread)
        for name, value in given.items():
            if name not in known and _holds_tensors(value):
                raise StaysPaddedError(f"it is given {name}, whose layout is unknown")

    def _changes(self, given: dict[str, Any], boundaries: Boundaries) -> dict[str, Any]:
        """Changed arguments, without padding."""
        changes: dict[str, Any] = {BOUNDARIES: boundaries}
        for name in self.inputs:
            if (value := given.get(name)) is not None:
                changes[name] = at_tokens(name, value, boundaries.own)
        if boundaries.source is not None:
            changes["encoder_hidden_states"] = take(given["encoder_hidden_states"], boundaries.source).unsqueeze(0)
        return changes | {name: None for name in (*_MASKS, *self.unread) if name in given}

    def config_is_causal(self) -> bool:
        """Return True if a query sees no later keys."""
        return bool(getattr(self.settings, "is_decoder", False))

    def counts_distances(self) -> bool:
        """Return True if attention counts the distance between tokens, which padding between them changes."""
        return False

    def makes_cache(self, given: dict[str, Any]) -> bool:
        """Return True if a call returns a cache."""
        return False


_MASKS = ("attention_mask", "encoder_attention_mask")
_KNOWN = {*_MASKS, "encoder_hidden_states", "position_ids", *CACHES}


def has_cache(given: dict[str, Any]) -> bool:
    """Return True for a call that is given a cache."""
    return any(given.get(name) is not None for name in CACHES)


def at_tokens(name: str, value: Any, packing: Packing) -> Tensor:
    """Values (1 or B, L, ...) at the tokens, (1, T, ...)."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != packing.length:
        raise StaysPaddedError(f"it is given {name} that is no tensor (B, L, ...)")
    if value.shape[0] == 1:
        return value[0].index_select(0, packing.positions).unsqueeze(0)
    if value.shape[0] != packing.batch:
        raise StaysPaddedError(f"it is given {name} of another batch size")
    return take(value, packing).unsqueeze(0)


def _full(batch: int, length: int, device: torch.device) -> Packing:
    return packing_of(None, batch, length, device)


def _requested(name: str, given: dict[str, Any], config: Any) -> bool:
    value = given.get(name)
    return bool(getattr(config, name, False) if value is None else value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_tensors, value))


LEFT = "_transformer_fast_left"
"""Attribute of hidden states (B, L, d) that holds the packing of the tokens: all else was left out, and is 0."""


def _restored(result: Any, packing: Packing) -> Any:
    """Result of a stack with padding: its first value (1, T, d) -> (B, L, d)."""
    name = 0 if isinstance(result, tuple) else "last_hidden_state"
    with usual_tensors():  # which count writes
        padded = with_note(unpack(result[name].squeeze(0), packing), LEFT, packing)
    if isinstance(result, tuple):
        return padded, *result[1:]
    result[name] = padded
    return result
