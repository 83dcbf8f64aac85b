"""Kernels of a call by the dispatcher: of its device; on a CPU with a driver for launches, of the chosen backend."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_calls import Call, Draw, Operators, by_dispatcher, calls, token_calls
from torch import Tensor

import transformer_fast as tfast

recording = pytest.importorskip("recording_driver")
launched, on_a_gpu = recording.launched, recording.on_a_gpu

WAYS: dict[str, Callable[[torch.nn.Module, tuple[Tensor, ...]], Callable[..., object]]] = {
    "compiled": lambda model, given: torch.compile(model, backend="aot_eager", fullgraph=True),
    "exported": lambda model, given: torch.export.export(model, given).module(),
}


class Norm(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return tfast.layer_norm(x, None, None)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_runs_on_the_kernels_that_are_chosen_where_it_runs(on_a_gpu: list, way: str) -> None:
    x = torch.randn(4, 16)
    torch._dynamo.reset()
    run = WAYS[way](Norm(), (x,))
    for backend, count in (("triton", 1), ("native", 0), ("triton", 1)):
        on_a_gpu.clear()
        with tfast.backend(backend):
            run(x)
        assert len(on_a_gpu) == count, backend


def found() -> dict[str, Call]:
    names = "layer_norm", "dropout, bias, ReLU, dropout", "attention_packed"
    return {name: (calls() | token_calls())[name] for name in names}


@pytest.mark.parametrize("name", found())
def test_a_backward_runs_on_the_kernels_of_its_forward(on_a_gpu: list, name: str) -> None:
    call = found()[name]
    leaves = {key: call.tensors[key].requires_grad_() for key in call.leaves}
    for forward, backward in (("triton", "native"), ("native", "triton")):
        on_a_gpu.clear()
        with tfast.backend(forward), by_dispatcher():
            out = call.outputs(**leaves)[0]
        before = len(on_a_gpu)
        with tfast.backend(backward), Operators() as operators:
            torch.autograd.grad(out, leaves.values(), Draw(1).floats(*out.shape))
        assert operators.ours and (before > 0, len(on_a_gpu) > before) == (forward == "triton",) * 2


def test_without_launches_on_the_cpu_the_device_decides(launched: list) -> None:
    recording.extension.module().launch_on_cpu(False)
    torch.ops.transformer_fast.dropout(torch.randn(4, 16), None, None, True, 0.1, torch.tensor([1]))
    assert not launched
