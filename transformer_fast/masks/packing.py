"""``pack`` and ``unpack``: a padded batch without its padding, and back.

A packed batch is a tensor of tokens (T, ...), all sequences concatenated, and a :class:`Packing` with their boundaries.
Layers that work token by token (projections, norms, feed-forward) take packed tokens directly.
:func:`transformer_fast.attention_packed` keeps the sequences apart. So a whole model can run without padding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..backends import in_transform, refuse_transform
from ..tracing import refuse_torchscript
from .arguments import parts_beside
from .checks import broadcasts
from .mask import AttentionMask


@dataclasses.dataclass(frozen=True, eq=False)
class Packing:
    """Positions of the tokens of a packed batch. :func:`pack` and :func:`packing_of` return a Packing.

    Attributes:
        cu_seqlens: int32 (batch + 1,) on the tokens' device: sequence b is tokens ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``.
        indices: int64 (total,) on that device: index of each token in the padded batch, ``b * length + position``.
        batch, length: size of the padded batch (B, L).
        max_length: length of the longest sequence, on the host.
        total: number of tokens T, on the host.
        shortest: length of the shortest sequence, on the host; 1 where it was not read.
        has_gaps: True if padding stands between two tokens of a sequence, on the host; False where it was not read.
    """

    cu_seqlens: Tensor
    indices: Tensor
    batch: int
    length: int
    max_length: int
    total: int
    shortest: int = 1
    has_gaps: bool = False

    @property
    def positions(self) -> Tensor:
        """Position of each token in its padded sequence, int64 (total,)."""
        if torch.compiler.is_compiling():
            # The length may be symbolic, and ONNX has no remainder by a symbolic number.
            position = torch.arange(self.length, device=self.indices.device)
            return position.expand(self.batch, -1).flatten().index_select(0, self.indices)
        return self.indices % max(self.length, 1)

    @property
    def is_full(self) -> bool:
        """True if the batch has no padding; False under tracing, where this is unknown."""
        return not torch.compiler.is_compiling() and self.total == self.batch * self.length


@dataclasses.dataclass(frozen=True, eq=False)
class PackedMask:
    """Mask of a layer whose inputs are packed: the tokens of a sequence see each other.

    Attributes:
        queries, keys: packing of the queries and of the keys; the same object for self-attention.
        causal: query i of a sequence sees its keys up to i.
        window: ``AttentionMask.window``, counted inside each sequence, or None.
    """

    queries: Packing
    keys: Packing
    causal: bool = False
    window: AttentionMask | None = None


def pack(x: Tensor, mask: Tensor | AttentionMask | None = None) -> tuple[Tensor, Packing]:
    """Remove the padding of a batch.

    Args:
        x: (B, L, ...), any dtype; gradients flow through.
        mask: the positions that hold tokens: lengths, integer (B,); or a bool keep mask (B, L); or an
            :class:`~transformer_fast.AttentionMask` of padding alone (lengths (B,), or a keep mask (B, 1, 1, L)); None
            for all.

    Returns:
        The tokens (T, ...), sequence by sequence and in order, and their :class:`Packing`.

    On a GPU the host waits once, to read T. With lengths on the CPU the host never waits.

    Raises:
        TypeError: for a mask of another type or dtype.
        ValueError: for lengths below 0 or beyond L, shapes that do not fit x, or a mask that is not padding alone.

    Example:
        >>> ids = torch.tensor([[7, 8, 9], [5, 0, 0]])
        >>> tokens, packing = tfast.pack(ids, torch.tensor([3, 1]))
        >>> tokens
        tensor([7, 8, 9, 5])
        >>> packing.cu_seqlens
        tensor([0, 3, 4], dtype=torch.int32)
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"pack: x must be a tensor (batch, length, ...), got {got}")
    packing = packing_of(mask, x.shape[0], x.shape[1], x.device)
    return take(x, packing), packing


