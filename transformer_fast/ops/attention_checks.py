"""Argument checks of the public attention functions, and conversion of mask parts for the kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends import in_transform
from ..masks import AttentionMask, and_causal
from ..masks.arguments import parts_beside
from ..masks.checks import broadcasts, check_dense, clamped, is_plain_on_cpu, kind_of, may_be_keep
from ..masks.distance import distance_table
from ..masks.kernel_parts import kernel_parts, on_its_tensors
from ..masks.parts import ranked
from ..tensor_cache import get, get_or_compute
from ..tracing import needs_plain_ops
from .argument_types import as_number
from .eager import autocast_enabled


def check_tensors(op: str, tensors: dict[str, Tensor], layouts: dict[str, str]) -> None:
    """Raise unless all are float tensors of one dtype (any, under autocast) on one device, of the rank of their layout.

    Args:
        op: the public name, for the messages.
        tensors: tensors by argument name.
        layouts: expected layout of each tensor, such as "(batch, heads, length, head_dim)".
    """
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() != layouts[name].count(",") + 1:
            raise ValueError(f"{op}: {name} must be {layouts[name]}, got shape {tuple(t.shape)}")
        if not t.is_floating_point():
            raise TypeError(f"{op}: {name} must be a float tensor, got {t.dtype}")
        check_dense(f"{op}: {name}", t)
    q, k, v = tensors.values()
    if not (q.dtype == k.dtype == v.dtype or autocast_enabled(q)):
        raise TypeError(f"{op}: {_listed(tensors)} must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"{op}: {_listed(tensors)} must be on one device, got {q.device}, {k.device}, {v.device}")


def shape_error(op: str, wrong: str, tensors: dict[str, Tensor]) -> ValueError:
    """Error with the problem and all shapes."""
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    return ValueError(f"{op}: {wrong}, got {shapes}")


def _listed(tensors: dict[str, Tensor]) -> str:
    *first, last = tensors
    return f"{', '.join(first)} and {last}"


def check_inputs(op: str, layout: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v fit each other.

    Args:
        layout: of each, such as "(batch, heads, length, head_dim)".
    """
    tensors = {"q": q, "k": k, "v": v}
    check_tensors(op, tensors, dict.fromkeys(tensors, layout))
    (H, D), (Hk, Dk) = (q.shape[1], q.shape[-1]), (k.shape[1], k.shape[-1])
    if q.dim() == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        wrong = "q, k and v must share the batch size"
    elif Dk != D or D == 0:
        wrong = "q and k must share a head_dim of at least 1"
    elif k.shape[:-1] != v.shape[:-1]:
        wrong = f"k and v must share {'heads and length' if q.dim() == 4 else 'tokens and heads'}"
    elif Hk == 0 or H % Hk != 0:
        wrong = "the heads of q must be a multiple of those of k and v"
    else:
        return
    raise shape_error(op, wrong, tensors)


def can_read_values(t: Tensor) -> bool:
    """Return True if values can be read without waiting for a device and no graph is being made."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def dropout_number(op: str, given: Any) -> float:
    """Convert the dropout probability to float; False, as in ``training and p``, is 0."""
    return 0.0 if given is False else as_number(op, "dropout_p", given)


def scale_of(op: str, q: Tensor, given: Any) -> float:
    """Factor of the scores: the given scale, or 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(q.shape[-1]) if given is None else as_number(op, "scale", given)


