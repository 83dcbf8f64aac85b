"""Conversion of the arguments of the public attention functions for the ops, and checks of what the ops do not see."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends import in_transform
from ..masks import AttentionMask, and_causal
from ..masks.arguments import parts_beside
from ..masks.checks import broadcasts, clamped, is_plain_on_cpu, kind_of, may_be_keep
from ..masks.distance import distance_table
from ..masks.kernel_parts import kernel_parts, on_its_tensors
from ..masks.parts import ranked
from ..tensor_cache import get_or_compute
from ..tracing import needs_plain_ops
from .argument_types import as_number


def can_read_values(t: Tensor) -> bool:
    """Return True if values can be read without waiting for a device and no graph is being made."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def dropout_number(op: str, given: Any) -> float:
    """Convert the dropout probability to float; False, as in ``training and p``, is 0."""
    return 0.0 if given is False else as_number(op, "dropout_p", given)


def scale_of(q: Tensor, given: float | None) -> float:
    """Factor of the scores: the given scale, or 1 / sqrt(head_dim)."""
    if given is not None or q.dim() == 0 or q.shape[-1] == 0:  # the op refuses such queries
        return 1.0 if given is None else given
    return 1.0 / math.sqrt(q.shape[-1])


def gives_zero(op: str, empty_rows: str) -> bool:
    """Return True if a query without a key gets 0, False for uniform weights."""
    if empty_rows == "zero" or empty_rows == "uniform":
        return empty_rows == "zero"
    raise ValueError(f'{op}: empty_rows must be "uniform" or "zero", got {empty_rows!r}')


_BY_POSITION = ("causal_offset", "window_offset", "document_ids", "distance_biases")


def mask_by_position(op: str, mask: AttentionMask | None, causal: bool, takes_keep: bool = False) -> AttentionMask:
    """Mask of a call that refuses ``lengths`` and dense parts, with the look-ahead mask included.

    Args:
        takes_keep: allow a keep mask over keys only.
    """
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be True or False, got {causal!r}")
    if mask is None:
        return AttentionMask(causal_offset=and_causal(None, causal))
    if not isinstance(mask, AttentionMask):
        raise TypeError(f"{op}: mask must be an AttentionMask, got {type(mask).__name__}")
    if given := parts_beside(mask, *_BY_POSITION, *(("key_keep_mask",) if takes_keep else ())):
        keys = ", and a keep mask of keys" if takes_keep else ""
        raise ValueError(
            f"{op}: mask may only contain window, causal, documents, alibi and relative{keys}, got {', '.join(given)}"
        )
    return replace(mask, causal_offset=and_causal(mask.causal_offset, causal))


def is_special(mask: AttentionMask, softcap: float | None = None, sinks: Tensor | None = None) -> bool:
    """Return True if a call has parts that the eager fast paths do not support."""
    special = softcap is not None or sinks is not None or mask.document_ids is not None
    return special or len(mask.distance_biases) > 0 or mask.has_ranges


