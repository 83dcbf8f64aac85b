"""Attention over packed sequences. The op itself is in csrc/ops/attention.cpp."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_params import PackedBatch
from ..masks import AttentionMask
from ..masks.checks import broadcasts, kind_of
from . import eager
from .argument_types import as_number, check_flag, check_int
from .attention_call import choose_backend, differentiates_weights, params_of, results
from .attention_checks import (
    can_read_values,
    dropout_number,
    gives_zero,
    is_special,
    mask_by_position,
    special_arguments,
)
from .registry import Case, Draw, Op, register
from .unknown_names import unknown_names

NO_PADDED_PARTS = (None,) * 8
"""Arguments of the op's door from keep to sinks, for a call without them."""


class _Options(TypedDict, total=False):
    """Keyword arguments of :func:`attention_packed` that do not change the number of results."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    mask: AttentionMask | None
    bias: Tensor | Sequence[Tensor] | None
    causal: bool
    bottom_right: bool
    seqused_k: Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    empty_rows: str


@overload
def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_weights: Literal[False] = False, return_logsumexp: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    return_weights: Literal[False] = False, return_logsumexp: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, return_weights: bool | str,
    return_logsumexp: bool = False, **options: Unpack[_Options],
) -> Tensor | tuple[Any, ...]: ...  # fmt: skip
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: AttentionMask | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    seqused_k: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    empty_rows: str = "uniform",
    return_weights: bool | str = False,
    return_logsumexp: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Any, ...]:
    """Attention within each sequence of a packed batch: ``transformer_fast.attention`` without padding.

    Args:
        q: (Tq, H, D), the queries of all sequences, concatenated; dtypes as for ``attention``.
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv), with ``H % Hkv == 0``.
        cu_seqlens_q: int32 (B + 1,) on q's device, rising from 0 to Tq: sequence b is rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. :func:`transformer_fast.pack` returns it as ``Packing.cu_seqlens``.
        cu_seqlens_k: as ``cu_seqlens_q``, for k and v; the same tensor for self-attention.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences, as ints. None reads them from ``cu_seqlens``,
            which on a GPU waits for the device.
        mask: an ``AttentionMask`` with the parts ``window``, ``causal``, ``alibi`` (H,) and ``relative``, whose
            positions count within each sequence; ``documents``, with ids (1, Tq) and (1, Tk); and ``keep`` over keys
            only, (Tk,).
        bias: float, added to the scaled scores; ``-inf`` blocks a key. A list with one tensor (H, Lq, Lk), or (1, Lq,
            Lk) for all heads, per sequence; or one tensor (H | 1, pairs), the concatenation of these tensors flattened
            to (H | 1, Lq * Lk). The bias may require a gradient. No tensor of size Tq x Tk is made.
        causal: query i of a sequence sees the sequence's keys up to i; combines with ``mask``.
        bottom_right: align the last query of a sequence with its last key, as flash-attention does and a cache needs.
            The alignment matters if the numbers of queries and keys differ, and applies to ``causal``, ``window``,
            ``alibi`` and ``relative``.
        seqused_k: int32 (B,), number of keys in use per sequence, counted from its first key; later keys are not read.
            All keys by default.
        scale, softcap, sinks, dropout_p: as for ``attention``. Dropout draws the same mask as for the padded batch: b
            is the sequence, and i and j count within the sequence.
        empty_rows: as for ``attention``; "uniform" is over the keys of the query's own sequence. A query whose sequence
            has no keys gets 0 in both modes.
        return_weights: True also returns the weights before dropout, "dropped" those after dropout. The reference
            computes the weights sequence by sequence: for inspection, not for training.
        return_logsumexp: also return the logsumexp of each query's scores.

    Returns:
        (Tq, H, Dv) in q's dtype; or a tuple of this result, a list of the weights (H, Lq, Lk) of each sequence if asked
        for, and the logsumexp (H, Tq) in float32 (float64 for float64) if asked for: -inf for a query without keys.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or ``cu_seqlens`` that are not int32.
        ValueError: for shapes, devices or options that do not fit. On a CPU, in graphs too, the values of
            ``cu_seqlens`` (rising from 0 to the number of tokens) and of ``seqused_k``, and the size of a bias, are
            checked. On a GPU, reading these values would wait for the device. The kernels clamp them, and a row that no
            sequence covers gets 0 (logsumexp -inf) and no gradient.

    Example:
        >>> q, k, v = torch.randn(3, 7, 4, 64)  # (T, H, D) each: sentences of 5 and of 2 tokens
        >>> starts = torch.tensor([0, 5, 7], dtype=torch.int32)
        >>> tfast.attention_packed(q, k, v, starts, starts, causal=True).shape
        torch.Size([7, 4, 64])
    """
    if unknown:
        raise unknown_names(attention_packed, unknown)
    if not isinstance(q, Tensor):
        raise TypeError(f"attention_packed: q must be a tensor, got {type(q).__name__}")
    if type(dropout_p) is not float:
        dropout_p = dropout_number("attention_packed", dropout_p)
    if scale is not None and type(scale) is not float:
        scale = as_number("attention_packed", "scale", scale)
    mask = mask_by_position("attention_packed", mask, causal, takes_keep=True)
    if cu_seqlens_q is None:
        raise TypeError("attention_packed: cu_seqlens_q must be an int32 tensor (sequences + 1,), got NoneType")
    special = is_special(mask, softcap, sinks) or mask.key_keep_mask is not None
    plain = bias is None and not (return_weights or return_logsumexp or special)
    door, by_triton, seed = eager.fast_path("attention_packed", q, dropout_p, plain)
    offset, zero = mask.causal_offset, gives_zero("attention_packed", empty_rows)
    if door is not None:
        options = offset, mask.window_offset, None, scale, dropout_p, seed, zero
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, None, bottom_right
        try:
            out = door.attention(by_triton, q, k, v, 0, *NO_PADDED_PARTS, *sequences, *options)
        except TypeError as error:
            raise TypeError(str(error).replace("attention:", "attention_packed:", 1)) from None
        if out is not None:
            return out
    needs = differentiates_weights(q, k, mask, sinks, return_weights)
    backend = choose_backend("attention_packed", (q, k, v), return_logsumexp, return_weights, needs)
    check_flag("attention_packed", "bottom_right", bottom_right)
    if return_weights and q.is_meta:
        raise ValueError(
            "attention_packed: return_weights needs the lengths of the sequences, which a meta tensor has not"
        )
    longest_q, longest_k = _longest("q", cu_seqlens_q, q, max_seqlen_q), _longest("k", cu_seqlens_k, q, max_seqlen_k)
    packed = PackedBatch(cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, seqused_k, bottom_right=bottom_right)
    if bias is not None:
        bias, packed = _packed_bias(bias, packed, q)
    parts: dict[str, Any] = {"causal": offset, "dropout_p": dropout_p, "zero_empty_rows": zero}
    if special:
        lengths, tokens = (longest_q, longest_k), (q.shape[0], k.shape[0])
        mask, last = _kept_as_documents(mask, *tokens), (longest_k if bottom_right else longest_q) - 1
        parts |= special_arguments("attention_packed", q, mask, softcap, sinks, lengths, last, tokens)
    params = params_of(q, mask, scale, seed, bias=bias, packed=packed, **parts)
    return results(backend, (q, k, v), params, return_weights, return_logsumexp)


def _kept_as_documents(mask: AttentionMask, queries: int, keys: int) -> AttentionMask:
    """Replace a keep mask over keys by documents: kept keys get the document of the queries."""
    keep = mask.key_keep_mask
    if keep is None:
        return mask
    if keep.shape != (1, 1, 1, keys):
        raise ValueError(
            f"attention_packed: a keep mask must be of keys alone, (Tk,) = ({keys},), got shape {tuple(keep.shape)}"
        )
    of_queries = torch.zeros((1, queries), dtype=torch.int32, device=keep.device)
    blocked = (~keep[0, 0]).to(torch.int32)
    return replace(mask, key_keep_mask=None) & AttentionMask.documents(of_queries, blocked)


def _packed_bias(bias: Any, sequences: PackedBatch, q: Tensor) -> tuple[Tensor, PackedBatch]:
    """The bias as (H | 1, pairs), and the sequences with the start of each sequence's part of the bias."""
    H, B = q.shape[1], sequences.cu_seqlens_q.shape[0] - 1
    queries, keys = sequences.query_lengths.long(), sequences.stored_keys.long()
    if not isinstance(bias, Tensor | Iterable):
        raise TypeError(f"attention_packed: bias must be a tensor, or one tensor per sequence, got {kind_of(bias)}")
    if not isinstance(bias, Tensor):
        parts = list(bias)
        if len(parts) != B:
            raise ValueError(f"attention_packed: bias must have one tensor per sequence, {B} in all, got {len(parts)}")
        look = can_read_values(queries)
        for b, part in enumerate(parts):
            if not isinstance(part, Tensor) or not part.is_floating_point():
                raise TypeError(f"attention_packed: bias[{b}] must be a float tensor (H, Lq, Lk), got {kind_of(part)}")
            fits = part.dim() == 3 and broadcasts(part.shape[0], H) and part.shape[0] == parts[0].shape[0]
            if not fits or (look and part.shape[1:] != (int(queries[b]), int(keys[b]))):
                lengths = f", Lq = {int(queries[b])} and Lk = {int(keys[b])}" if look else ""
                raise ValueError(
                    f"attention_packed: bias[{b}] must be (H, Lq, Lk), or (1, Lq, Lk) if all are, with H = {H}"
                    f"{lengths}, got shape {tuple(part.shape)}"
                )
        bias = torch.cat([part.flatten(1) for part in parts], 1) if parts else q.new_zeros(1, 0)
    if not bias.is_floating_point():
        raise TypeError(f"attention_packed: bias must be a float tensor (H, pairs), got {bias.dtype}")
    starts = F.pad((queries * keys).cumsum(0), (1, 0))
    pairs = int(starts[-1]) if can_read_values(starts) else bias.shape[-1]
    if bias.dim() != 2 or not broadcasts(bias.shape[0], H) or bias.shape[1] != pairs:
        raise ValueError(
            f"attention_packed: bias must be (H, pairs) or (1, pairs) with H = {H} and pairs = {int(pairs)}, the sum "
            f"of Lq * Lk over the sequences, got shape {tuple(bias.shape)}"
        )
    return bias.contiguous(), replace(sequences, bias_starts=starts)