def check_options(op: str, dropout_p: float, empty_rows: str) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{op}: dropout_p must lie in [0, 1], got {dropout_p}")
    if empty_rows not in ("uniform", "zero"):
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

    Args:
        op: the public name, for the messages.
        q: (B, H, Lq, D), or for a packed batch (Tq, H, D).
        lengths: Lq and Lk, or max_seqlen_q and max_seqlen_k of a packed batch.
        zero: index in the distance table for equal query and key positions.
        packed: Tq and Tk of a packed batch; None for a padded batch.
    """
    softcap = None if softcap is None else as_number(op, "softcap", softcap)
    _check_special(op, q, mask, softcap, sinks, lengths, packed)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    arguments: dict[str, Any] = {"softcap": softcap}
    if sinks is not None:
        arguments["sinks"] = sinks.to(dtype).contiguous()
    if mask.distance_biases:
        arguments["distance_bias"] = distance_table(mask.distance_biases, *lengths, zero, dtype)
    if mask.document_ids is not None:
        ids = document_numbers(*mask.document_ids)
        arguments |= dict(zip(("query_ids", "key_ids"), ids if packed is None else (t[0] for t in ids), strict=True))
    return arguments


def _check_special(
    op: str,
    q: Tensor,
    mask: AttentionMask,
    softcap: float | None,
    sinks: Tensor | None,
    lengths: tuple[int, int],
    packed: tuple[int, int] | None,
) -> None:
    B, H = (1, q.shape[1]) if packed is not None else (q.shape[0], q.shape[1])
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"{op}: softcap must be above 0, or None for none, got {softcap}")
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            raise TypeError(f"{op}: sinks must be a float tensor (H,), got {kind_of(sinks)}")
        if sinks.shape != (H,):
            raise ValueError(f"{op}: sinks must be (H,) = ({H},), got shape {tuple(sinks.shape)}")
    for bias in mask.distance_biases:
        name = type(bias).__name__.lower()
        batches, heads = bias.heads()
        if not (broadcasts(batches, B) and broadcasts(heads, H)):
            of_slopes = "(H,) with" if packed is not None else f"(H,) or (B, H) with B = {B} and"
            of = "(buckets, H) with" if name == "relative" else of_slopes
            raise ValueError(f"{op}: {name} must be {of} H = {H}, got shape {tuple(bias.tensor.shape)}")
    _check_documents(op, mask, B, packed or lengths)
    given = {**AttentionMask(document_ids=mask.document_ids, distance_biases=mask.distance_biases).tensors()}
    for name, t in (given if sinks is None else given | {"sinks": sinks}).items():
        if t.device != q.device:
            raise ValueError(f"{op}: q is on {q.device} but {name} on {t.device}")


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


_PADDING_HINT = ". A (B, Lk) padding mask must be given as (B, 1, 1, Lk)."


def _as_given(t: Tensor) -> str:
    """Shape without the axes of size 1 in front, which a mask of fewer dimensions gets, and with them."""
    shape = tuple(t.shape)
    given = shape[next((n for n, size in enumerate(shape[:-1]) if size != 1), len(shape) - 1) :]
    return f"{shape}" if given == shape else f"{shape}, or {given} without the axes of size 1 in front,"


def check_mask(mask: AttentionMask, q: Tensor, full: tuple[int, int, int, int]) -> None:
    B, _, Lq, _ = full
    for name, t in (("mask", mask.keep_mask), ("mask", mask.key_keep_mask), ("bias", mask.additive_bias)):
        if t is not None and not all(broadcasts(size, limit) for size, limit in zip(t.shape, full)):
            raise ValueError(
                f"attention: {name} of shape {_as_given(t)} does not broadcast to (B, H, Lq, Lk) = {full}"
                + (_PADDING_HINT if name == "mask" and tuple(t.shape) == (1, 1, B, full[3]) else "")
            )
    lengths = mask.key_lengths
    if lengths is not None and (
        not broadcasts(lengths.shape[0], B) or (lengths.dim() == 2 and not broadcasts(lengths.shape[1], Lq))
    ):
        raise ValueError(
            f"attention: lengths of shape {tuple(lengths.shape)} fit neither (B,) = ({B},) nor (B, Lq) = ({B}, {Lq})"
        )
    for name, t in (("begin", mask.first_keys), ("end", mask.end_keys)):
        if t is not None and not all(broadcasts(size, limit) for size, limit in zip(t.shape, full[:3])):
            raise ValueError(
                f"attention: intervals: {name} of shape {tuple(t.shape)} does not broadcast to (B, H, Lq) = {full[:3]}"
            )
    for one in (one for union in mask.unions for one in union):
        check_mask(one, q, full)
        _check_documents("attention", one, B, full[2:])
        refuse_keep_as_lengths(one, full[3])
        if one.key_lengths is not None and can_read_values(one.key_lengths) and is_plain_on_cpu(one.key_lengths):
            _checked_lengths(one.key_lengths, *full[1:])
    ids = mask.document_ids or ()
    for t in (mask.keep_mask, mask.key_keep_mask, lengths, mask.additive_bias, mask.first_keys, mask.end_keys, *ids):
        if t is not None and t.device != q.device:
            raise ValueError(f"attention: q is on {q.device} but the mask or bias on {t.device}")


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

    Lengths are int32 (B,) or (B, Lq), in [0, Lk]. On a GPU they are cached, as :func:`normal_lengths` are, and so is
    what is made of intervals and unions with a tensor.
    """
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    own = None if mask.key_lengths is None else normal_lengths(mask.key_lengths, B, H, Lq, Lk)
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