def special_arguments(
    op: str,
    q: Tensor,
    mask: AttentionMask,
    softcap: float | None,
    sinks: Tensor | None,
    lengths: tuple[int, int],
    zero: int,
    packed: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Convert documents, distances, softcap and sinks of a call to fields of AttentionParams.

    Documents and distances are checked here: the op knows only what is made of them.

    Args:
        op: the public name, for the messages.
        q: (B, H, Lq, D), or for a packed batch (Tq, H, D).
        lengths: Lq and Lk, or max_seqlen_q and max_seqlen_k of a packed batch.
        zero: index in the distance table for equal query and key positions.
        packed: Tq and Tk of a packed batch; None for a padded batch.
    """
    softcap = None if softcap is None else as_number(op, "softcap", softcap)
    B, H = (q.shape[0] if packed is None else 1), q.shape[1]
    for bias in mask.distance_biases:
        name = type(bias).__name__.lower()
        batches, heads = bias.heads()
        if not (broadcasts(batches, B) and broadcasts(heads, H)):
            of_slopes = f"(H,) or (B, H) with B = {B} and" if packed is None else "(H,) with"
            of = "(buckets, H) with" if name == "relative" else of_slopes
            raise ValueError(f"{op}: {name} must be {of} H = {H}, got shape {tuple(bias.tensor.shape)}")
    _check_documents(op, mask, B, packed or lengths)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    arguments: dict[str, Any] = {"softcap": softcap}
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            raise TypeError(f"{op}: sinks must be a float tensor (H,), got {kind_of(sinks)}")
        arguments["sinks"] = sinks.to(dtype).contiguous()
    if mask.distance_biases:
        arguments["distance_bias"] = distance_table(mask.distance_biases, *lengths, zero, dtype)
    if mask.document_ids is not None:
        ids = document_numbers(*mask.document_ids)
        arguments |= dict(zip(("query_ids", "key_ids"), ids if packed is None else (t[0] for t in ids), strict=True))
    return arguments


def _check_documents(op: str, mask: AttentionMask, B: int, lengths: tuple[int, int]) -> None:
    for name, ids, length in zip(("query_ids", "key_ids"), mask.document_ids or (), lengths, strict=False):
        if not broadcasts(ids.shape[0], B) or ids.shape[1] != length:
            raise ValueError(
                f"{op}: documents: {name} must be (B, L) = ({B}, {int(length)}), or (1, {int(length)}) for all "
                f"sequences, got shape {tuple(ids.shape)}"
            )


def document_numbers(query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Convert ids to int32 in contiguous rows. Ids beyond int32 are renumbered.

    On a CPU this is done in every call. On a GPU, reading ids would wait for the device, so int64 ids are always
    renumbered. The new ids are cached (tensor_cache.py), so that all layers share them.
    """
    if needs_plain_ops():
        return query_ids, key_ids  # the reference only compares ids
    if query_ids.dtype != torch.int64 and key_ids.dtype != torch.int64:
        return query_ids.to(torch.int32).contiguous(), key_ids.to(torch.int32).contiguous()
    numbers = lambda: ranked(query_ids.long(), key_ids.long())  # noqa: E731
    if torch.compiler.is_compiling() or type(query_ids) is not Tensor or type(key_ids) is not Tensor:
        return numbers()
    if query_ids.device.type != "cpu":
        return get_or_compute(query_ids, ("documents",), (key_ids,), numbers)
    if in_transform() or not (_fit_int32(query_ids) and (key_ids is query_ids or _fit_int32(key_ids))):
        return numbers()
    queries = query_ids.to(torch.int32).contiguous()
    return queries, queries if key_ids is query_ids else key_ids.to(torch.int32).contiguous()


def _fit_int32(ids: Tensor) -> bool:
    if ids.dtype != torch.int64 or ids.numel() == 0:
        return True
    least, most = torch.aminmax(ids)
    return int(least) >= -(2**31) and int(most) < 2**31


def with_hint(error: ValueError, mask: AttentionMask, q: Any, k: Any) -> ValueError:
    """Error of the op in the terms of the public function: a keep mask is ``mask``, and the shapes that may have been
    given."""
    text = re.sub(r": (key_)?keep must be", ": mask must be", str(error))
    for name, t in (("mask", mask.keep_mask), ("mask", mask.key_keep_mask), ("bias", mask.additive_bias)):
        if t is None or f": {name} must be broadcastable" not in text:
            continue
        shape = tuple(t.shape)
        given = shape[next((n for n, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1) :]
        text += "" if given == shape else f", or {given} without the axes of size 1 in front"
        if name == "mask" and shape == (1, 1, q.shape[0], k.shape[2]):
            text += ". A (B, Lk) padding mask must be given as (B, 1, 1, Lk)."
        return ValueError(text)
    return error if text == str(error) else ValueError(text)


def check_ranges(mask: AttentionMask, q: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise unless intervals and unions fit, which become other parts before the op sees them.

    Args:
        full: B, H, Lq and Lk.
    """
    for name, t in (("begin", mask.first_keys), ("end", mask.end_keys)):
        if t is None:
            continue
        if not all(broadcasts(size, limit) for size, limit in zip(t.shape, full[:3])):
            raise ValueError(
                f"attention: intervals: {name} of shape {tuple(t.shape)} does not broadcast to (B, H, Lq) = {full[:3]}"
            )
        if t.device != q.device:
            raise ValueError(f"attention: intervals: {name} must be on {q.device}, got {t.device}")
    for one in (one for union in mask.unions for one in union):
        _check_in_union(one, q, full)


def _check_in_union(mask: AttentionMask, q: Tensor, full: tuple[int, int, int, int]) -> None:
    B, _, Lq, Lk = full
    check_ranges(mask, q, full)
    _check_documents("attention", mask, B, full[2:])
    refuse_keep_as_lengths(mask, Lk)
    for name, t in mask.tensors().items():
        if t.device != q.device:
            raise ValueError(f"attention: {name} must be on {q.device}, got {t.device}")
    for keep in (mask.keep_mask, mask.key_keep_mask):
        if keep is not None and not all(broadcasts(size, limit) for size, limit in zip(keep.shape, full)):
            shape = tuple(keep.shape)
            raise ValueError(f"attention: mask of shape {shape} does not broadcast to (B, H, Lq, Lk) = {full}")
    lengths = mask.key_lengths
    if lengths is None:
        return
    if not broadcasts(lengths.shape[0], B) or (lengths.dim() == 2 and not broadcasts(lengths.shape[1], Lq)):
        raise ValueError(
            f"attention: lengths of shape {tuple(lengths.shape)} fit neither (B,) = ({B},) nor (B, Lq) = ({B}, {Lq})"
        )
    if not can_read_values(lengths) or not is_plain_on_cpu(lengths) or lengths.numel() == 0:
        return
    low, high = map(int, torch.aminmax(lengths))
    if low < 0 or high > Lk:
        raise ValueError(f"attention: lengths must lie in [0, Lk = {Lk}], got {low} to {high}")


def refuse_keep_as_lengths(mask: AttentionMask, Lk: int) -> None:
    """Raise if lengths per query look like a keep mask."""
    lengths = mask.key_lengths
    if lengths is not None and not mask.has_clear_lengths and may_be_keep(lengths, Lk):
        raise ValueError(
            f"attention: lengths {tuple(lengths.shape)} of nothing but 0 and 1 can be read two ways: pass "
            "AttentionMask.keep(t[:, None, None]) if 1 means kept, or "
            "AttentionMask.keep(torch.arange(Lk) < t[:, None, :, None]) if they are lengths per query"
        )


def kernel_mask(mask: AttentionMask, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Keep mask and lengths of a checked call as the kernels take them, with the intervals and unions of the mask.

    Lengths are those of :func:`normal_lengths`. On a GPU they are cached, and so is what is made of intervals and
    unions with a tensor.
    """
    (B, _, Lq, _), Lk = q.shape, k.shape[2]
    own = None if mask.key_lengths is None else normal_lengths(mask.key_lengths, B, Lq, Lk)
    if not mask.has_ranges:
        return mask.keep_mask, own

    def compute() -> tuple[Tensor | None, Tensor | None]:
        end, keep = kernel_parts(mask, q.shape[2], k.shape[2], q.device)
        if mask.keep_mask is not None:
            keep = mask.keep_mask if keep is None else keep & mask.keep_mask
        if end is None:
            return keep, own
        if own is not None:
            lengths = own.long() if own.dim() == 2 else own.long().unsqueeze(1)
            # A length out of range in a compiled graph stays so, for the op to refuse it.
            out_of_range = (lengths < 0) | (lengths > Lk)
            end = torch.where(out_of_range, lengths, torch.minimum(end, lengths).clamp(0, Lk))
        else:
            end = end.clamp(0, Lk)
        return keep, end.to(torch.int32).expand(B, Lq).contiguous()

    if torch.compiler.is_compiling() or in_transform():
        return compute()
    read = replace(mask, additive_bias=None, distance_biases=())
    return on_its_tensors(read, ("kernel mask", B, Lq, Lk), compute)


def normal_lengths(lengths: Tensor, B: int, Lq: int, Lk: int) -> Tensor:
    """Convert lengths to (B,) or (B, Lq); those that do not fit are returned unchanged, for the op to refuse them.

    On a CPU the op reads the lengths and raises for values out of range. On a GPU, reading would wait for the device,
    so lengths become int32 and are clamped to [0, Lk]. The result is cached (tensor_cache.py), so that all layers share
    one tensor and the results that kernels cache on it.
    """
    if lengths.dim() == 2 and lengths.shape[1] != Lq:
        if lengths.shape[1] != 1:
            return lengths
        lengths = lengths.squeeze(1)
    if lengths.shape[0] != B:
        if lengths.shape[0] != 1:
            return lengths
        lengths = lengths.expand(B, *lengths.shape[1:])
    if lengths.device.type == "cpu" and (torch.compiler.is_compiling() or is_plain_on_cpu(lengths)):
        return lengths
    cut = lambda: clamped(lengths, 0, Lk).to(torch.int32)  # noqa: E731
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or in_transform():
        return cut()
    return get_or_compute(lengths, ("normal lengths", Lk), (), cut)


def door_lengths(mask: AttentionMask, q: Tensor, k: Any, by_triton: bool) -> Tensor | None:
    """Lengths for the op's door; those that do not fit are returned unchanged."""
    lengths = mask.key_lengths
    if lengths is None or not isinstance(k, Tensor) or q.dim() != 4 or k.dim() != 4:
        return lengths
    if lengths.dim() == 2:
        refuse_keep_as_lengths(mask, k.shape[2])
    return normal_lengths(lengths, q.shape[0], q.shape[2], k.shape[2]) if by_triton else lengths
