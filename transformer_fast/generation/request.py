"""A checked batch, and the answers to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .forms import form_of

Lengths = int | Sequence[int] | Tensor | None

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Request:
    """Checked batch: source ids (B, S), keep mask (B, 1, S) or None, largest number of tokens per answer (B,), ids
    of BOS and EOS, and the stream of random numbers per sentence (B,)."""

    src: Tensor
    src_mask: Tensor | None
    limits: Tensor
    bos: int
    eos: int
    streams: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def lengths(self) -> Tensor:
        """Number of source positions that are read, (B,)."""
        return _source_lengths(self.src, self.src_mask)


@dataclass(frozen=True)
class Hypothesis:
    """One translation. tokens: target ids without BOS and EOS. score: log_prob divided by the length penalty.
    log_prob: the natural log of its probability. finished: False if max_length cut the answer off before EOS.
    alignment: (len(tokens), S) attention to the source, if it was requested."""

    tokens: list[int]
    score: float
    log_prob: float
    finished: bool
    alignment: Tensor | None = field(default=None, compare=False)


def check_request(
    model: nn.Module,
    src: Tensor,
    *,
    src_lengths: Tensor | None,
    src_mask: Tensor | None,
    bos: int,
    eos: int,
    pad: int | None,
    max_length: Lengths,
) -> Request:
    """Check the arguments of a search and convert them to a `Request`; errors name what was wrong."""
    if not isinstance(src, Tensor) or src.dim() != 2 or src.dtype not in _INTEGERS:
        got = f"{src.dtype} {tuple(src.shape)}" if isinstance(src, Tensor) else type(src).__name__
        raise ValueError(f"src must be an integer tensor of token ids (batch, length), got {got}")
    if src.shape[0] > 0 and src.shape[1] == 0:
        raise ValueError(f"src has {src.shape[0]} sentences but no positions; expected at least one token each")
    vocabulary = form_of(model).vocabulary
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.device != src.device:
        raise ValueError(f"src is on {src.device} but the model is on {parameter.device}; expected one device")
    for name, token in (("bos", bos), ("eos", eos)):
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(f"{name} must be a token id (an int >= 0), got {token!r}")
        if vocabulary is not None and token >= vocabulary:
            raise ValueError(f"{name} is token {token}, outside the model's target vocabulary of {vocabulary}")
    mask = _source_mask(src, src_lengths, src_mask, pad)
    return Request(src, mask, _limits(src, mask, max_length), bos, eos)


def _source_mask(src: Tensor, lengths: Tensor | None, mask: Tensor | None, pad: int | None) -> Tensor | None:
    batch, width = src.shape
    if lengths is not None and mask is not None:
        raise ValueError("give src_lengths or src_mask, not both")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != (batch, 1, width) or mask.is_floating_point():
            got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"src_mask must be a bool keep mask of shape {(batch, 1, width)}, got {got}")
        return mask.to(device=src.device, dtype=torch.bool)
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=src.device)
        if lengths.shape != (batch,) or lengths.dtype not in _INTEGERS:
            raise ValueError(
                f"src_lengths must be {batch} integers, one for each sentence, got {lengths.dtype} "
                f"{tuple(lengths.shape)}"
            )
        if batch and (int(lengths.min()) < 0 or int(lengths.max()) > width):
            raise ValueError(f"src_lengths must lie in [0, {width}], the width of src, got {lengths.tolist()}")
        return (torch.arange(width, device=src.device) < lengths[:, None]).unsqueeze(1)
    return None if pad is None else (src != pad).unsqueeze(1)


def _limits(src: Tensor, mask: Tensor | None, max_length: Lengths) -> Tensor:
    if max_length is None:
        return 2 * _source_lengths(src, mask) + 20
    batch = src.shape[0]
    limits = torch.as_tensor(max_length, device=src.device)
    fits = limits.shape == () or limits.shape == (batch,)
    if limits.dtype not in _INTEGERS or not fits or bool((limits < 1).any()):
        raise ValueError(f"max_length must be an int >= 1, or {batch} of them, got {max_length!r}")
    return limits.long().expand(batch)


def _source_lengths(src: Tensor, mask: Tensor | None) -> Tensor:
    return torch.full((src.shape[0],), src.shape[1], device=src.device) if mask is None else mask.sum(dim=(1, 2))


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Pad source ids on the right to (B, S) with `pad`; also return the lengths (B,)."""
    lengths = [len(source) for source in sources]
    rows = [[*source, *[pad] * (max(lengths) - len(source))] for source in sources]
    return torch.tensor(rows, device=device), torch.tensor(lengths, device=device)