def normal_lengths(lengths: Tensor, B: int, H: int, Lq: int, Lk: int) -> Tensor:
    """Convert lengths (B,) or (B, Lq) to int32 in [0, Lk]; H is only for the message.

    On a CPU every call reads the lengths and raises for values out of range; in a graph the op does that. On a GPU,
    reading would wait for the device, so lengths are clamped. The result is cached (tensor_cache.py), so that all
    layers share one tensor and the results that kernels cache on it.
    """
    if lengths.dim() == 2 and lengths.shape[1] != Lq:
        lengths = lengths.squeeze(1)
    if lengths.shape[0] != B:
        lengths = lengths.expand(B, *lengths.shape[1:])
    if not torch.compiler.is_compiling() and is_plain_on_cpu(lengths):
        return _checked_lengths(lengths, H, Lq, Lk)
    cut = lambda: clamped(lengths, 0, Lk).to(torch.int32)  # noqa: E731
    if torch.compiler.is_compiling() and lengths.device.type == "cpu":
        return clamped(lengths, -1, Lk + 1).to(torch.int32)  # what is out of range stays so in int32
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or in_transform():
        return cut()
    return get_or_compute(lengths, ("normal lengths", Lk), (), cut)


def fitting_lengths(mask: AttentionMask, q: Any, k: Any) -> Tensor | None:
    """:func:`normal_lengths` for an unchecked call; lengths that do not fit are returned unchanged."""
    lengths = mask.key_lengths
    if lengths is None or not isinstance(k, Tensor) or k.dim() != 4:
        return lengths
    Lk = k.shape[2]
    known = get(lengths, ("normal lengths", Lk)) if type(lengths) is Tensor else None
    if known is not None or not isinstance(q, Tensor) or q.dim() != 4:
        return lengths if known is None else known
    B, H, Lq, _ = q.shape
    refuse_keep_as_lengths(mask, Lk)
    fits = lengths.shape == (B,) or lengths.shape == (B, Lq)
    return normal_lengths(lengths, B, H, Lq, Lk) if fits else lengths


def _checked_lengths(lengths: Tensor, H: int, Lq: int, Lk: int) -> Tensor:
    if lengths.numel() > 0:
        # Reading a few numbers in Python is cheaper than two reductions.
        low, high = (f(lengths.tolist()) for f in (min, max)) if lengths.dim() == 1 else torch.aminmax(lengths)
        low, high = int(low), int(high)  # a tensor of 8 bits would be compared with the last 8 bits of Lk
        if low < 0 or high > Lk:
            fits_heads = low >= 0 and high <= H and Lq == Lk
            hint = f"; q with {H} heads looks like (B, L, H, D), expected (B, H, L, D)" if fits_heads else ""
            raise ValueError(f"attention: lengths must lie in [0, Lk = {Lk}], got {low} to {high}{hint}")
    return lengths if lengths.dtype == torch.int32 else lengths.to(torch.int32)
