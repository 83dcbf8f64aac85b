"""A call of a public attention function in the terms that all of them share, and its way to the reference or to the
op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import backends, reference
from ..attention_params import AttentionParams
from ..masks import AttentionMask
from . import seeds
from .argument_types import check_flag
from .attention_checks import check_options, scale_of, special_arguments
from .registry import implementation

MAX_TRITON_HEAD_DIM = 256


@dataclass(slots=True, eq=False)
class Call:
    """A call that no fast path took.

    Attributes:
        op: name of the public function, which is that of the op and of the reference.
        q, k, v: queries, keys and values; or the caches of keys and of values.
        mask: the mask, with what ``bias=`` and, but for padded batches, ``causal=`` add.
        causal: offset of the look-ahead mask; None for none.
        special: True if there are parts for :meth:`special_arguments`.
        seed: of the dropout, as drawn.
        backend: set by :meth:`choose_backend`.
        scale, softcap, sinks, dropout_p, empty_rows, return_weights, return_logsumexp: as given.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    causal: int | None
    special: bool
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    empty_rows: str = "zero"
    return_weights: bool | str = False
    return_logsumexp: bool = False
    backend: str = ""

    def choose_backend(self) -> None:
        """Choose the kernels of a call with checked inputs; raise unless the options and the kernels fit."""
        check_options(self.op, self.dropout_p, self.empty_rows)
        if self.return_weights not in (False, True, "dropped"):
            raise ValueError(f'{self.op}: return_weights must be False, True or "dropped", got {self.return_weights!r}')
        check_flag(self.op, "return_logsumexp", self.return_logsumexp)
        self.backend = backends.resolve(self.op, self.q.device, self.q.dtype)
        check_head_dim(self.op, self.backend, self.q, self.v)

    def special_arguments(
        self, lengths: tuple[int, int], zero: int, packed: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """Documents, distances, softcap and sinks as fields of AttentionParams; no fields without such parts."""
        return special_arguments(self.op, self.q, self.mask, self.softcap, self.sinks, lengths, zero, packed)

    def params(self, **parts: Any) -> AttentionParams:
        """Arguments of the op.

        Args:
            parts: fields of AttentionParams that depend on the layout of the batch.
        """
        return AttentionParams(
            causal=self.causal,
            window=self.mask.window_offset,
            scale=scale_of(self.op, self.q, self.scale),
            dropout_p=self.dropout_p,
            seed=seeds.on_device_of(self.q, self.seed),
            zero_empty_rows=self.empty_rows == "zero",
            **parts,
        )

    def results(self, params: AttentionParams) -> Any:
        """Return the output; or a tuple of it, the weights if asked for, and the logsumexp if asked for."""
        if self.backend == "reference":
            out, weights, logsumexp = by_reference(self.q, self.k, self.v, params, self.return_weights)
        else:
            out, weights, logsumexp = self._by_op(params)
        more = [weights] if self.return_weights else []
        more += [logsumexp] if self.return_logsumexp else []
        return (out, *more) if more else out

    def _by_op(self, params: AttentionParams) -> tuple[Tensor, Any, Tensor]:
        q, k, v, weights = self.q, self.k, self.v, None
        if self.return_weights and params.packed is not None:
            weights = by_reference(q, k, v, params, self.return_weights)[1]
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        D, Dv = q.shape[-1], v.shape[-1]
        if Dv != D:  # zero columns change neither the scores nor the other columns of the output
            q, k, v = (F.pad(t, (0, max(D, Dv) - t.shape[-1])) for t in (q, k, v))
        out, logsumexp = implementation(self.op, self.backend)(q, k, v, **params.keywords())
        out = out[..., :Dv] if Dv < D else out
        if self.return_weights and params.packed is None:
            of_weights = params if self.return_weights == "dropped" else replace(params, dropout_p=0.0, seed=None)
            compute = implementation("attention_weights", self.backend)
            weights = compute(q, k, **of_weights.keywords())
        return out, weights, logsumexp


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
