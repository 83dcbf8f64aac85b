"""Attention over packed sequences. The op itself is in csrc/ops/attention.cpp."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..attention_params import AttentionParams, PackedBatch
from ..masks import AttentionMask
from ..tracing import is_traced, sizes, unrecorded
from . import _eager, _seed
from ._attention_checks import (
    check_options,
    check_tensors,
    dropout_number,
    is_special,
    mask_by_position,
    scale_of,
    shape_error,
    special_arguments,
)
from ._names import unknown_names
from ._plain import implementation
from .attention import check_backend


class _Options(TypedDict, total=False):
    """The keyword arguments of :func:`attention_packed` that do not change what it returns."""

    max_q: int | None
    max_k: int | None
    mask: AttentionMask | None
    causal: bool
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    empty_rows: str


@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_logsumexp: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    return_logsumexp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_q: int | None = None,
    max_k: int | None = None,
    mask: AttentionMask | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    empty_rows: str = "uniform",
    return_logsumexp: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of every sequence of a packed batch to its own keys: ``transformer_fast.attention`` without padding.

    Args:
        q: (Tq, H, D), the queries of all sequences one after the other; dtypes as for ``attention``.
        k, v: (Tk, Hkv, D) and (Tk, Hkv, Dv), with ``H % Hkv == 0``.
        cu_seqlens_q: int32 (B + 1,) on q's device, rising from 0 to Tq: sequence b is rows ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. ``Packing.cu_seqlens`` of :func:`transformer_fast.pack`.
        cu_seqlens_k: the same for k and v; the same tensor for self-attention.
        max_q, max_k: lengths of the longest sequences, on the host. Left out, they are looked up, which on a GPU waits
            for it.
        mask: of ``AttentionMask``'s parts ``window``, ``causal``, ``alibi`` (H,) and ``relative``, counted inside each
            sequence, and ``documents``, whose ids are (1, Tq) and (1, Tk).
        causal: query i of a sequence sees its keys up to i; combines with ``mask``.
        scale, softcap, sinks, dropout_p: as for ``attention``. Dropout draws the mask that the padded batch would have:
            b is the sequence, and i and j count inside it.
        empty_rows: as for ``attention``; "uniform" is over the keys of the query's own sequence, and a query whose
            sequence has none gets 0 either way.
        return_logsumexp: also return the logsumexp of each query's scores.

    Returns:
        (Tq, H, Dv) in q's dtype; or a tuple of it and the logsumexp (H, Tq) in float32 (float64 for float64), -inf for
        a query without keys.

    Raises:
        TypeError: for non-tensors, non-float or mixed dtypes, or ``cu_seqlens`` that are not int32.
        ValueError: for shapes, devices or options that do not fit. That ``cu_seqlens`` rise from 0 to the number of
            tokens is checked on CPU; on a GPU, where looking would wait for it, they are trusted.
    """
    if unknown:
        raise unknown_names("attention_packed", unknown)
    if type(dropout_p) is not float:
        dropout_p = dropout_number("attention_packed", dropout_p)
    extension, by_triton = _eager.fast_path("attention", q)
    seed = None
    if dropout_p > 0.0 and isinstance(q, Tensor):
        seed = _seed.draw_launch_seed(q.device, by_triton)
    mask = mask_by_position("attention_packed", mask, causal)
    bounds = mask.causal_offset, mask.window_offset
    special = is_special(mask, softcap, sinks)
    if extension is not None and not (return_logsumexp or special):
        given = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, *bounds, scale, dropout_p, seed, empty_rows)
        out = extension.attention_packed(by_triton, *given)
        if out is not None:
            return out
    if isinstance(seed, int):
        seed = torch.full((1,), seed, dtype=torch.int64, device=q.device)

    autocast = _eager.autocast_enabled(q)
    _check_inputs(q, k, v, autocast)
    check_options("attention_packed", dropout_p, empty_rows)
    max_q = _check_sequences("q", cu_seqlens_q, q, max_q)
    max_k = _check_sequences("k", cu_seqlens_k, k, max_k)
    if sizes(cu_seqlens_q) != sizes(cu_seqlens_k):
        raise ValueError(
            "attention_packed: cu_seqlens_q and cu_seqlens_k must be of one number of sequences, got shapes "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    scale = scale_of("attention_packed", q, scale)
    backend = backends.resolve("attention", q.device, q.dtype)
    params = AttentionParams(
        causal=bounds[0],
        window=bounds[1],
        scale=scale,
        dropout_p=dropout_p,
        seed=seed,
        zero_empty_rows=empty_rows == "zero",
        packed=PackedBatch(cu_seqlens_q, cu_seqlens_k, max_q, max_k),
    )
    check_backend(backend, q, v)
    if special:
        tokens = q.shape[0], k.shape[0]
        options = special_arguments("attention_packed", q, mask, softcap, sinks, (max_q, max_k), max_q - 1, tokens)
        params = replace(params, **options)
    if backend == "reference":
        out, logsumexp = reference.attention.attention_packed(q, k, v, **params.keywords())
        return (out, logsumexp) if return_logsumexp else out
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    D, Dv = sizes(q)[-1], sizes(v)[-1]
    if Dv != D:  # zero columns change neither the scores nor the other columns of the output
        q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))
    out, logsumexp = implementation("attention_packed", backend)(q, k, v, **params.keywords(), backend=backend)
    out = out if Dv == sizes(out)[-1] else out[..., :Dv]
    return (out, logsumexp) if return_logsumexp else out


