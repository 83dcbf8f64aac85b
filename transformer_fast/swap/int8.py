"""``accelerate(quantize=...)``: choose the layers of a model that get int8 weights, and set their state."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import extension, huggingface
from ..inference.int8 import can_free, free_weights, kept_int8, pack
from ..inference.prepacked import INT8_INPUTS
from ..layers.hooks import is_plain
from ..layers.linear import Linear
from ..layers.torch_modules import MultiheadAttention
from ..ops.weight_layout import WeightLayout, has_int8
from .kept_weights import give_one_layout
from .output_layer import output_layers
from .report import Report
from .rows import Row

FEW_OUTPUTS = 24
"""Outputs below which a layer stays in fp32: with 16, int8 is 1.1 times as fast, with 24 twice (1,152 rows of 512)."""


@dataclasses.dataclass(frozen=True)
class Int8:
    """Options of ``accelerate(model, quantize=Int8(...))``; ``quantize="int8"`` is ``Int8()``.

    Args:
        keep: paths of modules that stay in fp32, with the wildcards of ``fnmatch``; a path includes the modules inside.
        calibration: a batch for the model: a dictionary of keyword arguments, a tuple, or one argument. The model is
            called with it once, in fp32. A layer that it calls stays in fp32 if its int8 result differs by more than
            ``largest_error``.
        largest_error: norm of the difference of a layer's two results over the norm of the result in fp32.
        free: free the fp32 weights of the int8 layers; ``report.undo()`` is then refused.
    """

    keep: Sequence[str] = ()
    calibration: Any = None
    largest_error: float = 0.05
    free: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            raise TypeError(f"Int8: keep must be a sequence of paths, got the string {self.keep!r}")


class Plan:
    """The layers of a model that get int8 weights, by path, and their ids in ``inside``.

    Raises:
        ValueError: if the model cannot have int8 weights; the message has the reason.
    """

    def __init__(self, model: nn.Module, quantize: str | Int8, report: Report) -> None:
        chosen = Int8() if quantize == "int8" else quantize
        if not isinstance(chosen, Int8):
            raise ValueError(f'accelerate: quantize must be "int8" or an Int8(...), got {quantize!r}')
        self.model, self.free, self.report = model, chosen.free, report
        if reason := obstacle(model):
            raise ValueError(f"accelerate: quantize is not possible: {reason}")
        self.layers: dict[str, nn.Module] = {}
        used: set[str] = set()  # patterns of `keep` that name a module
        heads = output_layers(model)
        for path, module in model.named_modules():
            named = [pattern for pattern in chosen.keep if _is_in(path, pattern)]
            used.update(named)
            if has_int8(module):
                continue
            if not is_plain(module, nn.Linear, Linear, nn.MultiheadAttention, MultiheadAttention):
                if _multiplies(module):
                    report.rows.append(Row(path, type(module).__name__, None, "in fp32: it is no plain nn.Linear"))
                continue
            self.layers[path] = module
            if named:
                self._leave(path, "keep names it")
            elif id(module) in heads:
                self._leave(path, "it is the output layer")
            elif why := _obstacle(module, chosen.free):
                self._leave(path, why)
        if chosen.calibration is not None:
            for path, error in layer_errors(model, self.layers, chosen.calibration).items():
                if not error <= chosen.largest_error:
                    how = f"differs by {error:.1%}" if math.isfinite(error) else "is not finite"
                    self._leave(path, f"its int8 result {how} on the calibration batch")
        if unknown := [pattern for pattern in chosen.keep if pattern not in used]:
            raise ValueError(f"accelerate: keep names no module of the model: {', '.join(map(repr, unknown))}")
        self.inside = {id(layer) for layer in self.layers.values()}

    def _leave(self, path: str, why: str) -> None:
        module = self.layers.pop(path)
        name = next(kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
        self.report.rows.append(Row(path, f"nn.{name}", None, f"in fp32: {why}"))

    def apply(self) -> None:
        """Give the layers their int8 weights."""
        report, before, after = self.report, 0, 0
        for path in [path for path, layer in self.layers.items() if not isinstance(layer, Linear | MultiheadAttention)]:
            self._leave(path, "it was not swapped")
        for path, module in self.layers.items():
            before += sum(weight.nbytes for weight in _weights(module).values())
            after += sum(kept_int8(weight).nbytes for weight in _weights(module).values())
            give_one_layout(report, path, module, WeightLayout("int8", keep=True), "int8 weights")
        if self.free:
            report._freed = True
            for module in self.layers.values():
                free_weights(module, tuple(_weights(module)))
        kept = "freed" if self.free else "kept beside them"
        report.int8 = tuple(self.layers)
        report.notes.append(
            f"int8: {len(self.layers)} layers; their weights take {after / 2**20:.1f} MiB instead of "
            f"{before / 2**20:.1f} MiB in fp32, which are {kept}"
        )
        if self.model.training:
            report.notes.append("int8: the model is in training mode; call model.eval() before its next call")


def obstacle(model: nn.Module) -> str:
    """Reason why a model cannot have int8 weights, or ""."""
    given = {(p.device.type, p.dtype) for p in model.parameters() if p.is_floating_point() and not p.is_meta}
    if other := given - {("cpu", torch.float32)}:
        device, dtype = next(iter(other))
        return f"it needs fp32 weights on a CPU, got {dtype} on {device}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, which chooses another dtype"
    return extension.obstacle() or ""


def layer_errors(model: nn.Module, layers: Mapping[str, nn.Module], batch: Any) -> dict[str, float]:
    """Relative error of the int8 result of each layer in a call of the model, which runs in fp32 and in evaluation."""
    errors: dict[str, float] = {}
    measured: set[str] = set()

    def measure(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path in measured:  # a call that `_products` makes
            return
        measured.add(path)
        for x, weight in _products(module, args, kwargs):
            if isinstance(x, Tensor) and x.numel() and x.shape[-1] == weight.shape[1]:
                product = torch.ops.transformer_fast.packed_linear(x, pack(weight), None, weight.shape[0], "none")
                exact = F.linear(x, weight)
                error = ((product - exact).norm() / exact.norm()).item() if exact.any() else 0.0
                errors[path] = max(errors.get(path, 0.0), math.inf if math.isnan(error) else error)
        measured.remove(path)

    hooks = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, path=path: measure(path, module, args, kwargs), with_kwargs=True
        )
        for path, layer in layers.items()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            args, named = huggingface.arguments_of(model, batch)
            model(*args, **named)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return errors


def _products(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and weights of the products in a call of a layer."""
    weights = list(_weights(module).values())
    if not isinstance(module, nn.MultiheadAttention):
        yield args[0] if args else kwargs.get("input"), weights[0]
        return
    *inner, last = weights
    named = dict(zip(("query", "key", "value"), args)) | kwargs
    joined = inner[0].chunk(3) if len(inner) == 1 else inner
    yield from zip((named.get(name) for name in ("query", "key", "value")), joined)
    # The output layer is not called: the identity as its weight gives its input.
    identity = {"out_proj.weight": torch.eye(len(last), dtype=last.dtype)}
    if module.out_proj.bias is not None:
        identity["out_proj.bias"] = last.new_zeros(len(last))
    yield functional_call(module, identity, args, kwargs)[0], last