def _longest(name: str, cu_seqlens: Tensor, tokens: Tensor, longest: int | None) -> Any:
    """Length of the longest sequence: as given, or read from the boundaries, which the op checks."""
    full = f"cu_seqlens_{name}"
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"attention_packed: {full} must be a tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"attention_packed: {full} must be a tensor of int32, got {cu_seqlens.dtype}")
    if cu_seqlens.device != tokens.device:
        raise ValueError(f"attention_packed: {full} must be on {tokens.device}, got {cu_seqlens.device}")
    if longest is not None:
        check_int("attention_packed", f"max_seqlen_{name}", longest)
        if not can_read_values(cu_seqlens):
            return longest
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"attention_packed: {full} must be (sequences + 1,), got shape {list(cu_seqlens.shape)}")
    # ONNX has no diff. The first number is 0, the longest of no sequences.
    found = int((cu_seqlens - torch.cat((cu_seqlens[:1], cu_seqlens[:-1]))).amax())
    return found if longest is None else min(found, longest)  # the op refuses one that is too small


def _cases(draw: Draw) -> Iterator[Case]:
    starts = torch.tensor([0, 45, 46, 90], dtype=torch.int32, device=draw.device)
    packed = partial(attention_packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, dropout_p=0.1)
    inputs = {name: draw.normal(90, 4, 40) for name in "qkv"}
    yield Case("attention_packed", "look-ahead, dropout 0.1", inputs, packed)


register(Op("attention_packed", "attention", "triton", (), _cases))
