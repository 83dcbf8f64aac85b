"""Calls whose batch is one row of tokens: the sequences, for the attention of every layer, and packings of masks.

A user gives such rows as transformers' ``DataCollatorWithFlattening`` makes them: ``cu_seq_lens_q`` says where the
sequences begin, as it tells FlashAttention. Positions alone tell nothing here; those of a decoder, transformers itself
reads. A stack of ``packed=True`` makes such a row of a batch with padding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..masks import AttentionMask
from ..masks.arguments import parts_beside
from ..masks.packing import Packing, packing_of
from ..tensor_cache import NOT_SAVED

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
        lengths = {"max_seqlen_q": self.own.max_length, "max_seqlen_k": keys.max_length}
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
"""Attribute of a mask (B, L) that holds its :class:`Packing`."""


@dataclasses.dataclass(frozen=True)
class _Note:
    """Attribute of a tensor of this version; copies and saved tensors do not have it."""

    value: Any
    version: int | None

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[()]]:
        return NOT_SAVED


def with_note(t: Tensor, name: str, value: Any) -> Tensor:
    """Give a tensor an attribute that says what the tensor holds."""
    setattr(t, name, _Note(value, version_of(t)))
    return t


def noted(t: Tensor, name: str) -> Any:
    """The attribute that :func:`with_note` gave to a tensor; None if the tensor was written to since."""
    note: Any = getattr(t, name, None)
    return note.value if type(note) is _Note and note.version == version_of(t) else None


def version_of(t: Tensor) -> int | None:
    """Counter of writes to a tensor; None for a tensor of inference mode, which has none."""
    return None if t.is_inference() else t._version


def packing_at(keep: Tensor) -> Packing:
    """Packing of a mask (B, L), 0 at padding: the one that the mask holds, unless the mask was written to since."""
    if (held := noted(keep, PACKING)) is not None:
        return held
    return packing_of(keep if keep.dtype == torch.bool else keep.bool(), *keep.shape, keep.device)


def is_full(keep: Tensor) -> bool:
    """Return True for a mask (B, L) without padding."""
    held = noted(keep, PACKING)
    return bool(keep.all()) if held is None else held.is_full


_STARTS = "cu_seq_lens_q"
_PACKED_PARTS = "causal_offset", "window_offset", "document_ids", "distance_biases"


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Sequences of the queries and keys of one call, from the arguments of transformers' attention interface.

    Attributes:
        starts: int32 (B + 1,), the first token of each sequence and the end of the last one.
        most: length of the longest sequence; None if the caller did not say.
    """

    starts: Tensor
    most: int | None

    @staticmethod
    def of(module: nn.Module, query: Tensor, key: Tensor, given: Mapping[str, Any]) -> Bounds | None:
        """Bounds that the caller gave; None if there are none.

        Raises:
            NotImplementedError: for cross-attention, whose queries and keys belong to different sequences.
            TypeError: for bounds that are no integer tensor (B + 1,).
            ValueError: for bounds that do not fit the tokens. On a GPU the values are not read.
        """
        starts, keys = given.get(_STARTS), given.get("cu_seq_lens_k")
        if starts is None and keys is None:
            return None
        layer, config = type(module).__name__, getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise NotImplementedError(
                f"{layer}: {_STARTS} says where the sequences of one row begin, but a model with cross-attention has a "
                "row for the encoder and one for the decoder; pad the batch, and leave the padding out by "
                "accelerate(model, packed=True)"
            )
        if not isinstance(starts, Tensor) or starts.is_floating_point() or starts.dim() != 1:
            what = f"{starts.dtype} {tuple(starts.shape)}" if isinstance(starts, Tensor) else type(starts).__name__
            raise TypeError(f"{layer}: {_STARTS} must be an integer tensor (B + 1,), got {what}")
        tokens = query.shape[2]
        fits = query.shape[0] == key.shape[0] == 1 and key.shape[2] == tokens
        if starts.device.type == "cpu" and not torch.compiler.is_compiling():
            fits = fits and _rises(starts, tokens) and (keys is None or keys is starts or torch.equal(keys, starts))
        if not fits:
            raise ValueError(
                f"{layer}: {_STARTS} and cu_seq_lens_k must be equal and rise from 0 to the number of tokens of a row, "
                f"as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them; got {starts.numel()} bounds "
                f"for {query.shape[0]} rows of {tokens} tokens and {key.shape[2]} keys"
            )
        most = given.get("max_length_q")
        if isinstance(most, Tensor):
            most = None if torch.compiler.is_compiling() else int(most)
        return Bounds(starts.to(torch.int32), most)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, **options: Any) -> Tensor:
        """Attention (1, T, H, D) of each sequence to itself.

        Args:
            query, key, value: (1, H, T, D) and (1, Hkv, T, D).
            mask: parts that :func:`transformer_fast.attention_packed` takes; offsets count within each sequence.
            options: scale, softcap, sinks and others of :func:`transformer_fast.attention_packed`.
        """
        tokens = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
        lengths = {"max_seqlen_q": self.most, "max_seqlen_k": self.most}
        return ops.attention_packed(*tokens, self.starts, self.starts, mask=mask, **lengths, **options).unsqueeze(0)

    def documents(self, tokens: int) -> AttentionMask:
        """The sequences as a part of a mask."""
        places = torch.arange(tokens, device=self.starts.device, dtype=torch.int32)
        return AttentionMask.documents(torch.searchsorted(self.starts[1:].contiguous(), places, right=True)[None])


def is_packable(mask: AttentionMask) -> bool:
    """Return True if a packed batch can have this mask."""
    return not parts_beside(mask, *_PACKED_PARTS)


def _rises(starts: Tensor, end: int) -> bool:
    values = starts.tolist()
    return values[:1] == [0] and values[-1:] == [end] and values == sorted(values)


def mask_within(is_causal: bool, window: int | None) -> AttentionMask | None:
    """Mask within each sequence, as FlashAttention's arguments say it: look-ahead and sliding window; None for none."""
    if window is not None:
        return AttentionMask.window(window - 1, 0 if is_causal else window - 1)
    return AttentionMask.causal() if is_causal else None