def _weights(module: Any) -> dict[str, Tensor]:
    """Weights of a layer, by name."""
    names = "weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    found = {name: p for name in names if (p := module._parameters.get(name)) is not None}
    return found | ({"out_proj.weight": module.out_proj.weight} if hasattr(module, "out_proj") else {})


def _multiplies(module: nn.Module) -> bool:
    """Return True for a module of another class that seems to be a linear layer, such as GPT-2's Conv1D."""
    weight = module._parameters.get("weight")
    others = nn.Embedding, nn.EmbeddingBag, NonDynamicallyQuantizableLinear  # the last is part of nn.MultiheadAttention
    return type(weight) is nn.Parameter and weight.dim() == 2 and not isinstance(module, others)


def _obstacle(module: nn.Module, free: bool) -> str:
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None or module.add_zero_attn:
            return "it uses add_bias_kv or add_zero_attn, which the kernel does not have"
        if not is_plain(module.out_proj):
            return "its output layer is not plain"
    for name, weight in _weights(module).items():
        if isinstance(weight, nn.parameter.UninitializedParameter):
            return "its sizes are not known before its first call"
        if type(weight) is not nn.Parameter:
            return f"its weight is a {type(weight).__name__}"
        if weight.shape[0] < FEW_OUTPUTS:
            return f"it has fewer than {FEW_OUTPUTS} outputs"
        if weight.shape[1] > INT8_INPUTS:
            return f"it has more than {INT8_INPUTS} inputs"
        if free and not can_free(weight, 3 if name == "in_proj_weight" else 1):
            return "its width is no multiple of 32, which the weights of three projections must be to be freed"
    return ""


def _is_in(path: str, pattern: str) -> bool:
    """Return True for a path that fits a pattern, or has a module that fits around it."""
    parts = path.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))
