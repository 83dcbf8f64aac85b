"""The linear layer. The choice is made in csrc/ops/linear.cpp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import extension
from . import _eager


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by the faster of the two libraries that PyTorch has for it on a CPU.

    PyTorch multiplies float32 matrices with MKL, which leaves the AVX-512 units of a processor unused that Intel did
    not make; oneDNN, with which PyTorch multiplies 16-bit ones, uses them. There this op calls oneDNN, forward and
    backward, for all but the smallest matrices. Everywhere else, and in compiled and traced code, it is ``F.linear``
    itself. ``torch.backends.mkldnn.flags(enabled=False)`` keeps oneDNN out.

    Args:
        x: (..., in).
        weight: (out, in), in the dtype of ``x``.
        bias: (out,) or None.

    Returns:
        (..., out). Sums are float32 in both libraries, in another order. It can be differentiated twice.

    Raises:
        TypeError, RuntimeError: as ``F.linear``.
    """
    if isinstance(x, Tensor) and x.is_cpu and (direct := _eager.native()):
        result = direct.linear(x, weight, bias)
        if result is not None:
            return result
    return F.linear(x, weight, bias)


def is_faster(weight: Tensor) -> bool:
    """Whether :func:`linear` is more than ``F.linear`` for this weight (out, in) and a thousand rows."""
    module = extension.module()
    if module is None or weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    return module.onednn_is_faster(1024, weight.shape[1], weight.shape[0])
