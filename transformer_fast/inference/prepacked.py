"""Linear layers with a copy of their weights in the layout that the product reads fastest.

Copies that are kept for later calls are stored on the parameters (`tensor_cache.py`) and freed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from .. import extension
from ..ops import eager
from ..ops.linear import linear
from ..ops.weight_layout import AS_IT_IS, WeightLayout, has_int8
from ..tensor_cache import get_or_compute, results_of, stamp_of
from .int8 import INT8_COPY, int8_product

NATIVE_ROWS = {"avx2": 512, "avx512": 80, "avx512_bf16": 80}
"""Rows up to which the native product is the fastest, by vector unit."""
NARROW_ROWS = 64
"""Rows up to which the native product is the fastest in bfloat16, on processors with AVX512-BF16."""
NARROW = 256
"""Inputs up to which the native product is the fastest for `COPIED_ROWS` too, on these units: oneDNN's call costs
more than it saves."""
FEW_ROWS = 24
"""Rows up to which the native product is used on other units: reading the weight takes longer than the products."""
COPIED_ROWS = 512
"""Rows from which a product with the original weight is as fast as one with a copy."""
INT8_INPUTS = 2**17
"""Inputs up to which 32 bits hold the sum of int8 products."""


_KEPT = "kept weight"


def laid_out_product(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`~transformer_fast.layers.products.product_of` for a module that has a `LAYOUT`."""
    if has_int8(module):
        return int8_product(module, x, weight, bias)
    kept = None if module.training else kept_weight(weight)
    found = None if kept is None else kept.linear(x, weight, bias)
    return linear(x, weight, bias) if found is None else found


def kept_weight(weight: Tensor) -> Any | None:
    """The object of the extension that keeps copies of a parameter, or of a view of one; None if there is none."""
    direct = eager.native()
    if direct is None or not isinstance(weight, Tensor):
        return None
    holder: Tensor = weight
    key: tuple[Hashable, ...] = (_KEPT,)
    if weight._base is not None:
        holder, key = weight._base, (_KEPT, weight.storage_offset(), weight.shape, weight.stride())
    if type(holder) is not Parameter:  # a weight that is computed anew for each call
        return None
    results = results_of(holder)
    kept = results.get(key)
    if kept is None:
        rows = native_rows(0, weight.shape[-1])
        kept = direct.KeptWeight(native_rows=rows, narrow_rows=NARROW_ROWS, blocked_rows=COPIED_ROWS)
        results[key] = kept
    return kept


def forget_kept(module: nn.Module) -> None:
    """Free the kept copies of a module's parameters."""
    for parameter in module.parameters():
        results = getattr(parameter, "_tensor_cache", {})
        for key in [key for key in results if key[0] == _KEPT or INT8_COPY in key]:
            results.pop(key, None)


class PrepackedLinear:
    """A linear layer for few rows at a time, or several with the same input side by side.

    In fp32 on a CPU it multiplies with a copy of the weights in the order in which they are read, made at the first
    call: up to `native_rows` rows in the layout of `csrc/cpu/linear/step_linear.cpp`, up to `COPIED_ROWS` rows in
    oneDNN's blocked layout. PyTorch's product rearranges the weight in every call, which for few rows takes longer than
    the product. All other products are PyTorch's.

    In a layout with int8 weights, the copy is that of `csrc/cpu/linear/quantized_linear.cpp`, for any number of rows;
    the product computes what `reference.quantized_linear` says. Layers of more than `INT8_INPUTS` inputs stay fp32.

    The object is called like a module but is not one: a call of `generate` makes a hundred of them, and an
    `nn.Module` takes ten times as long to make.

    Args:
        linears: plain linear layers with the same input, all with a bias or all without.
        rows: largest number of rows; 0 for a single call, which is worth a copy only if the copy is kept.
        layout: decides if the weights are int8, and if a copy is kept for the next `PrepackedLinear` of these layers.
        relu: apply ReLU to the outputs.

    Attributes:
        bias: bias of the outputs, or None.
        outputs: number of outputs.
        is_int8: True for int8 weights.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], rows: int, layout: WeightLayout = AS_IT_IS, *, relu: bool = False
    ) -> None:
        self.linears, self.layout = list(linears), layout
        self.is_int8 = layout.quantize is not None and linears[0].in_features <= INT8_INPUTS
        self._weights = weights = [linear.weight for linear in linears]
        biases: list[Tensor] = [linear.bias for linear in linears]
        self.bias = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
        self.outputs = sum(weight.shape[0] for weight in weights)
        self._relu = relu
        self._concatenated: Tensor | None = None
        self._packed: Tensor | None = None
        self._blocked: Tensor | None = None
        rows = rows or (COPIED_ROWS if layout.keep else 0)
        self._may_copy = rows > 0 and all(w.device.type == "cpu" and w.dtype == torch.float32 for w in weights)
        self._native_rows = native_rows(rows, weights[0].shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer: x (..., in) -> (..., out)."""
        rows, activation = x.numel() // x.shape[-1], "relu" if self._relu else "none"
        weight = self.operand(rows) if self.is_int8 or x.dtype == torch.float32 else None
        if weight is None or (torch.is_autocast_enabled("cpu") and not self.is_int8):
            out = linear(x, self.weight, self.bias)
            return out.relu_() if self._relu else out
        if weight.is_mkldnn:
            return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, activation, [], "")
        return torch.ops.transformer_fast.packed_linear(x, weight, self.bias, self.outputs, activation)

    def operand(self, rows: int) -> Tensor | None:
        """Weight in the layout for this number of rows: a dense one for `packed_linear`, an mkldnn one for oneDNN; None
        if PyTorch's product is to be called."""
        if not self.is_int8 and (not self._may_copy or not 0 < rows <= COPIED_ROWS):
            return None
        if self.is_int8 or rows <= self._native_rows:
            if self._packed is None:
                pack = torch.ops.transformer_fast.pack_weight
                layout = "int8" if self.is_int8 else "step"
                self._packed = self._in_layout(layout, lambda: pack(self._weights, self.is_int8))
            return self._packed
        if self._blocked is None and _has_onednn():
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._blocked = self._in_layout("blocked", lambda: reorder(self.weight, COPIED_ROWS))
        return self._blocked

    def _in_layout(self, layout: str, copy_of: Callable[[], Tensor]) -> Tensor:
        """Weights in a layout: the kept copy, or a new one."""
        if not self.layout.keep:
            return copy_of()
        first, *others = self._weights
        return get_or_compute(first, (layout,), tuple(others), copy_of, tuple(map(stamp_of, self._weights)))

    @property
    def weight(self) -> Tensor:
        """All weights, stacked along the outputs, (out, in)."""
        if self._concatenated is None:
            self._concatenated = self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)
        return self._concatenated


def native_rows(most: int, inputs: int) -> int:
    """Rows up to which a layer with this number of inputs is multiplied natively, if it gets up to `most` rows.

    A layer has one copy of its weights, so there is no native one if oneDNN's copy is needed for the most rows.
    """
    if not extension.load():
        return 0
    rows = NATIVE_ROWS.get(extension.build_info()["instruction_set"], FEW_ROWS)
    rows = COPIED_ROWS if rows > FEW_ROWS and inputs <= NARROW else rows
    return rows if rows >= COPIED_ROWS or most <= rows else 0


def _has_onednn() -> bool:
    names = "_linear_pointwise", "_reorder_linear_weight"
    mkldnn = torch.backends.mkldnn
    return bool(mkldnn.enabled) and mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
