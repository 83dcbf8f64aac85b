"""Accelerated copies of models, and checks that the tests of ``accelerate`` share."""

from __future__ import annotations

import copy
import io
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.swap import lazy_logits, output_layer


def pair(make: nn.Module | Callable[[], nn.Module], **options: Any) -> tuple[Any, Any, tfast.accelerate.Report]:
    """Return a model, its accelerated copy, and the report. A function is called with seed 0 to make the model.

    Args:
        options: those of ``accelerate``.
    """
    if not isinstance(make, nn.Module):
        torch.manual_seed(0)
        make = make()
    fast = copy.deepcopy(make)
    return make, fast, tfast.accelerate(fast, **options)


def kinds(model: nn.Module) -> list[type]:
    """Return the classes of all modules."""
    return [type(module) for module in model.modules()]


def state(model: nn.Module) -> list[tuple[type, set[str]]]:
    """Return the classes of all modules, and the names of their attributes."""
    return [(type(module), set(module.__dict__)) for module in model.modules()]


def assert_copied_and_undone(
    fast: nn.Module, report: tfast.accelerate.Report, before: list[Any], run: Callable[[nn.Module], Any], **options: Any
) -> None:
    """Assert that copies compute what the model computes, that a second call swaps nothing, and that ``undo`` leaves
    nothing.

    Args:
        fast: accelerated model.
        report: its report.
        before: state of the model before.
        run: function of a model that returns tensors.
        options: those of ``accelerate``.
    """
    expected, swapped = run(fast), kinds(fast)
    for other in copies(fast):
        assert kinds(other) == swapped and other.state_dict().keys() == fast.state_dict().keys()
        torch.testing.assert_close(run(other), expected, rtol=0, atol=0)
    again = tfast.accelerate(fast, **options)
    paths = {row.path for row in report.swapped}
    assert kinds(fast) == swapped and not again.swapped and {row.path for row in again.already} >= paths
    again.undo()  # undoes nothing, because it changed nothing
    assert kinds(fast) == swapped
    for _ in range(2):  # the second time there is nothing left to take back
        report.undo()
        assert state(fast) == before


def step(model: nn.Module, *inputs: Any) -> list[Tensor]:
    """Return the result of a call, and the gradients of all parameters."""
    out = model(*inputs)
    return [out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


def copies(module: nn.Module) -> list[nn.Module]:
    """Return three copies of a module: by deepcopy, by pickle, and saved and loaded by torch."""
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]


class Seen(TorchDispatchMode):
    """Ops of attention and dropout that ran forward: "ours" or "torch" for attention, "dropout" for our dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {"scaled_dot_product": "torch", "transformer_fast.attention": "ours", "fast.dropout.": "dropout"}
        self.calls += [kind for op, kind in kinds.items() if op in str(func) and "backward" not in str(func)]
        return func(*args, **(kwargs or {}))


def seen(call: Callable[[], Any]) -> list[str]:
    """Return the calls that ``Seen`` counts."""
    with Seen() as found:
        call()
    return found.calls


def whose(call: Callable[[], Any]) -> set[str]:
    """Return the attention that ran: "ours", "torch", both or none."""
    return set(seen(call)) - {"dropout"}


def from_one_seed(*calls: Callable[[], Any], seed: int = 3) -> list[Any]:
    """Return the results of calls that start from the same random state."""
    results = []
    for call in calls:
        torch.manual_seed(seed)
        results.append(call())
    return results


def surroundings() -> tuple[Any, ...]:
    """Return the state of the program that a call could change."""
    states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack()
    return torch.get_default_dtype(), torch.get_default_device(), backends.current(), modes, states


def seems_on_gpu(model: nn.Module, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a module report that its parameters are on a GPU; skip the test where no GPU kernels are installed."""
    pytest.importorskip("triton")
    parameter = types.SimpleNamespace(device=torch.device("cuda"), dtype=dtype)
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter((parameter,)), raising=False)
    return model


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options of each fused loss."""
    calls: list[dict[str, Any]] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(options)
        return tfast.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(lazy_logits.ops, "linear_cross_entropy", counted)
    return calls


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of any size skip their logits."""
    monkeypatch.setattr(output_layer, "WORTH_IT", 1)
