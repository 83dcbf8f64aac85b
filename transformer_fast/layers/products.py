"""The product of a linear layer: the op's, or in evaluation that of the layout that the module's weights have."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.linear import linear
from ..ops.weight_layout import LAYOUT


def product_of(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x weight^T + bias`` for parameters of a module, in the module's `LAYOUT`.

    Args:
        x: (..., in).
        weight: a parameter (out, in) of the module, or a view of one.
        bias: (out,) or None.

    Returns:
        (..., out). In training mode, if a gradient is needed, in compiled and traced calls, under autocast, and for
        tensors that are not plain fp32 or bf16 ones on a CPU, it is the result of ``ops.linear``.

    Raises:
        RuntimeError: for a layout with int8 weights, in such a call.
    """
    if LAYOUT not in module.__dict__:
        return linear(x, weight, bias)
    from ..inference.prepacked import laid_out_product

    return laid_out_product(module, x, weight, bias)
