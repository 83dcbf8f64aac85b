"""``Report.explain``: calls of a batch that reach the kernels, and positions that the layers compute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import backends, huggingface
from ..function_mode import Calls, counted_calls
from ..layers.padded_calls import layers_of, recorded
from .rows import wrapped
from .swapped import FunctionalCalls


class _Kernels(TorchDispatchMode):
    """Count the calls of the ops of this package, and of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if func.namespace == "transformer_fast":
            given = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
            packed = name == "attention" and given.get("cu_seqlens_q") is not None
            self.calls["attention_packed" if packed else name] += 1
        elif name.startswith("_scaled_dot_product"):
            self.calls["torch's own attention"] += 1
        return func(*args, **(kwargs or {}))


def explained(model: nn.Module, batch: Any) -> str:
    """Kernels and positions of a packed model for one batch; the model is called once, without gradients.

    Args:
        model: model after ``accelerate(model, packed=True)``.
        batch: see :func:`~transformer_fast.huggingface.arguments_of`.
    """
    parameter = next(model.parameters(), torch.zeros(()))
    args, named = huggingface.arguments_of(model, batch)
    with torch.no_grad(), recorded() as passes, counted_calls() as calls, _Kernels() as kernels:
        model(*args, **named)
    backend, why = backends.choose("attention", parameter.device, parameter.dtype)
    counts = ", ".join(f"{name} {n}" for name, n in kernels.calls.most_common())
    lines = [f"kernels: {backend} ({why})", f"calls: {counts or 'none reached them'}"]
    if calls or any(isinstance(module, FunctionalCalls) for module in model.modules()):
        lines.append(f"torch's functions that this package computes: {_functions(calls)}")
    paths = {id(module): path for path, module in model.named_modules()}
    places: Counter[tuple[str, int, int, str]] = Counter()
    for each in passes:
        path, layers = paths.get(id(each.module), type(each.module).__name__), layers_of(each.module)
        path = path.rpartition(".")[0] if layers[0] is each.module else path
        places[path, each.positions, each.computed, each.reason] += len(layers)
    for (path, positions, computed, reason), n in places.items():
        where, why = path or "the model", reason and f": {reason}"
        lines.append(f"{where} ({n}): {computed} of {positions} positions{why}")
    total = sum(positions * n for (_, positions, _, _), n in places.items())
    left = sum((positions - computed) * n for (_, positions, computed, _), n in places.items())
    said = f"these layers skip {left / total:.0%} of their positions, which are padding" if total else ""
    lines.append(said or "this batch has no padding that the model's layers can skip")
    return "\n".join(part for line in lines for part in wrapped(line))


def _functions(calls: Calls) -> str:
    """Text: how many calls of each function were ours."""
    names = dict.fromkeys(name for name, _ in calls)
    parts = [f"{name} in {calls[name, True]} of {calls[name, True] + calls[name, False]} calls" for name in names]
    return ", ".join(parts) or "none was called"