def take(x: Tensor, packing: Packing) -> Tensor:
    """Pack x (B, L, ...) to tokens (T, ...) by an existing packing; differentiable."""
    if tuple(x.shape[:2]) != (packing.batch, packing.length):
        raise ValueError(f"pack: x is {tuple(x.shape)}, but the packing is of ({packing.batch}, {packing.length}, ...)")
    flat = x.flatten(0, 1)
    return flat if packing.is_full else flat.index_select(0, packing.indices)


def unpack(tokens: Tensor, packing: Packing, fill: float = 0.0) -> Tensor:
    """Restore the padding of a packed batch.

    Args:
        tokens: (T, ...) as :func:`pack` made them, or anything computed from them token by token.
        packing: the :class:`Packing` that :func:`pack` returned with the tokens.
        fill: value at padded positions.

    Returns:
        (B, L, ...), differentiable with respect to ``tokens``.

    Raises:
        ValueError: if the length of ``tokens`` is not the packing's T.

    Example:
        >>> tokens, packing = tfast.pack(torch.tensor([[7, 8, 9], [5, 0, 0]]), torch.tensor([3, 1]))
        >>> tfast.unpack(tokens + 1, packing, fill=-1)
        tensor([[ 8,  9, 10],
                [ 6, -1, -1]])
    """
    if tokens.dim() < 1 or tokens.shape[0] != packing.total:
        raise ValueError(f"unpack: expected {packing.total} tokens (T, ...), got shape {tuple(tokens.shape)}")
    shape = (packing.batch, packing.length, *tokens.shape[1:])
    if packing.is_full:
        return tokens.view(shape)
    padded = tokens.new_full((packing.batch * packing.length, *tokens.shape[1:]), fill)
    if torch.compiler.is_compiling():
        return padded.index_copy(0, packing.indices, tokens).view(shape)
    return padded.index_copy_(0, packing.indices, tokens).view(shape)  # in place: logits would be in memory twice


def packing_of(
    mask: Tensor | AttentionMask | None, batch: int, length: int, device: torch.device | str | None = None
) -> Packing:
    """The :class:`Packing` of a batch (batch, length, ...) on ``device``; ``mask`` and errors as in :func:`pack`."""
    (packing,), _ = packings_of([(mask, batch, length, torch.device(device or "cpu"))])
    return packing


def packings_of(
    batches: Iterable[tuple[Tensor | AttentionMask | None, int, int, torch.device]], also: Sequence[Tensor] = ()
) -> tuple[list[Packing], list[bool]]:
    """Packings of several batches, and values of bool tensors (), for which the host waits for a GPU once.

    Args:
        batches: the arguments of :func:`packing_of`.
        also: tensors that are read with the masks.
    """
    refuse_torchscript("pack")
    if in_transform():
        refuse_transform("pack")
    calls = [(*_lengths_or_keep(mask, B, L, device), B, L, device) for mask, B, L, device in batches]
    if torch.compiler.is_compiling():
        return [_traced(*each) for each in calls], []
    numbers = [_numbers(lengths, keep) for lengths, keep, *_ in calls]
    values = _read([*numbers, *(t.view(1) for t in also)])
    packings = [_packing(*each) for each in zip(numbers, values, calls)]
    return packings, [value == [1] for value in values[len(calls) :]]