@unrecorded
def _check_inputs(q: Tensor, k: Tensor, v: Tensor, autocast: bool) -> None:
    tensors = {"q": q, "k": k, "v": v}
    check_tensors("attention_packed", tensors, dict.fromkeys(tensors, "(tokens, heads, head_dim)"), autocast)
    (_, H, D), (Tk, Hk, Dk), (Tv, Hv, _) = q.shape, k.shape, v.shape
    if Dk != D or D == 0:
        wrong = "q and k must share a head_dim of at least 1"
    elif Hk != Hv or Tk != Tv:
        wrong = "k and v must share tokens and heads"
    elif Hk == 0 or H % Hk != 0:
        wrong = "the heads of q must be a multiple of those of k and v"
    else:
        return
    raise shape_error("attention_packed", wrong, tensors)


def _check_sequences(name: str, cu_seqlens: Tensor, tokens: Tensor, longest: int | None) -> Any:
    """Raise unless the sequences tile the tokens (looked at on CPU only); the length of the longest."""
    full = f"cu_seqlens_{name}"
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        what = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"attention_packed: {full} must be an int32 tensor (sequences + 1,), got {what}")
    if cu_seqlens.dim() != 1 or sizes(cu_seqlens)[0] == 0:
        raise ValueError(f"attention_packed: {full} must be (sequences + 1,), got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != tokens.device:
        raise ValueError(f"attention_packed: {name} is on {tokens.device} but {full} on {cu_seqlens.device}")
    if torch.compiler.is_compiling() or is_traced() or cu_seqlens.device.type != "cpu":
        if longest is not None:
            return longest
        length = (cu_seqlens[1:] - cu_seqlens[:-1]).amax().long()  # ONNX has no diff
        return length if is_traced() else int(length)  # torch.jit.trace records sizes as tensors
    starts = cu_seqlens.tolist()
    # Reading a few numbers in Python is cheaper than a reduction.
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if starts[0] != 0 or starts[-1] != tokens.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(
            f"attention_packed: {full} must rise from 0 to {tokens.shape[0]}, the tokens of {name} "
            f"{tuple(tokens.shape)}, got {starts if len(starts) <= 16 else [*starts[:8], '...', *starts[-8:]]}"
        )
    found = max(lengths, default=0)
    if longest is not None and longest < found:
        raise ValueError(f"attention_packed: max_{name} is {longest}, but a sequence of {name} has {found} tokens")
    return found
