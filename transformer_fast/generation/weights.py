"""Copies of a model's weights in the layout that steps of few rows read fastest, for one call or longer.

Nothing of the model itself is changed, so that several threads may decode with one model: `prepack` makes a copy of its
modules that shares their parameters, in which plain linear layers are `StepLinear`, or `QuantizedLinear`. What is kept
for longer lies on the parameters (`tensor_cache.py`), and goes with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import extension
from ..layers import DecoderLayer, EncoderLayer, FeedForward, MultiHeadAttention, PositionalEncoder, dropout
from ..layers.feed_forward import ACTIVATIONS
from ..layers.hooks import is_plain
from ..layers.linear import is_linear
from ..layers.torch_modules import Embedding
from ..models import Decoder, Encoder
from ..ops.linear import linear
from ..tensor_cache import get_or_compute

NATIVE_ROWS = {"avx2": 512, "avx512": 80, "avx512_bf16": 80}
"""By vector unit, the rows up to which the native product is the fastest."""
NARROW = 256
"""Inputs up to which it is so for `COPIED_ROWS` on each of these units: oneDNN's call takes longer than it saves."""
FEW_ROWS = 24
"""The same where `NATIVE_ROWS` does not name the unit: as long as reading the weight takes longer than the products."""
COPIED_ROWS = 512
"""Rows from which a product with the weight as it is is as fast as one with a copy of it."""
DROPOUTS = (*dropout.KINDS, nn.Identity)
"""The classes that do nothing in evaluation mode."""
EMBEDDINGS = (nn.Embedding, Embedding)
"""The classes whose weight may be read without calling them."""
_PARENTS = (Encoder, EncoderLayer, Decoder, DecoderLayer, MultiHeadAttention, PositionalEncoder, nn.ModuleList)
"""The classes that call a child, or leave it to a cache, in a way that a `StepLinear` serves."""
WHOLE = 2**12
"""Pairs of values up to which a stamp reads all of a weight."""
BLOCK = 8
"""Pairs of values side by side that a stamp reads of a larger weight: a line of the cache."""
PRIMES = 31, 29, 23, 19, 17, 13, 11, 7, 5, 3, 2
"""So many blocks apart; the first that leaves a block in every row."""
INT8_INPUTS = 2**17
"""Inputs up to which 32 bits hold the sum of products of int8."""


class WeightLayout(NamedTuple):
    """Layout of the copies of weights: `GenerationConfig.quantize` and `GenerationConfig.keep_weights`."""

    quantize: str | None = None
    keep: bool = False


AS_IT_IS = WeightLayout()
"""Copied for one call, in the type that it has."""


