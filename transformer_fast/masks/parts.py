"""Combine the parts of attention masks, and write them as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .distance import DistanceBias

_Part = TypeVar("_Part", Tensor, int, tuple[Tensor, Tensor])


def ranked(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber ids as int32; equality and order of the ids stay."""
    ids = torch.cat([query_ids.reshape(-1), key_ids.reshape(-1)])
    values, places = ids.sort()
    changes = torch.cat([values[:1] != values[:1], values[1:] != values[:-1]]).cumsum(0)
    # No searchsorted: ONNX has none.
    numbers = torch.zeros_like(ids, dtype=changes.dtype).scatter(0, places, changes).to(torch.int32)
    first, second = numbers.split([query_ids.numel(), key_ids.numel()])
    return first.view(query_ids.shape), second.view(key_ids.shape)


def both_documents(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two sets of document ids: the new ids are equal where both old ids are equal."""
    first, second = ranked(*a), ranked(*b)
    most = sum(t.numel() for t in second) + 1
    queries, keys = (x.long() * most + y for x, y in zip(first, second, strict=True))
    return ranked(queries, keys)


def combine(name: str, a: _Part | None, b: _Part | None, both: Callable[[_Part, _Part], _Part]) -> _Part | None:
    """The part of two masks that a key must satisfy in both; None if neither mask has it.

    Raises:
        ValueError: for tensors whose shapes do not broadcast; the message has the constructor's name.
    """
    if a is None or b is None:
        return b if a is None else a
    try:
        return both(a, b)
    except RuntimeError as error:
        if wrong := _what_is_wrong(_tensors(a), _tensors(b)):
            kinds = (" x ".join(map(_kind, _tensors(part))) for part in (a, b))
            raise ValueError(f"{name} & {name}: {' and '.join(kinds)} {wrong}") from error
        raise


def _tensors(part: Any) -> tuple[Tensor, ...]:
    return part if isinstance(part, tuple) else (part,)


def _what_is_wrong(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> str:
    """Reason why parts cannot be combined: their devices or their shapes; "" for another one, such as no memory."""
    if a[0].device != b[0].device:
        return f"are on {a[0].device} and {b[0].device}"
    try:
        for one, other in zip(a, b):
            torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return "do not broadcast"
    return ""


def shorter(a: Tensor, b: Tensor) -> Tensor:
    """The lesser of lengths (B,) or (B, Lq)."""
    if a.dim() != b.dim():
        a, b = (t.unsqueeze(1) if t.dim() == 1 else t for t in (a, b))
    return torch.minimum(a, b)


def written(
    *,
    keep_mask: Tensor | None,
    key_keep_mask: Tensor | None,
    key_lengths: Tensor | None,
    causal_offset: int | None,
    additive_bias: Tensor | None,
    window_offset: int | None,
    document_ids: tuple[Tensor, Tensor] | None,
    distance_biases: tuple[DistanceBias, ...],
    first_keys: Tensor | None,
    end_keys: Tensor | None,
    unions: tuple[tuple[Any, ...], ...],
    **others: Any,
) -> str:
    """Source text of the constructors that make a mask, each tensor by dtype and shape; "AttentionMask()" for no
    parts."""
    named = ("keep", keep_mask), ("keep", key_keep_mask), ("lengths", key_lengths)
    calls = [f"{name}({_kind(t)})" for name, t in named if t is not None]
    calls += _bounds(causal_offset, window_offset)
    if first_keys is not None or end_keys is not None:
        calls.append(f"intervals({', '.join('None' if t is None else _kind(t) for t in (first_keys, end_keys))})")
    calls += [f"({' | '.join(map(repr, union))})" for union in unions]
    if document_ids is not None:
        queries, keys = document_ids
        calls.append(f"documents({_kind(queries)}{'' if keys is queries else f', {_kind(keys)}'})")
    calls += [by_distance.written(_kind(by_distance.tensor)) for by_distance in distance_biases]
    if additive_bias is not None:
        calls.append(f"bias({_kind(additive_bias)})")
    calls += [f"{name}({part})" for name, part in others.items() if part is not None]
    return " & ".join(calls) or "AttentionMask()"


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"


def _bounds(causal: int | None, window: int | None) -> list[str]:
    """Source text of the ``causal`` and ``window`` calls that give these offsets."""
    if window is None:
        return [] if causal is None else [f"causal({causal or ''})"]
    if causal is None or causal < window:
        return [*_bounds(causal, None), f"window({-window}, None)"]
    if window <= 0 <= causal:
        return [f"window({-window}, {causal})" if causal else f"window({-window})"]
    return [f"window({causal - window}, offset={causal})"]
