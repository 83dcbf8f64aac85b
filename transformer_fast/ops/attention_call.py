"""Choice of the kernels, and the way to the reference or to the op, for all public attention functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends, extension, reference
from ..attention_params import AttentionParams
from ..masks import AttentionMask
from ..masks.checks import check_dense
from . import seeds
from .argument_types import check_flag
from .attention_checks import scale_of
from .eager import check
from .registry import implementation

MAX_TRITON_HEAD_DIM = 256


def choose_backend(
    op: str, inputs: tuple[Tensor, ...], return_logsumexp: bool, return_weights: bool | str = False, needs: bool = False
) -> str:
    """Kernels of a call of the public function `op`; raise unless the options that the op does not see fit.

    Args:
        op: the public name, for the messages.
        inputs: q, k and v.
        return_logsumexp, return_weights: as given.
        needs: result of :func:`differentiates_weights`.
    """
    if return_weights not in (False, True, "dropped"):
        raise ValueError(f'{op}: return_weights must be False, True or "dropped", got {return_weights!r}')
    check_flag(op, "return_logsumexp", return_logsumexp)
    for name, t in zip("qkv", inputs):
        if isinstance(t, Tensor):
            check_dense(f"{op}: {name}", t)
    q, *_ = inputs
    backend = backends.resolve(op, q.device, q.dtype)
    return backends.for_gradient_of_weights(op, backend) if needs else backend


def differentiates_weights(
    q: Tensor, k: Tensor, mask: AttentionMask, sinks: Tensor | None, return_weights: bool | str
) -> bool:
    """Return True for a call whose returned weights may get a gradient."""
    if not return_weights or not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in (q, k, sinks, *mask.tensors().values()) if isinstance(t, Tensor))


def params_of(
    q: Tensor, mask: AttentionMask, scale: float | None, seed: Tensor | None, **fields: Any
) -> AttentionParams:
    """Arguments of the op for queries, the window of a mask, a scale and a seed as given, and all other fields."""
    window, seed = mask.window_offset, seeds.on_device_of(q, seed)
    return AttentionParams(window=window, scale=scale_of(q, scale), seed=seed, **fields)


def results(
    backend: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    params: AttentionParams,
    return_weights: bool | str = False,
    return_logsumexp: bool = False,
) -> Any:
    """Return the output; or a tuple of it, the weights if asked for, and the logsumexp if asked for."""
    if backend == "reference":
        _check_by_op(*inputs, params)
        out, weights, logsumexp = by_reference(*inputs, params, return_weights)
    else:
        out, weights, logsumexp = _by_op(backend, *inputs, params, return_weights)
    more = [weights] if return_weights else []
    more += [logsumexp] if return_logsumexp else []
    return (out, *more) if more else out


def _by_op(
    backend: str, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, return_weights: bool | str
) -> tuple[Tensor, Any, Tensor]:
    weights = None
    if return_weights and params.packed is not None:
        weights = by_reference(q, k, v, params, return_weights)[1]
    op = "attention" if params.cached is None else "attention_decode"
    out, logsumexp, *_ = implementation(op, backend)(q, k, v, **params.keywords())
    if return_weights and params.packed is None:
        of_weights = params if return_weights == "dropped" else replace(params, dropout_p=0.0, seed=None)
        weights = implementation("attention_weights", backend)(q, k, **of_weights.keywords())
    return out, weights, logsumexp


def _check_by_op(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> None:
    """Raise for a wrong call, by the op's own check."""
    if torch.compiler.is_compiling() or not extension.load():
        return
    op = "attention" if params.cached is None else "attention_decode"
    keywords = params.keywords()
    schema = implementation(op, "native")._schema.arguments[3:]  # type: ignore[attr-defined]
    check(op, q, k, v, *(keywords.get(argument.name, argument.default_value) for argument in schema))


def check_head_dim(op: str, backend: str, q: Tensor, v: Tensor) -> None:
    """Raise if the kernels of a backend cannot compute this call of a public function."""
    if backend == "triton" and max(q.shape[-1], v.shape[-1]) > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"{op}: the Triton kernels take a head_dim up to {MAX_TRITON_HEAD_DIM}, got q {tuple(q.shape)} and "
            f'v {tuple(v.shape)}; backend("reference") takes any'
        )


def by_reference(
    q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, return_weights: bool | str = True
) -> tuple[Tensor, Any, Tensor]:
    """Output, weights and logsumexp of the reference. Decoding has no weights; a packed batch has a list of them."""
    given = params.keywords()
    if params.packed is not None:
        out, pairs, logsumexp = reference.attention.attention_packed(q, k, v, **given)
        return out, [pair[return_weights == "dropped"] for pair in pairs], logsumexp
    if params.cached is not None:
        out, logsumexp = reference.attention.attention_decode(q, k, v, **given)
        return out, None, logsumexp
    empty_rows = "zero" if given.pop("zero_empty_rows") else "uniform"
    out, weights, logsumexp = reference.attention.attention(q, k, v, **given, empty_rows=empty_rows)
    return out, dropped(weights, params) if return_weights == "dropped" else weights, logsumexp


def dropped(weights: Tensor, params: AttentionParams) -> Tensor:
    """Weights (B, H, Lq, Lk) after dropout."""
    if params.dropout_p == 0.0 or params.seed is None:
        return weights
    given = params.seed
    seed = given if isinstance(given, Tensor) else torch.full((1,), given, device=weights.device)
    kept = reference.dropout.attention_keep(seed, params.dropout_p, *weights.shape)
    return (weights * reference.dropout.rescale(params.dropout_p)).masked_fill(~kept, 0.0)