class StepLinear:
    """One linear layer for few rows at a time, or several of one input side by side.

    In fp32 on a CPU it multiplies with a copy of the weights in the order in which they are read, made when it is first
    needed: for up to `native_rows` that of `csrc/cpu/generation/step_linear.cpp`, for up to `COPIED_ROWS` the blocked
    layout of oneDNN. PyTorch's own product rearranges the weight in every call, which for few rows costs more than the
    product. It computes everything else.

    It is called as a module is, and is none: a hundred are made in a call of `generate`, and an `nn.Module` takes ten
    times as long to make.

    Args:
        linears: plain linear layers of one input, all with a bias or none.
        rows: how many there will be at most; 0 for a single call, which a copy repays only if it is kept.
        layout: whether a copy is kept for the next `StepLinear` of these layers.
        relu: of the outputs.

    Attributes:
        bias: of the outputs, or None.
        outputs: how many there are.
    """

    def __init__(
        self, linears: Sequence[nn.Linear], rows: int, layout: WeightLayout = AS_IT_IS, *, relu: bool = False
    ) -> None:
        self.linears, self.layout = list(linears), layout
        self._weights = weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
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
        """x (..., in) -> (..., out)."""
        weight = self.operand(x.numel() // x.shape[-1]) if x.dtype == torch.float32 else None
        if weight is None or torch.is_autocast_enabled("cpu"):
            out = linear(x, self.weight, self.bias)
            return out.relu_() if self._relu else out
        if weight.is_mkldnn:
            activation = "relu" if self._relu else "none"
            return torch.ops.mkldnn._linear_pointwise(x, weight, self.bias, activation, [], "")
        return torch.ops.transformer_fast.step_linear(x, weight, self.bias, self.outputs, self._relu)

    def operand(self, rows: int) -> Tensor | None:
        """The weight in the layout in which that many rows are multiplied: a dense one for `step_linear`, an mkldnn one
        for oneDNN; None where PyTorch's own product is the one to call."""
        if not self._may_copy or not 0 < rows <= COPIED_ROWS:
            return None
        if rows <= self._native_rows:
            if self._packed is None:
                self._packed = self._in_layout(
                    "step", lambda: torch.ops.transformer_fast.pack_step_weight(self._weights)
                )
            return self._packed
        if self._blocked is None and _has_onednn():
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._blocked = self._in_layout("blocked", lambda: reorder(self.weight, COPIED_ROWS))
        return self._blocked

    def _in_layout(self, layout: str, copy_of: Callable[[], Tensor]) -> Tensor:
        """The weights in a layout: what is kept of them, or a copy made now."""
        if not self.layout.keep:
            return copy_of()
        first, *others = self._weights
        return get_or_compute(first, (layout,), tuple(others), copy_of, tuple(map(stamp_of, self._weights)))

    @property
    def weight(self) -> Tensor:
        """All weights, one below the other, (out, in)."""
        if self._concatenated is None:
            self._concatenated = self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)
        return self._concatenated


class QuantizedLinear(StepLinear):
    """One linear layer with int8 weights, or several of one input side by side, for any number of rows.

    For fp32 on a CPU: `csrc/cpu/generation/quantized_linear.cpp`, which computes what `reference.quantized_linear`
    says. The weights are quantised when they are first needed.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        weight = self.operand(x.numel() // x.shape[-1])
        return torch.ops.transformer_fast.quantized_linear(x, weight, self.bias, self.outputs, self._relu)

    def operand(self, rows: int) -> Tensor:
        """The weights for `quantized_linear`."""
        if self._packed is None:
            pack = torch.ops.transformer_fast.pack_quantized_weight
            self._packed = self._in_layout("int8", lambda: pack(self._weights))
        return self._packed


class StepFeedForward:
    """`FeedForward` without dropout; if its activation is ReLU, that is done where its input is made."""

    def __init__(self, module: FeedForward, rows: int, layout: WeightLayout) -> None:
        self.activation = module.activation
        self.linear_1 = _step_linear([module.linear_1], rows, layout, relu=module.activation == "relu")
        self.linear_2 = _step_linear([module.linear_2], rows, layout)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., d_model) -> (..., d_model)."""
        inner = self.linear_1(x)
        return self.linear_2(inner if self.activation == "relu" else ACTIVATIONS[self.activation](inner))


