"""The end of an encoder block, behind its attention, as one call of the extension, in evaluation on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops import eager
from ..ops.norm import machine_epsilon
from .activated import name_of
from .hooks import TAKES_RESIDUAL, has_role
from .linear import parts_of_product
from .norm import LayerNorm, RMSNorm


def block_end(
    x: Tensor,
    attended: Tensor,
    projection: nn.Module | None,
    norm_1: nn.Module | None,
    first: nn.Module,
    activation: Any,
    second: nn.Module,
    norm_2: nn.Module,
    *,
    norm_first: bool,
) -> Tensor | None:
    """Compute a block's output from its input and its attention's output, without dropout.

    With ``a = projection(attended)`` and ``network(h) = second(activation(first(h)))`` that is
    ``norm_2(h + network(h))`` with ``h = norm_1(x + a)``, and for a pre-norm block ``h + network(norm_2(h))`` with
    ``h = x + a``.

    Args:
        x: (..., d_model), the block's input.
        attended: (..., d), the attention's output.
        projection: linear layer; None if ``attended`` is its output already, (..., d_model).
        norm_1: norm after the first sum; None for a pre-norm block.
        first, second: linear layers of the network.
        activation: a function or a module.
        norm_2: norm after the second sum, or before the network.
        norm_first: True for a pre-norm block.

    Returns:
        (..., d_model). None for a call that the modules must compute: in training mode, if a gradient is needed, in
        compiled and traced calls, under autocast, for tensors that are not plain ones on a CPU, for modules with hooks
        and for classes of other modules.
    """
    direct = eager.native()
    if direct is None or not x.is_cpu or second.training or torch._C._is_tracing():
        return None
    if not (name := name_of(activation)):
        return None
    products = [product if product is None else parts_of_product(product, x) for product in (projection, first, second)]
    norms = [None if norm_first else _norm(norm_1, x), _norm(norm_2, x)]
    if products[1] is None or products[2] is None or (products[0] is None) != (projection is None):
        return None
    if norms[1] is None or (norms[0] is None) != norm_first:
        return None
    return direct.encoder_block_end(
        x, attended, products[0], norms[0], products[1], name, products[2], norms[1], norm_first
    )


def _norm(norm: nn.Module | None, x: Tensor) -> tuple[Any, ...] | None:
    """Weight, bias, eps and kind of a norm of rows like x; None for a module that must be called."""
    if norm is None or not has_role(norm, TAKES_RESIDUAL) or not isinstance(norm, LayerNorm | RMSNorm):
        return None
    if len(norm.normalized_shape) != 1 or (weight := norm._parameters["weight"]) is None:
        return None
    if isinstance(norm, RMSNorm):
        return weight, None, machine_epsilon(x) if norm.eps is None else norm.eps, "rms"
    return weight, norm._parameters["bias"], norm.eps, "layer"
