"""Calls whose batch is one row of tokens: the sequences, for the attention of every layer, and packings of masks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from ..masks.packing import Packing, packing_of
from .flattened import mask_within

BOUNDARIES = "boundaries"
"""Keyword argument of the layers that holds the :class:`Boundaries`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Boundaries:
    """Sequences of the tokens of a stack.

    Attributes:
        own: packing of the hidden states.
        source: packing of the encoder's outputs; None for a stack that does not attend to any.
        is_causal: True if a token sees no later tokens of its own sequence.
        is_plain: True if no module inside need be called, as :func:`~.huggingface.inside.is_plain_inside` has found.
    """

    own: Packing
    source: Packing | None
    is_causal: bool
    is_plain: bool

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: AttentionMask | None = None,
        *,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention (1, Tq, H, D) of the tokens of each sequence to those of the same sequence.

        Args:
            module: the layer. One whose ``is_causal`` is False, in a stack with a source, attends to the source.
            query, key, value: (1, H, Tq, D) and (1, Hkv, Tk, D).
            bias: relative positions, as a part of a mask; None for none.
            sliding_window: number of keys up to that of the query, and as many after it if not causal; None for all.
            options: those of :func:`transformer_fast.attention_packed`.
        """
        q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
        keys = self.own if self.source is None or module.is_causal else self.source
        return self.among_tokens(q, k, v, keys, bias, sliding_window, **options).unsqueeze(0)

    def among_tokens(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Packing,
        bias: AttentionMask | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> Tensor:
        """:meth:`attend` for query (Tq, H, D), and key and value (Tk, Hkv, D) of a packing; the result is
        (Tq, H, D)."""
        mask = mask_within(self.is_causal and keys is self.own, sliding_window)
        if bias is not None:
            mask = bias if mask is None else bias & mask
        lengths = {"max_q": self.own.max_length, "max_k": keys.max_length}
        starts = self.own.cu_seqlens, keys.cu_seqlens
        return ops.attention_packed(query, key, value, *starts, mask=mask, **lengths, **options)


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A stack that computes tokens alone, while it runs.

    Attributes:
        given: arguments of its call, with padding.
        own: packing of its tokens.
    """

    given: dict[str, Any]
    own: Packing


_flat: ContextVar[Flat | None] = ContextVar("flat", default=None)


def flat() -> Flat | None:
    """Stack of this thread that computes tokens alone, whose masks are in the boundaries; None outside of one."""
    return _flat.get()


@contextlib.contextmanager
def entered_flat(stack: Flat) -> Iterator[None]:
    """Make this the stack of this thread."""
    token = _flat.set(stack)
    try:
        yield
    finally:
        _flat.reset(token)


PACKING = "_transformer_fast_packing"
"""Attribute of a mask (B, L): its :class:`Packing`, and the version of the mask."""


def with_packing(keep: Tensor, packing: Packing) -> Tensor:
    """Give a mask (B, L) its packing."""
    setattr(keep, PACKING, (packing, version_of(keep)))
    return keep


def version_of(t: Tensor) -> int | None:
    """Counter of writes to a tensor; None for a tensor of inference mode, which has none."""
    return None if t.is_inference() else t._version


def _held(keep: Tensor) -> Packing | None:
    held: Any = getattr(keep, PACKING, None)
    return held[0] if held is not None and held[1] == version_of(keep) else None


def packing_at(keep: Tensor) -> Packing:
    """Packing of a mask (B, L), 0 at padding: the one that the mask holds, unless the mask was written to since."""
    if (held := _held(keep)) is not None:
        return held
    return packing_of(keep if keep.dtype == torch.bool else keep.bool(), *keep.shape, keep.device)


def is_full(keep: Tensor) -> bool:
    """Return True for a mask (B, L) without padding."""
    held = _held(keep)
    return bool(keep.all()) if held is None else held.is_full