def stamp_of(weight: Tensor) -> tuple[int, ...]:
    """Numbers that tell whether a weight (out, in), fp32, was written to, also where PyTorch counts no write.

    A small weight is read whole, as the sum of its bits times their positions. Of a larger one a block of values per
    row is read, in one row at other columns than in the next. A write to a whole row changes some block. So does one to
    a whole column, of 31 rows at least (of an odd width 248), and another order of rows or columns. The sums are exact,
    modulo 2^64. A write to single values of a large weight may be missed.
    """
    weight = weight if weight.is_contiguous() else weight.contiguous()
    rows, width = weight.shape
    paired = width % 2 == 0 and weight.storage_offset() % 2 == 0
    bits, width = (weight.view(torch.int64), width // 2) if paired else (weight.view(torch.int32), width)
    count = rows * width
    if count <= WHOLE:
        return (int((bits.view(-1) * torch.arange(1, 2 * count, 2)).sum()),)
    # Blocks move through all columns unless the width is a multiple of the prime.
    stride = BLOCK * next((p for p in PRIMES if BLOCK * (p + 1) <= width and width % p), 1)
    return tuple(bits.as_strided((1 + (count - BLOCK) // stride, BLOCK), (stride, 1)).sum(0).tolist())


def native_rows(most: int, inputs: int) -> int:
    """For how many rows a layer with so many inputs multiplies natively that is given up to `most`. One copy of its
    weights serves it, so there is no native one where oneDNN's is needed for the most."""
    if not extension.load():
        return 0
    rows = NATIVE_ROWS.get(extension.build_info()["instruction_set"], FEW_ROWS)
    rows = COPIED_ROWS if rows > FEW_ROWS and inputs <= NARROW else rows
    return rows if rows >= COPIED_ROWS or most <= rows else 0


def _has_onednn() -> bool:
    names = "_linear_pointwise", "_reorder_linear_weight"
    mkldnn = torch.backends.mkldnn
    return mkldnn.enabled and mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _step_linear(linears: Sequence[nn.Linear], rows: int, layout: WeightLayout, *, relu: bool = False) -> StepLinear:
    too_deep = linears[0].in_features > INT8_INPUTS
    kind = StepLinear if layout.quantize is None or too_deep else QuantizedLinear
    return kind(linears, rows, layout, relu=relu)


def prepack(module: nn.Module, rows: int, layout: WeightLayout = AS_IT_IS) -> Any:
    """A copy of a module of this package and all below it, with the same parameters, in evaluation mode, for decoding
    step by step: a module, or what is called as one. A module that is not plain stays as it is, and is called. So does
    one of another class, but for a copy where there are linear layers in it.

    rows: how many a step will have at most. The caller has seen to it that what the layout asks for has no
    `obstacle`.
    """
    if is_linear(module):
        return _step_linear([module], rows, layout)
    if is_plain(module, FeedForward) and _is_plain_inside(module):
        return StepFeedForward(module, rows, layout)
    children: dict[str, Any] = {}
    if is_plain(module, *_PARENTS):
        children = {name: prepack(child, rows, layout) for name, child in module._modules.items() if child is not None}
    elif is_plain(module):
        children = _step_children(module, rows, layout)
    if not children and not is_plain(module, *DROPOUTS):
        return module
    clone = _shallow_copy(module)
    # Buffers of its own: another call that extends a positional table must not free one that a CUDA graph reads.
    clone.__dict__.update(_modules={**module._modules, **children}, _buffers=dict(module._buffers), training=False)
    return clone


def _is_plain_inside(module: FeedForward) -> bool:
    """Return True if no part of it must be called."""
    return is_linear(module.linear_1) and is_linear(module.linear_2) and is_plain(module.dropout, *DROPOUTS)


def _step_children(module: nn.Module, rows: int, layout: WeightLayout) -> dict[str, nn.Module]:
    """By name, the children of a module that are called by what it computes, an adapter for example, as far as there
    are linear layers in them. Each remains an `nn.Linear`, since the module may read its weight, or its class."""
    children = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_linear(child):
            children[name] = clone = _shallow_copy(child)
            clone.__dict__["forward"] = _step_linear([child], rows, layout)
        elif is_plain(child) and (inner := _step_children(child, rows, layout)):
            children[name] = clone = _shallow_copy(child)
            clone.__dict__["_modules"] = {**child._modules, **inner}
    return children


def _shallow_copy(module: nn.Module) -> nn.Module:
    """`copy.copy`, in a fifth of its time: all that a module keeps is in its `__dict__`, unless its class says else."""
    kind = type(module)
    if hasattr(kind, "__copy__"):
        return copy.copy(module)
    clone = kind.__new__(kind)
    clone.__dict__.update(module.__dict__)
    return clone


def concat_linears(*linears: nn.Module, rows: int = 0) -> Callable[[Tensor], Tensor]:
    """Several linear layers of one input as one, their outputs side by side; where they are not all `StepLinear` of one
    layout, they are called one by one. rows: as for `StepLinear`."""
    steps = [linear for linear in linears if isinstance(linear, StepLinear)]
    plain = [one for linear in steps for one in linear.linears]
    layouts = {step.layout for step in steps}
    if len(plain) == len(linears) and len(layouts) == 1 and len({linear.bias is None for linear in plain}) == 1:
        return _step_linear(plain, rows, layouts.pop())
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
