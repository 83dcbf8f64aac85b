"""Tensors of a random call of tests/fuzz/fuzz.py, and its mask in the form of the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_fast import AttentionMask
from transformer_fast.masks.checks import may_be_keep
from transformer_fast.masks.distance import relative_buckets

from .fuzz_config import DEVICE, DTYPES, GIVEN, Config


class Watched(Tensor):
    """Tensor subclass that changes nothing."""


def given(t: Tensor, c: Config) -> Tensor:
    """Return a tensor of the mask in the form of the configuration."""
    if c.given == "from inference mode":
        with torch.inference_mode():
            return t.clone()
    return t.as_subclass(Watched) if c.given == "of a subclass" else t


def given_mask(mask: AttentionMask, c: Config) -> AttentionMask:
    """Return a mask with tensors in the form of the configuration."""
    fields = {field.name for field in dataclasses.fields(mask)}
    tensors: dict[str, Any] = {name: given(t, c) for name, t in mask.tensors().items() if name in fields}
    return dataclasses.replace(mask, **tensors)


def used_before(tensors: Iterable[Tensor], call: Callable[[], object], c: Config) -> None:
    """Call with other values in these tensors; then restore the values in a way that PyTorch does not count as a
    write."""
    if c.given != GIVEN[1] or DEVICE.type != "cpu":
        return
    kept = {id(t): (t, t.clone()) for t in tensors}
    for t, values in kept.values():
        other = ~values if t.dtype == torch.bool else values.max() - values.flip(0) if t.dim() == 1 else values.flip(0)
        t.numpy()[...] = other.numpy()
    with torch.no_grad():
        call()
    for t, values in kept.values():
        t.numpy()[...] = values.numpy()


def normal(shape: tuple[int, ...], c: Config, generator: torch.Generator) -> Tensor:
    """Return normal numbers (B, heads, L, D) or (T, heads, D) in the layout of the configuration."""
    *batch, heads, length, dim = shape if len(shape) == 4 else (shape[1], shape[0], shape[2])
    draw = lambda *size: torch.randn(size, generator=generator).to(DTYPES[c.dtype]).to(DEVICE)  # noqa: E731
    if c.layout == "heads behind":
        t = draw(*batch, length, heads, dim).transpose(-3, -2)
    elif c.layout == "sliced":
        t = draw(*batch, heads, 2 * length, dim + 3)[..., ::2, 3:]
    elif c.layout == "one head for all":
        t = draw(*batch, 1, length, dim).expand(*batch, heads, length, dim)
    elif c.layout == "dim first":
        t = draw(*batch, heads, dim, length).transpose(-2, -1)
    else:
        t = draw(*batch, heads, length, dim)
    return t if len(shape) == 4 else t.transpose(0, 1)


def draw_mask(c: Config, generator: torch.Generator) -> tuple[AttentionMask, dict[str, object]]:
    """Return the mask as a user would pass it, and its normal form for the oracle."""

    def bools(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=generator) > 0.35).to(DEVICE)

    def broadcast(*shape: int) -> list[int]:
        return [n if torch.rand((), generator=generator) < 0.6 else 1 for n in shape]

    def said(keep: Tensor) -> AttentionMask:
        if c.dialect == "int keep":
            return AttentionMask.keep(keep.int() * 3)
        if c.dialect == "keep":
            return AttentionMask.keep(keep)
        return AttentionMask.blocked(~keep if c.dialect == "blocked" else (~keep).float())

    mask, parts = AttentionMask(), {}
    if "dense" in c.parts:
        parts["keep"] = bools(*broadcast(c.B, c.H), c.Lq, c.Lk)
        mask = mask & said(parts["keep"])
    if "padding" in c.parts:
        parts["key_keep"] = bools(*broadcast(c.B, c.H), 1, c.Lk)
        mask = mask & said(parts["key_keep"])
    for part, shape in (("lengths", (c.B,)), ("lengths per query", (c.B, c.Lq))):
        if part in c.parts:
            lengths = torch.randint(0, c.Lk + 1, shape, generator=generator).to(DEVICE)
            mask = mask & AttentionMask.lengths(lengths)
    if mask.key_lengths is not None:
        if may_be_keep(mask.key_lengths, c.Lk):  # refused; one that is longer makes them lengths
            mask.key_lengths[0, 0] = 2
        parts["lengths"] = mask.key_lengths
    if "prefix" in c.parts:
        prefix = torch.randint(0, c.Lk + 1, (c.B,), generator=generator).to(DEVICE)
        mask = mask & AttentionMask.prefix(prefix, c.offset)
        ends = torch.maximum(prefix[:, None], torch.arange(c.Lq, device=DEVICE) + c.offset + 1)
        lengths = parts.get("lengths", torch.tensor([c.Lk], device=DEVICE))
        parts["lengths"] = torch.minimum(ends, lengths if lengths.dim() == 2 else lengths[:, None])
    more, keep = drawn_ranges(c, generator)
    mask = mask & more
    if keep is not None:
        parts["keep"] = keep & parts["keep"] if "keep" in parts else keep
    if "causal" in c.parts:
        parts["causal"] = c.causal
        mask = mask & AttentionMask.causal(c.causal)
    window = window_of(c)
    if ends := [end for end in (parts.get("causal"), window.causal_offset) if end is not None]:
        parts["causal"] = min(ends)
    parts["window"] = window.window_offset
    return given_mask(mask & window, c), parts


def drawn_ranges(c: Config, generator: torch.Generator) -> tuple[AttentionMask, Tensor | None]:
    """Intervals, or the union of a mask of keys and another interval, and the same as a dense keep mask."""
    if not {"intervals", "union"} & {*c.parts}:
        return AttentionMask(), None

    def bound() -> Tensor:
        shapes = (c.Lq,), (1,), (c.B, c.Lq), (c.B, 1), (c.B, c.H, c.Lq), (1, c.H, c.Lq)
        shape = shapes[int(torch.randint(len(shapes), (), generator=generator))]
        return torch.randint(-3, c.Lk + 4, shape, generator=generator).to(DEVICE)

    def per_head(t: Tensor) -> Tensor:
        return t[None, None] if t.dim() == 1 else t[:, None] if t.dim() == 2 else t

    begin, end, j = bound(), bound(), torch.arange(c.Lk, device=DEVICE)
    inside = (j >= per_head(begin)[..., None]) & (j < per_head(end)[..., None])
    mask = AttentionMask.intervals(begin, end)
    if "intervals" in c.parts:
        return mask, inside.expand(-1, -1, c.Lq, -1)
    keys = (torch.rand(c.B, 1, 1, c.Lk, generator=generator) > 0.5).to(DEVICE)
    return mask | AttentionMask.keep(keys), (inside | keys).expand(-1, -1, c.Lq, -1)


@dataclasses.dataclass
class Special:
    """Documents, distance biases and sinks of a call; the names in ``leaves`` have gradients."""

    ids: tuple[Tensor, Tensor] | None
    leaves: dict[str, Tensor]
    offset: int
    given_ids: tuple[Tensor, Tensor] | None

    def mask(self, leaves: dict[str, Tensor]) -> AttentionMask:
        mask = AttentionMask() if self.given_ids is None else AttentionMask.documents(*self.given_ids)
        if "alibi" in leaves:
            mask = mask & AttentionMask.alibi(leaves["alibi"], self.offset)
        if "relative" in leaves:
            mask = mask & AttentionMask.relative(leaves["relative"], 20, self.offset % 2 == 0, self.offset)
        return mask

    def oracle_ids(self, packed: bool = False) -> dict[str, Tensor]:
        if self.ids is None:
            return {}
        query_ids, key_ids = (t[0] if packed else t for t in self.ids)
        return {"query_ids": query_ids, "key_ids": key_ids}

    def dense_bias(self, leaves: dict[str, Tensor], Lq: int, Lk: int, dtype: torch.dtype) -> Tensor | None:
        """Return the bias (B|1, H, Lq, Lk), computed from the definitions."""
        distances = torch.arange(Lk) - torch.arange(Lq).unsqueeze(1) - self.offset
        added = []
        if "alibi" in leaves:
            added.append(-leaves["alibi"].to(dtype)[..., None, None] * distances.abs())
        if "relative" in leaves:
            buckets = relative_buckets(distances, leaves["relative"].shape[0], 20, self.offset % 2 == 0)
            added.append(leaves["relative"].to(dtype)[buckets].permute(2, 0, 1))
        added = [t if t.dim() == 4 else t.unsqueeze(0) for t in added]
        return sum(added[1:], added[0]).to(DEVICE) if added else None


def draw_special(c: Config, generator: torch.Generator, B: int, Lq: int, Lk: int) -> Special:
    """Draw the special parts of a padded batch or a cache; a packed batch is one row of tokens."""
    ids = None
    if "documents" in c.parts:
        numbers = [
            (torch.randint(0, 2 * c.documents, (n,), generator=generator) == 0).cumsum(0) for n in (B * Lq, B * Lk)
        ]
        if c.number % 3 == 0:  # one lies here and there
            numbers = [torch.randint(0, 3, (n,), generator=generator) for n in (B * Lq, B * Lk)]
        same = Lq == Lk and c.number % 2 == 0
        dtype = (torch.int64, torch.int32)[c.number % 2]
        queries, keys = (t.to(dtype).view(B, -1).to(DEVICE) for t in numbers)
        ids = queries, queries if same else keys
    leaves = {}
    if "alibi" in c.parts:
        shape = (B, c.H) if c.kind != "packed" and c.number % 2 else (c.H,)
        leaves["alibi"] = torch.rand(shape, generator=generator)
    if "relative" in c.parts:
        leaves["relative"] = torch.randn(8 + 4 * (c.number % 3), c.H, generator=generator)
    if "sinks" in c.parts:
        leaves["sinks"] = torch.randn(c.H, generator=generator)
    given_ids = None if ids is None else (given(ids[0], c), given(ids[1], c))
    return Special(ids, {name: t.to(DEVICE) for name, t in leaves.items()}, c.offset, given_ids)


def window_of(c: Config) -> AttentionMask:
    return AttentionMask.window(*c.window) if "window" in c.parts else AttentionMask()


def bounds_of(c: Config) -> dict[str, int | None]:
    """Return the causal and the window offset for the oracle, of a call that has no other mask."""
    window = window_of(c)
    ends = [end for end in (0 if c.causal else None, window.causal_offset) if end is not None]
    return {"causal": min(ends, default=None), "window": window.window_offset}


def draw_bias(c: Config, generator: torch.Generator) -> Tensor | None:
    if c.bias == "none":
        return None
    shape = [n if torch.rand((), generator=generator) < 0.6 else 1 for n in (c.B, c.H, c.Lq, c.Lk)]
    bias = torch.randn(shape, generator=generator)
    if shape[3] > 1:
        bias[..., torch.rand(shape[3], generator=generator) < 0.1] = -torch.inf
    return bias.to(DTYPES[c.dtype]).to(DEVICE)
