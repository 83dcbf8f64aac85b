"""Parts of a mask that the kernels do not know, as what they read: lengths per query, and a keep mask.

A mask of ends alone (lengths, causal, intervals that begin at key 0, unions of such masks) is one end key per query, by
arithmetic. What else the kernels do not know is evaluated by the definition of the mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..tensor_cache import get_or_compute
from .arguments import parts_beside
from .mask import AttentionMask

_KNOWN: dict[str, Any] = dict.fromkeys(
    ("keep_mask", "key_keep_mask", "key_lengths", "causal_offset", "additive_bias", "window_offset", "document_ids")
) | {"distance_biases": ()}
"""Parts that the kernels know, as a mask without them has them."""
_Result = TypeVar("_Result")


def kernel_parts(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Convert intervals and unions, and parts that are added to the mask alone, to what the kernels read.

    Returns:
        End keys of the queries, int64 (B|1, Lq|1) and not clamped to the keys; and a keep mask, bool (B|1, H|1, Lq|1,
        Lk). None for nothing.
    """
    own = dataclasses.replace(mask, **_KNOWN)
    unions = [union for union in own.unions if all(map(parts_beside, union))]  # without a part, all keys are seen
    ends, rest = [], dataclasses.replace(own, end_keys=None, unions=())
    for part in (AttentionMask(end_keys=own.end_keys), *(AttentionMask(unions=(union,)) for union in unions)):
        end = _end(part, Lq, Lk, device)
        if end is None:
            rest = rest & part
        elif parts_beside(part):
            ends.append(end)
    keep = rest.visible(Lq, Lk, device) if parts_beside(rest) else None
    return reduce(torch.minimum, ends).squeeze(1) if ends else None, keep


def _end(mask: AttentionMask, Lq: int, Lk: int, device: torch.device) -> Tensor | None:
    """One past the last key of each query, int64 (B|1, 1, Lq|1), of a mask whose queries see all keys from key 0 on up
    to an end, in all heads alike; None for another mask."""
    per_head = mask.end_keys is not None and mask.end_keys.shape[1] != 1
    if per_head or parts_beside(mask, "key_lengths", "causal_offset", "end_keys", "unions"):
        return None
    ends = [torch.full((1, 1, 1), Lk, device=device)]
    if mask.causal_offset is not None:
        ends.append(torch.arange(Lq, device=device).view(1, 1, -1) + (mask.causal_offset + 1))
    if mask.key_lengths is not None:
        lengths = mask.key_lengths.long()
        ends.append(lengths.unsqueeze(1) if lengths.dim() == 2 else lengths[:, None, None])
    if mask.end_keys is not None:
        ends.append(mask.end_keys.long())
    for union in mask.unions:
        of_union = []
        for one in union:
            if (end := _end(one, Lq, Lk, device)) is None:
                return None
            of_union.append(end)
        ends.append(reduce(torch.maximum, of_union))
    return reduce(torch.minimum, ends)


def on_its_tensors(mask: AttentionMask, name: tuple[Hashable, ...], compute: Callable[[], _Result]) -> _Result:
    """Compute something of a mask without biases; off a CPU, cached on the tensors of the mask."""
    tensors = list(mask.tensors().values())
    if not tensors or tensors[0].device.type == "cpu" or any(type(t) is not Tensor for t in tensors):
        return compute()
    return get_or_compute(tensors[0], (*name, _form(mask)), tuple(tensors[1:]), compute)


def _form(part: Any) -> Hashable:
    """Return what two masks share that differ in their tensors alone."""
    if isinstance(part, AttentionMask):
        return tuple(_form(getattr(part, field.name)) for field in dataclasses.fields(part))
    if isinstance(part, tuple):
        return tuple(map(_form, part))
    return "tensor" if isinstance(part, Tensor) else part
