"""The linear layer. csrc/ops/linear.cpp chooses the library that multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .. import backends, extension
from ..tracing import constant_when_compiled
from . import eager

_NO_ONEDNN = -2
"""Result of csrc/ops/library.cpp for a PyTorch without oneDNN."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by the faster of the two libraries that PyTorch has for it on a CPU.

    PyTorch multiplies float32 matrices with MKL. MKL does not use AVX-512 on processors that Intel did not make.
    oneDNN, which PyTorch uses for 16-bit matrices, does use AVX-512. On those processors this op calls oneDNN, forward
    and backward, for all but the smallest matrices. The op is also used in code compiled by ``torch.compile``. On all
    other processors, and in exported and traced code, the op is ``F.linear`` itself. :func:`products_by` chooses the
    library; ``torch.backends.mkldnn.flags(enabled=False)`` keeps oneDNN out.

    Args:
        x: (..., in).
        weight: (out, in), in the dtype of ``x``.
        bias: (out,) or None.

    Returns:
        (..., out). Both libraries sum in float32, in different orders. The op can be differentiated twice.

    Raises:
        TypeError, RuntimeError: as ``F.linear``.
    """
    if isinstance(x, Tensor) and x.is_cpu:
        if door := eager.native():
            try:
                result = door.linear(False, x, weight, bias)
            except (TypeError, ValueError):  # F.linear raises its own error
                result = None
            if result is not None:
                return result
        elif torch.compiler.is_compiling() and _takes_op(x, weight, bias):
            return torch.ops.transformer_fast.linear.default(x, weight, bias)
        elif not backends.in_transform() and _takes_op(x, weight, bias):
            with contextlib.suppress(TypeError, ValueError):  # F.linear raises its own error
                return torch.ops.transformer_fast.linear.default(x, weight, bias)
    return F.linear(x, weight, bias)


@contextlib.contextmanager
def products_by(library: str) -> Iterator[None]:
    """Choose the library for large float32 products of :func:`linear` inside the block, for the whole process.

    Args:
        library: "onednn", "aten" (PyTorch's own product, by MKL), or "faster", the one that is faster here.

    Raises:
        ValueError: for another name, or if the extension is not loaded.
        RuntimeError: PyTorch was built without oneDNN.
    """
    choices = {"onednn": 1, "aten": 0, "faster": -1}
    if library not in choices:
        raise ValueError(f"library is {library!r}, expected one of {', '.join(choices)}")
    native = extension.library()
    if native is None:
        raise ValueError(f"the C++ extension, which calls the library, is not loaded: {extension.status()}")
    before = native.transformer_fast_send_products_to_onednn(choices[library])
    if before == _NO_ONEDNN:
        raise RuntimeError("expected a PyTorch that was built with oneDNN")
    try:
        yield
    finally:
        native.transformer_fast_send_products_to_onednn(before)


def _takes_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if a call that has no door, as in a compiled graph, may use the op. Exported programs, forward-mode
    gradients, autocast and tensor subclasses keep ``F.linear``."""
    exporting = torch.compiler._is_exporting_flag  # is_exporting() is True in torch.compile of PyTorch 2.11, too
    if exporting or forward_ad._current_level >= 0 or torch.is_autocast_enabled("cpu"):
        return False
    if backends.current() not in ("auto", "native") or not _is_ever_faster() or x.dim() < 2 or weight.dim() != 2:
        return False
    given = (x, weight) if bias is None else (x, weight, bias)
    return all(type(t) in (Tensor, Parameter) and t.is_cpu and t.dtype == torch.float32 for t in given)


@constant_when_compiled
def _is_ever_faster() -> bool:
    return _onednn_is_faster(1024, 1024)


def is_faster(weight: Tensor) -> bool:
    """Return True if :func:`linear` does not simply call ``F.linear`` for this weight (out, in) and a thousand rows."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    return _onednn_is_faster(weight.shape[1], weight.shape[0])


def _onednn_is_faster(inputs: int, outputs: int) -> bool:
    """Return True if oneDNN is the faster library for a thousand rows."""
    native = extension.library()
    return native is not None and native.transformer_fast_onednn_is_faster(1024, inputs, outputs)
