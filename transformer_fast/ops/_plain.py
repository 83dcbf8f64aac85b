"""The ops in PyTorch's own operators, for graphs that run without this package: torch.jit.trace, ONNX, ATen.

Each function has the arguments and results of the op with the same name (csrc/ops). Sizes may be symbolic. The formulas
are those of :mod:`transformer_fast.reference`, with one exception: the reference needs a second matrix product to keep
a NaN in a blocked key away from queries that do not see the key. The functions here let the NaN through, as eager
PyTorch does. Dropout, which is for training, is missing. ``_plain_attention.py`` has the functions of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import extension, reference
from ..tracing import refuse_dropout, sizes
from ._plain_attention import attention, attention_decode, attention_packed, attention_weights


def implementation(op: str, backend: str) -> Callable[..., Any]:
    """Function that computes ``transformer_fast::<op>``: for the backend "plain" the function of this module, else the
    op."""
    if backend == "plain":
        return _PLAIN[op]
    return getattr(torch.ops.transformer_fast, op).default


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The ops in PyTorch's own operators, for ``torch.export``: ``program.run_decompositions(decompositions())``.

    The decomposed program consists of ATen operators. The program runs, compiles and converts without this package. The
    table covers every op that a forward pass without dropout can export. The table is empty without the extension,
    because then no program can hold its ops.

    Example:
        >>> inputs = (torch.randn(2, 8),)
        >>> program = torch.export.export(tfast.layers.Norm(8), inputs)
        >>> "transformer_fast" in str(program.graph)
        True
        >>> "transformer_fast" in str(program.run_decompositions(tfast.decompositions()).graph)
        False
    """
    if not extension.load():
        return {}
    ops = {name: getattr(torch.ops.transformer_fast, name).default for name in _PLAIN}
    return {op: _by_position(op, _PLAIN[name]) for name, op in ops.items()}


def _by_position(op: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """Function of an op that takes positional arguments in the order of the op's schema, as graphs pass them."""
    names = [argument.name for argument in op._schema.arguments]

    def call(*given: Any, **named: Any) -> Any:
        return function(**dict(zip(names, given, strict=False)), **named)

    return call


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm (..., d), the normed sum (empty if x itself was normed), and per row the mean (empty for "rms") and
    factor.

    LayerNorm is PyTorch's own operator, because other runtimes have a kernel for it.
    """
    refuse_dropout("layer_norm", dropout_p)
    summed = x if residual is None else residual + x
    if kind != "layer" or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        out = reference.norm.layer_norm(summed, weight, bias, eps, kind=kind)
    else:
        out = F.layer_norm(summed, sizes(summed)[-1:], weight, bias, eps)
    assert isinstance(out, Tensor)
    wide = summed if summed.dtype == torch.float64 else summed.float()
    if kind == "std":
        factor = 1 / (wide.std(-1) + eps)
    else:
        factor = torch.rsqrt((wide.square().mean(-1) if kind == "rms" else wide.var(-1, unbiased=False)) + eps)
    mean = wide.new_empty(0) if kind == "rms" else wide.mean(-1).flatten()
    return out, x.new_empty(0) if residual is None else summed, mean, factor.flatten()


def dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, p: float, seed: Tensor | None
) -> Tensor:
    """Compute ``[residual +] [relu] (x [+ bias])`` (..., d)."""
    refuse_dropout("dropout", p)
    return reference.dropout.dropout(x, 0.0, None, bias=bias, residual=residual, relu=relu)


def embed(
    ids: Tensor,
    weight: Tensor,
    table: Tensor | None,
    scale: float,
    offset: int,
    offsets: Tensor | None,
    padding_idx: int | None,
    dropout_p: float,
    seed: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """Compute ``weight[ids] * scale + table[offset : offset + L]`` (..., L, d)."""
    refuse_dropout("embed", dropout_p)
    start = offset if offsets is None else offsets + offset
    return reference.embedding.embed(ids, weight, table, scale=scale, offset=start, padding_idx=padding_idx)


def add_positional(
    x: Tensor, table: Tensor, offset: int, offsets: Tensor | None, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """Compute ``x + table[offset : offset + L]`` (..., L, d)."""
    refuse_dropout("add_positional", dropout_p)
    return reference.embedding.add_positional(x, table, offset if offsets is None else offsets + offset)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    smoothing: float,
    ignore_index: int,
    mean: bool,
    gradients: list[bool],
    chunk_elements: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, a scalar; the gradients and their scale, which the op returns too, are empty here."""
    if any(gradients):
        raise RuntimeError(
            "linear_cross_entropy: a graph of plain operators computes the loss, not its gradients; expected inputs "
            "that require no gradients"
        )
    reduction = "mean" if mean else "sum"
    loss = reference.cross_entropy.linear_cross_entropy(
        x, weight, bias, target, label_smoothing=smoothing, ignore_index=ignore_index, reduction=reduction
    )
    return loss, x.new_empty(0), weight.new_empty(0), weight.new_empty(0), torch.zeros_like(loss)


def linear_cross_entropy_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    smoothing: float,
    ignore_index: int,
    chunk_elements: int,
) -> Tensor:
    """Loss per row (rows,)."""
    return reference.cross_entropy.linear_cross_entropy(
        x,
        weight,
        bias,
        target,
        class_weight=class_weight,
        label_smoothing=smoothing,
        ignore_index=ignore_index,
        reduction="none",
    )


_ATTENTION = (attention, attention_weights, attention_decode, attention_packed)
_OTHERS = (layer_norm, dropout, embed, add_positional, linear_cross_entropy, linear_cross_entropy_rows)
_PLAIN: dict[str, Callable[..., Any]] = {function.__name__: function for function in (*_ATTENTION, *_OTHERS)}
