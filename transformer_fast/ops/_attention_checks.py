"""What the public functions of attention check, and the mask's parts as the kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..masks import AttentionMask, and_causal
from ..tensor_cache import get, get_or_compute
from ..tracing import is_traced, unrecorded


def check_tensors(op: str, tensors: dict[str, Tensor], layouts: dict[str, str], autocast: bool) -> None:
    """Raise unless all are float tensors of one dtype (any, under autocast) on one device, of the rank of their layout.

    Args:
        op: the public name, for the messages.
        tensors: by the name of the argument.
        layouts: what each must be, such as "(batch, heads, length, head_dim)".
    """
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
        if t.dim() != layouts[name].count(",") + 1:
            raise ValueError(f"{op}: {name} must be {layouts[name]}, got shape {tuple(t.shape)}")
        if not t.is_floating_point():
            raise TypeError(f"{op}: {name} must be a float tensor, got {t.dtype}")
    q, k, v = tensors.values()
    if not (q.dtype == k.dtype == v.dtype or autocast):
        raise TypeError(f"{op}: {_listed(tensors)} must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"{op}: {_listed(tensors)} must be on one device, got {q.device}, {k.device}, {v.device}")


def shape_error(op: str, wrong: str, tensors: dict[str, Tensor]) -> ValueError:
    """What is wrong, and every shape."""
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
    return ValueError(f"{op}: {wrong}, got {shapes}")


def _listed(tensors: dict[str, Tensor]) -> str:
    *first, last = tensors
    return f"{', '.join(first)} and {last}"


@unrecorded
def check_inputs(q: Tensor, k: Tensor, v: Tensor, autocast: bool) -> None:
    tensors = {"q": q, "k": k, "v": v}
    check_tensors("attention", tensors, dict.fromkeys(tensors, "(batch, heads, length, head_dim)"), autocast)
    (B, H, _, D), (Bk, Hk, Lk, Dk), (Bv, Hv, Lv, _) = q.shape, k.shape, v.shape
    if not B == Bk == Bv:
        wrong = "q, k and v must share the batch size"
    elif Dk != D or D == 0:
        wrong = "q and k must share a head_dim of at least 1"
    elif Hk != Hv or Lk != Lv:
        wrong = "k and v must share heads and length"
    elif Hk == 0 or H % Hk != 0:
        wrong = "the heads of q must be a multiple of those of k and v"
    else:
        return
    raise shape_error("attention", wrong, tensors)


def check_options(op: str, dropout_p: float, empty_rows: str) -> None:
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"{op}: dropout_p must lie in [0, 1], got {dropout_p}")
    if empty_rows not in ("uniform", "zero"):
        raise ValueError(f'{op}: empty_rows must be "uniform" or "zero", got {empty_rows!r}')


def bounds_of(op: str, mask: AttentionMask | None, causal: bool) -> tuple[int | None, int | None]:
    """The causal and the window offset of a call whose mask may have no other part."""
    if not isinstance(causal, bool):
        raise TypeError(f"{op}: causal must be True or False, got {causal!r}")
    if mask is None:
        return and_causal(None, causal), None
    if not isinstance(mask, AttentionMask):
        raise TypeError(f"{op}: mask must be an AttentionMask, got {type(mask).__name__}")
    if mask.tensors():
        raise ValueError(
            f"{op}: mask may say AttentionMask.window and AttentionMask.causal alone, got {', '.join(mask.tensors())}"
        )
    return and_causal(mask.causal_offset, causal), mask.window_offset


@unrecorded
def check_mask(mask: AttentionMask, q: Tensor, full: tuple[int, int, int, int]) -> None:
    B, _, Lq, _ = full
    for name, t in (("mask", mask.keep_mask), ("mask", mask.key_keep_mask), ("bias", mask.additive_bias)):
        if t is not None and any(size not in (1, limit) for size, limit in zip(t.shape, full)):
            raise ValueError(
                f"attention: {name} of shape {tuple(t.shape)} does not broadcast to (B, H, Lq, Lk) = {full}. "
                "A (B, Lk) padding mask must be given as (B, 1, 1, Lk)."
            )
    lengths = mask.key_lengths
    if lengths is not None and (
        lengths.shape[0] not in (1, B) or (lengths.dim() == 2 and lengths.shape[1] not in (1, Lq))
    ):
        raise ValueError(
            f"attention: lengths of shape {tuple(lengths.shape)} fit neither (B,) = ({B},) nor (B, Lq) = ({B}, {Lq})"
        )
    for t in (mask.keep_mask, mask.key_keep_mask, lengths, mask.additive_bias):
        if t is not None and t.device != q.device:
            raise ValueError(f"attention: q is on {q.device} but the mask or bias on {t.device}")


def normal_lengths(lengths: Tensor, B: int, Lq: int, Lk: int) -> Tensor:
    """int32 lengths (B,) or (B, Lq) in [0, Lk]. On CPU others are an error; on a GPU, where looking would wait for it,
    they are cut. The result is kept, so that every layer has the same tensor, and what kernels keep on it is found."""
    if is_traced():
        return lengths  # plain operators take them as they are
    if lengths.dim() == 2 and lengths.shape[1] != Lq:
        lengths = lengths.squeeze(1)
    if lengths.shape[0] != B:
        lengths = lengths.expand(B, *lengths.shape[1:])
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or backends.in_transform():
        return lengths.clamp(0, Lk).to(torch.int32)
    return get_or_compute(lengths, ("normal lengths", Lk), (), lambda: _checked_lengths(lengths, Lk))


def fitting_lengths(lengths: Tensor | None, q: Any, k: Any) -> Tensor | None:
    """:func:`normal_lengths` of an unchecked call, or the lengths themselves where they do not fit it."""
    if lengths is None or not isinstance(k, Tensor) or k.dim() != 4:
        return lengths
    Lk = k.shape[2]
    known = get(lengths, ("normal lengths", Lk)) if type(lengths) is Tensor else None
    if known is not None or not isinstance(q, Tensor) or q.dim() != 4:
        return lengths if known is None else known
    B, _, Lq, _ = q.shape
    return normal_lengths(lengths, B, Lq, Lk) if lengths.shape in ((B,), (B, Lq)) else lengths


def _checked_lengths(lengths: Tensor, Lk: int) -> Tensor:
    if lengths.device.type != "cpu":
        return lengths.clamp(0, Lk).to(torch.int32)
    if lengths.numel() > 0:
        # Reading a few numbers in Python is cheaper than two reductions.
        low, high = (f(lengths.tolist()) for f in (min, max)) if lengths.dim() == 1 else torch.aminmax(lengths)
        if low < 0 or high > Lk:
            raise ValueError(f"attention: lengths must lie in [0, Lk = {Lk}], got {int(low)} to {int(high)}")
    return lengths if lengths.dtype == torch.int32 else lengths.to(torch.int32)
