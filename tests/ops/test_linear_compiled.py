"""Linear layer in code of torch.compile and torch.export: the chosen product, and its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear import by_onednn, inputs  # noqa: F401  (a fixture)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import transformer_fast as tfast
from transformer_fast import ops
from transformer_fast.ops.linear import _takes_op
from transformer_fast.testing import assert_as_exact_as_eager

pytestmark = pytest.mark.usefixtures("by_onednn")
OP, GRAD_WEIGHT = (torch.ops.transformer_fast.linear, torch.ops.transformer_fast.linear_grad_weight)
Linear = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled_ops(function: Linear, *args: Any) -> tuple[Any, list[str]]:
    """Return the outputs of a compiled function, and the operators of its graphs, forward and backward."""
    found: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    return torch.compile(function, fullgraph=True, backend=backend)(*args), found


def count(found: list[str], op: Any) -> int:
    return found.count(str(op.default))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(512,), (2, 300)])
def test_three_products_go_to_the_op_and_are_those_of_eager_code(leading: tuple[int, ...], bias: bool) -> None:
    given = inputs(leading, 256, 384, bias)
    out, found = compiled_ops(ops.linear, *given)
    grad = torch.randn_like(out)
    results = [out, *torch.autograd.grad(out, given, grad)]
    assert (count(found, OP), count(found, GRAD_WEIGHT)) == (2, 1) and not any("mm" in name for name in found)
    eager = ops.linear(*given)
    for result, wanted in zip(results, [eager, *torch.autograd.grad(eager, given, grad)], strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_a_compiler_that_says_it_exports_gets_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 says so inside torch.compile; an export sets the flag, too."""
    given = [t.detach() for t in inputs((512,), 256, 384)]
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert _takes_op(*given)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert not _takes_op(*given)


def test_inductor_and_open_sizes() -> None:
    """One graph for many rows and for few, which different libraries multiply."""
    _, weight, bias = inputs((1,), 256, 384)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda x: F.gelu(ops.linear(x, weight, bias)), dynamic=True, backend=counter)
    for rows in (600, 37, 2):
        x = torch.randn(3, rows, 256, requires_grad=True)
        pairs = []
        for out in (compiled(x), F.gelu(F.linear(x, weight, bias))):
            pairs.append([out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))])
        for found, wanted in zip(*pairs, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert counter.frame_count == 1


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_the_gradients_that_are_needed(frozen: int) -> None:
    given = inputs((512,), 256, 384)
    given[frozen].requires_grad_(False)
    out, found = compiled_ops(ops.linear, *given)
    trained = [t for t in given if t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), trained)
    assert (count(found, OP), count(found, GRAD_WEIGHT)) == (1 if frozen == 0 else 2, 0 if frozen == 1 else 1)
    for result, wanted in zip(grads, torch.autograd.grad(ops.linear(*given).square().sum(), trained), strict=True):
        torch.testing.assert_close(result, wanted)


def vmapped(linear: Linear, x: Tensor, *rest: Tensor) -> Tensor:
    return torch.vmap(linear, (0, None, None))(x, *rest)


def second(linear: Linear, x: Tensor, *rest: Tensor) -> Tensor:
    def first(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: linear(x, *rest).tanh().sum())(x).square().sum()

    return torch.func.grad(first)(x)


def tangent(linear: Linear, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return torch.func.jvp(lambda x: linear(x, *rest), (x,), (x.sin(),))


def half(linear: Linear, *given: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(*given)


def double(linear: Linear, *given: Tensor) -> Tensor:
    return linear(*(t.double() for t in given))


def on_reference(linear: Linear, *given: Tensor) -> Tensor:
    with tfast.backend("reference"):
        return linear(*given)


@pytest.mark.parametrize("how", [vmapped, second, tangent])
def test_transforms(how: Callable[..., Any]) -> None:
    given = [t.detach() for t in inputs((3, 128), 256, 256)]
    compiled = torch.compile(lambda *given: how(ops.linear, *given), backend="aot_eager")
    sides = compiled(*given), how(F.linear, *given), how(F.linear, *(t.double() for t in given))
    for found, eager, exact in zip(*(side if isinstance(side, tuple) else (side,) for side in sides), strict=True):
        assert_as_exact_as_eager(found, eager, exact)


def test_tangents_from_outside() -> None:
    x, weight, bias = (t.detach() for t in inputs((512,), 256, 256))
    compiled = torch.compile(ops.linear, backend="eager")
    compiled(x, weight, bias)
    with forward_ad.dual_level():
        dual = compiled(forward_ad.make_dual(x, x), weight, bias)
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, F.linear(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("how", [half, double, on_reference])
def test_calls_that_stay_with_torch(how: Callable[..., Any]) -> None:
    given = [t.detach() for t in inputs((512,), 256, 256)]
    out, found = compiled_ops(lambda *given: how(ops.linear, *given), *given)
    assert torch.equal(out, how(F.linear, *given)) and count(found, OP) == 0


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_has_torch_s_own(strict: bool) -> None:
    layer = tfast.layers.linear.Linear(256, 256)
    program = torch.export.export(layer, (torch.randn(512, 256),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default"]
