"""``Padder``: takes the padding of a batch out of what a layer or a stack reads, and puts it back into what it returns.

A module that skips padding still returns a padded tensor (B, L, d). The next one reads the packed tokens (T, d) from an
attribute of that tensor, so the tokens are packed once. The gradient of the tokens is that of the padded tensor: hooks
and ``torch.autograd.grad`` work on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..masks import AttentionMask
from ..masks.packing import PackedMask, Packing, take, unpack
from ..tensor_cache import NOT_SAVED, get_or_compute
from ..tensors import usual_tensors
from .padded_calls import NO_SOURCE, NO_TOKEN, PaddedCalls, StaysPaddedError, record

_TOKENS = "_transformer_fast_tokens"


@dataclasses.dataclass(frozen=True, eq=False)
class Padder:
    """Padding of the inputs of a module.

    Attributes:
        own: packing of the hidden states.
        source: packing of the encoder's outputs; None for a module that does not attend to any.
        causal, window: see :class:`~transformer_fast.masks.PackedMask`, for the attention among the hidden states.
    """

    own: Packing
    source: Packing | None = None
    causal: bool = False
    window: AttentionMask | None = None

    @property
    def pays(self) -> bool:
        """True if there is any padding to leave out."""
        return not self.own.is_full or (self.source is not None and not self.source.is_full)

    @property
    def masks(self) -> tuple[PackedMask, ...]:
        """Mask of the attention among the hidden states, and that of the attention to the encoder."""
        own = PackedMask(self.own, self.own, self.causal, self.window)
        return (own,) if self.source is None else (own, PackedMask(self.own, self.source))

    def check_sources(self) -> None:
        """Raise StaysPaddedError if a sequence has queries and no keys.

        In most models, a query without keys attends to all padded keys; in a packed batch it would attend to nothing.
        A decoder may attend to each sequence of an encoder. A pair of packings is read once: reading waits for a GPU.
        """
        keys, queries = (self.source or self.own).cu_seqlens, self.own.cu_seqlens
        read = lambda: bool(((keys.diff() == 0) & (queries.diff() > 0)).any())  # noqa: E731
        if (self.source or self.own).shortest > 0:
            return
        if self.source is None or get_or_compute(keys, ("queries without keys",), (queries,), read):
            raise StaysPaddedError(NO_SOURCE)

    def remove(self, x: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Tokens (T, d) of the hidden states (B, L, d), and of the encoder's outputs: those that the tensors hold if
        they have this packing, else packed anew."""
        return tuple(_tokens_of(t, p) for t, p in zip((x, *memory), (self.own, self.source)) if p is not None)

    def restore(self, result: Any) -> Any:
        """Pad tokens (T, d), or (1, T, d), with zeros to (B, L, d), which holds the tokens; of a tuple the first
        value."""
        if isinstance(result, tuple):
            return self.restore(result[0]), *result[1:]
        tokens = result.squeeze(0) if result.dim() == 3 else result
        with usual_tensors():  # which count writes
            padded = unpack(tokens, self.own)
        if not self.own.is_full:
            setattr(padded, _TOKENS, Held(tokens.detach(), self.own, padded._version))
        return padded


def without_padding(
    module: nn.Module, calls: PaddedCalls, x: Tensor, prepare: Callable[[], tuple[Padder, Callable[[], Any]] | None]
) -> Any:
    """Result of a module on packed tokens, padded; None if it must run with the padding, or has none.

    Args:
        module: layer or stack, whose calls are recorded.
        calls: record of the reasons.
        x: hidden states (B, L, d) or (L, B, d).
        prepare: function that returns the padder, and a function that runs the module on tokens; or None. Both may
            raise StaysPaddedError.
    """
    try:
        if (found := prepare()) is None or not found[0].pays:
            return None
        padder, run = found
        if padder.own.total == 0 or (padder.source is not None and padder.source.total == 0):
            raise StaysPaddedError(NO_TOKEN)
        result = run()
    except StaysPaddedError as reason:
        calls.add(str(reason))
        record(module, x.shape[0] * x.shape[1], None, str(reason))
        return None
    record(module, padder.own.batch * padder.own.length, padder.own)
    return padder.restore(result)


@dataclasses.dataclass(frozen=True)
class Held:
    """Tokens of a padded tensor of this version; they are neither copied nor saved with the tensor."""

    tokens: Tensor
    packing: Packing
    version: int = 0

    def __reduce_ex__(self, protocol: object) -> tuple[type, tuple[()]]:
        return NOT_SAVED


def hand_over(x: Tensor, view: Tensor) -> Tensor:
    """Give a view of x the tokens that x holds."""
    if (held := getattr(x, _TOKENS, None)) is not None:
        setattr(view, _TOKENS, held)
    return view


def held_packing(x: Tensor) -> Packing | None:
    """Packing of the tokens that a padded tensor holds; None for any other tensor."""
    held: Any = getattr(x, _TOKENS, None)
    return held.packing if type(held) is Held and held.version == x._version else None


def check_reads(module: nn.Module, before: Packing | None, packing: Packing | None) -> None:
    """Raise an error if a module reads positions that the module before has left out.

    Args:
        module: layer or stack.
        before: tokens that were not left out: :func:`held_packing` of what the module reads; None for all positions.
        packing: tokens that it reads; None for all positions.
    """
    if before is None or before is packing or before.is_full:
        return
    if packing is not None and packing.batch * packing.length == before.batch * before.length:
        keep = torch.zeros(before.batch * before.length, dtype=torch.bool, device=before.indices.device)
        keep[packing.indices] = True
        if bool(covers(before, keep)):
            return
    raise RuntimeError(left_out(module))


def covers(packing: Packing, keep: Tensor) -> Tensor:
    """Bool (), True if all positions of a mask (B, L), True at tokens, are among the tokens of a packing."""
    others = keep.flatten().index_fill(0, packing.indices, False)
    return ~others.any()


def left_out(module: nn.Module) -> str:
    """Message of the error of :func:`check_reads`."""
    return (
        f"a {type(module).__name__} reads positions that the layer before has left out as padding, and that are 0: "
        "the masks of these layers differ, so their model cannot run with packed=True"
    )


def _tokens_of(x: Tensor, packing: Packing) -> Tensor:
    held: Any = getattr(x, _TOKENS, None)
    if type(held) is not Held or held.version != x._version or held.packing is not packing:
        return take(x, packing)
    return Take.apply(x, held)


class Take(Function):
    """``take(x, packing)``, whose values are there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.packing = held.packing
        return held.tokens.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return pad_gradient(grad, ctx.packing), None


def pad_gradient(grad: Tensor, packing: Packing) -> Tensor:
    """Pad a gradient (T, ...) with zeros to (B, L, ...), also one with a hidden batch dimension."""
    if not torch._C._functorch.is_legacy_batchedtensor(grad):
        return unpack(grad, packing)
    places = packing.indices.new_full((packing.batch * packing.length,), packing.total)
    places[packing.indices] = torch.arange(packing.total, device=places.device)
    rows = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])]).index_select(0, places)
    return rows.view(packing.batch, packing.length, *grad.shape[1:])
