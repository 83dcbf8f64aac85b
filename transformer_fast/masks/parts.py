"""The parts of attention masks: combined, moved, cut to some queries, and written as text.

A mask is an :class:`~transformer_fast.AttentionMask`, whose module imports this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .checks import MANY, may_be_keep
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


def combined(a: Any, b: Any) -> dict[str, Any]:
    """Fields of the mask of the keys that both masks allow."""
    return {
        "keep_mask": combine("keep", a.keep_mask, b.keep_mask, torch.logical_and),
        "key_keep_mask": combine("keep", a.key_keep_mask, b.key_keep_mask, torch.logical_and),
        "key_lengths": combine("lengths", a.key_lengths, b.key_lengths, shorter),
        "causal_offset": combine("causal", a.causal_offset, b.causal_offset, min),
        "additive_bias": combine("bias", a.additive_bias, b.additive_bias, torch.add),
        "window_offset": combine("window", a.window_offset, b.window_offset, max),
        "document_ids": combine("documents", a.document_ids, b.document_ids, both_documents),
        "distance_biases": a.distance_biases + b.distance_biases,
        "first_keys": combine("intervals", a.first_keys, b.first_keys, torch.maximum),
        "end_keys": combine("intervals", a.end_keys, b.end_keys, torch.minimum),
        "unions": a.unions + b.unions,
        "has_clear_lengths": _has_clear_lengths(a, b),
    }


def _has_clear_lengths(a: Any, b: Any) -> bool | None:
    if a.key_lengths is None or b.key_lengths is None:
        return a.has_clear_lengths if b.key_lengths is None else b.has_clear_lengths
    clear = (mask.has_clear_lengths or not may_be_keep(mask.key_lengths, MANY) for mask in (a, b))
    return True if all(clear) else None


def alternatives(mask: Any, parts: Iterable[str]) -> tuple[Any, ...]:
    """The masks of a union; a mask that is not one union alone is itself one of several."""
    others = (getattr(mask, name) for name in parts if name != "unions")
    alone = len(mask.unions) == 1 and all(part is None or part == () for part in others)
    return mask.unions[0] if alone else (mask,)


def tensors_of(mask: Any, parts: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a mask, by name: parts that are tensors, and tensors inside other parts."""
    tensors = {name: part for name in parts if isinstance(part := getattr(mask, name), Tensor)}
    if mask.document_ids is not None:
        tensors |= dict(zip(("query_ids", "key_ids"), mask.document_ids, strict=True))
    for n, union in enumerate(mask.unions):
        for m, one in enumerate(union):
            tensors |= {f"union {n}.{m} {name}": t for name, t in one.tensors().items()}
    return tensors | {f"{type(bias).__name__.lower()} {n}": bias.tensor for n, bias in enumerate(mask.distance_biases)}


def moved(mask: Any, device: torch.device | str) -> Any:
    """The mask with its tensors on a device."""

    def to_device(part: Any) -> Any:
        if isinstance(part, DistanceBias):
            return part.with_tensor(part.tensor.to(device))
        if isinstance(part, tuple):
            return tuple(map(to_device, part))
        return part.to(device) if isinstance(part, (Tensor, type(mask))) else part

    return dataclasses.replace(
        mask, **{field.name: to_device(getattr(mask, field.name)) for field in dataclasses.fields(mask)}
    )


def of_queries(mask: Any, first: int, end: int) -> Any:
    """The mask of the queries from ``first`` to before ``end``."""

    def cut(t: Tensor | None, dim: int) -> Tensor | None:
        return t if t is None or t.shape[dim] == 1 else t[(slice(None),) * dim + (slice(first, end),)]

    parts: dict[str, Any] = {
        name: cut(getattr(mask, name), 2) for name in ("keep_mask", "additive_bias", "first_keys", "end_keys")
    }
    if mask.key_lengths is not None and mask.key_lengths.dim() == 2:
        parts["key_lengths"] = cut(mask.key_lengths, 1)
    for name in ("causal_offset", "window_offset"):
        if getattr(mask, name) is not None:
            parts[name] = getattr(mask, name) + first
    if mask.document_ids is not None:
        query_ids, key_ids = mask.document_ids
        parts["document_ids"] = cut(query_ids, 1), key_ids
    parts["distance_biases"] = tuple(
        dataclasses.replace(bias, offset=bias.offset + first) for bias in mask.distance_biases
    )
    parts["unions"] = tuple(tuple(of_queries(one, first, end) for one in union) for union in mask.unions)
    return dataclasses.replace(mask, **parts)


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