def _read(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Values of tensors (n,): the only wait for a device, and one for each device."""
    values: dict[torch.device, Iterator[int]] = {}
    for device in {t.device for t in tensors}:
        here = [t for t in tensors if t.device == device]
        values[device] = iter((here[0] if len(here) == 1 else torch.cat(here)).tolist())
    return [list(itertools.islice(values[t.device], t.shape[0])) for t in tensors]


_Call = tuple[Tensor | None, Tensor | None, int, int, torch.device]
"""Lengths (B,) or a keep mask (B, L), the sizes, and the device of the tokens."""


def _numbers(lengths: Tensor | None, keep: Tensor | None) -> Tensor:
    """Length of each sequence; and of a keep mask the runs of tokens in each, for all but the first follow a gap."""
    if keep is None:
        assert lengths is not None
        return lengths
    return torch.cat((keep.sum(1), keep[:, 0] + (keep[:, 1:] & ~keep[:, :-1]).sum(1)))


def _packing(numbers: Tensor, values: list[int], call: _Call) -> Packing:
    _, keep, batch, length, device = call
    counts, runs = values[:batch], values[batch:]
    shortest, longest, total = min(counts, default=1), max(counts, default=0), sum(counts)
    if shortest < 0 or longest > length:
        raise ValueError(f"pack: lengths must lie in [0, L = {length}], got {shortest} to {longest}")
    lengths = _to(numbers[:batch], device).long()
    cu_seqlens = _running_sum(lengths)
    if total == batch * length:
        indices = torch.arange(total, device=device)
    elif keep is not None:
        # A stable sort moves the tokens to the front, in order.
        indices = torch.argsort((~keep).flatten().to(torch.uint8), stable=True)[:total]
    else:
        # Index in the padded batch: index in the packed batch plus the padding of all earlier sequences.
        padding = torch.arange(batch, device=device) * length - cu_seqlens[:-1]
        indices = torch.arange(total, device=device) + torch.repeat_interleave(padding, lengths, output_size=total)
    return Packing(cu_seqlens, indices, batch, length, longest, total, shortest, max(runs, default=1) > 1)


def _traced(lengths: Tensor | None, keep: Tensor | None, batch: int, length: int, device: torch.device) -> Packing:
    """Packing in a graph under construction: the number of tokens is symbolic, and max_length is L."""
    if lengths is not None:
        keep = torch.arange(length, device=device) < lengths.to(device)[:, None]
    assert keep is not None
    indices = keep.flatten().nonzero().squeeze(1)
    return Packing(_running_sum(keep.sum(1)), indices, batch, length, length, indices.shape[0])


def _running_sum(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _to(t: Tensor, device: torch.device) -> Tensor:
    """Move to the device; from the CPU to a GPU through pinned memory, so that the host does not wait."""
    if t.device.type == "cpu" and device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def _lengths_or_keep(
    mask: Tensor | AttentionMask | None, batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """A padding mask as lengths (B,) if possible, else as a bool keep mask (B, L) there; the other value is None."""
    if mask is None or batch * length == 0:
        return torch.full((batch,), length), None
    if isinstance(mask, Tensor) and mask.dim() == 1:
        mask = AttentionMask.lengths(mask)
    elif isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype == torch.bool:
        mask = AttentionMask.keep(mask[:, None, None])
    elif not isinstance(mask, AttentionMask):
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"pack: expected lengths (B,), a bool keep mask (B, L) or an AttentionMask, got {got}")
    _check_padding(mask, batch, length)
    lengths, keep = mask.key_lengths, mask.key_keep_mask
    lengths = None if lengths is None else lengths.flatten().expand(batch)
    if keep is None:
        return (torch.full((batch,), length) if lengths is None else lengths), None
    keep = keep[:, 0, 0].expand(batch, length)
    if lengths is not None:
        keep = keep & (torch.arange(length, device=lengths.device) < lengths[:, None])
    return None, _to(keep, device)


def _check_padding(mask: AttentionMask, batch: int, length: int) -> None:
    """Raise unless a mask holds only padding of a batch (batch, length, ...)."""
    lengths, keep = mask.key_lengths, mask.key_keep_mask
    per_query = lengths is not None and lengths.dim() == 2 and lengths.shape[1] > 1
    if per_query or parts_beside(mask, "key_keep_mask", "key_lengths"):
        raise ValueError(
            f"pack: the mask must be padding alone, lengths (B,) or a keep mask (B, 1, 1, L); this one is {mask}"
        )
    if lengths is not None and not broadcasts(lengths.shape[0], batch):
        raise ValueError(f"pack: lengths of shape {tuple(lengths.shape)} do not fit a batch of {batch}")
    if keep is not None and not all(broadcasts(n, limit) for n, limit in zip(keep.shape, (batch, 1, 1, length))):
        raise ValueError(
            f"pack: a keep mask of shape {tuple(keep.shape)} does not fit (B, 1, 1, L) = {(batch, 1, 1, length)}"
        )
