"""A call of a public attention function in the terms that all of them share, and its way to the reference or to the
op."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import backends, extension, reference
from ..attention_params import AttentionParams
from ..masks import AttentionMask
from ..masks.checks import check_dense
from . import seeds
from .argument_types import check_flag
from .attention_checks import scale_of, special_arguments
from .eager import check
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
        scale, softcap, sinks, dropout_p, return_weights, return_logsumexp: as given.
        zero_empty_rows: True for empty_rows="zero".
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
    zero_empty_rows: bool = True
    return_weights: bool | str = False
    return_logsumexp: bool = False
    backend: str = ""

    def choose_backend(self) -> None:
        """Choose the kernels; raise unless the options that the op does not see fit."""
        if self.return_weights not in (False, True, "dropped"):
            raise ValueError(f'{self.op}: return_weights must be False, True or "dropped", got {self.return_weights!r}')
        check_flag(self.op, "return_logsumexp", self.return_logsumexp)
        for name, t in {"q": self.q, "k": self.k, "v": self.v}.items():
            if isinstance(t, Tensor):
                check_dense(f"{self.op}: {name}", t)
        self.backend = backends.resolve(self.op, self.q.device, self.q.dtype)
        if self.differentiates_weights():
            self.backend = backends.for_gradient_of_weights(self.op, self.backend)

    def differentiates_weights(self) -> bool:
        """Return True for a call whose returned weights may get a gradient."""
        given = (self.q, self.k, self.sinks, *self.mask.tensors().values())
        needed = any(t.requires_grad for t in given if isinstance(t, Tensor))
        return bool(self.return_weights) and torch.is_grad_enabled() and needed

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
            scale=scale_of(self.q, self.scale),
            dropout_p=self.dropout_p,
            seed=seeds.on_device_of(self.q, self.seed),
            zero_empty_rows=self.zero_empty_rows,
            **parts,
        )

    def results(self, params: AttentionParams) -> Any:
        """Return the output; or a tuple of it, the weights if asked for, and the logsumexp if asked for."""
        if self.backend == "reference":
            _check_by_op(self.q, self.k, self.v, params)
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
        op = "attention" if params.cached is None else "attention_decode"
        out, logsumexp, *_ = implementation(op, self.backend)(q, k, v, **params.keywords())
        if self.return_weights and params.packed is None:
            of_weights = params if self.return_weights == "dropped" else replace(params, dropout_p=0.0, seed=None)
            compute = implementation("attention_weights", self.backend)
            weights = compute(q, k, **of_weights.keywords())
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
