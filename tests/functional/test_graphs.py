"""Blocks and graphs: a compiled function in a block, a block in a compiled function, export, traces and scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import from_one_seed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast

X = torch.randn(2, 4, 9, 16)
GAIN = torch.randn(16)


def layer(x: Tensor, p: float = 0.0) -> Tensor:
    y = F.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=True)
    return F.rms_norm(F.dropout(F.layer_norm(y + x, (16,), GAIN), p, True), (16,))


def in_block(x: Tensor, p: float = 0.0) -> Tensor:
    with tfast.functional():
        return layer(x, p)


decorated = tfast.functional()(layer)


class Graphs(list[str]):
    """Backend of torch.compile that keeps the graphs as text."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.append(str(graph.graph))
        return graph.forward


def is_ours(graph: str) -> bool:
    ours, torchs = "transformer_fast" in graph, "scaled_dot_product" in graph
    assert ours is not torchs
    return ours


def step(call: Callable[..., Tensor], p: float = 0.0) -> list[Tensor]:
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    out = call(x, p)
    (out * X.flip(-1)).sum().backward()
    return [out.detach(), x.grad]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def test_a_compiled_function_in_a_block() -> None:
    """Inside and outside have graphs of their own, and each call takes the one of its place."""
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for _ in range(2):
        torch.testing.assert_close(step(compiled), step(layer), rtol=0, atol=0)
        with tfast.functional():
            torch.testing.assert_close(step(compiled), step(layer))
    assert [is_ours(graph) for graph in graphs] == [False, True]


@pytest.mark.parametrize("call", [in_block, decorated], ids=["with", "decorator"])
def test_a_block_in_a_compiled_function(call: Callable[..., Tensor]) -> None:
    graphs = Graphs()
    torch.testing.assert_close(step(torch.compile(call, fullgraph=True, backend=graphs)), step(layer))
    assert [is_ours(graph) for graph in graphs] == [True]
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("call", [in_block, decorated, layer], ids=["with", "decorator", "a block around"])
def test_with_inductor(call: Callable[..., Tensor]) -> None:
    compiled = torch.compile(call, fullgraph=True)
    with tfast.functional():
        torch.testing.assert_close(step(compiled), step(layer))


def test_a_graph_that_breaks_in_a_block() -> None:
    def broken(x: Tensor, p: float) -> Tensor:
        with tfast.functional():
            y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch._dynamo.graph_break()
            return F.layer_norm(y + x, (16,), GAIN)

    expected = step(lambda x, p: F.layer_norm(F.scaled_dot_product_attention(x, x, x, is_causal=True) + x, (16,), GAIN))
    torch.testing.assert_close(step(torch.compile(broken, backend="eager")), expected)
    assert torch._C._len_torch_function_stack() == 0


def test_methods_of_tensors_in_a_compiled_block() -> None:
    """Also those that are written in Python."""

    def call(x: Tensor, p: float) -> Tensor:
        y = x.unflatten(-1, (4, 4)).unflatten(dim=0, sizes=(1, 2))
        return F.layer_norm(torch.stack(y.split(2, -1)).sum(0).norm(dim=-1), (4,)) * p

    compiled = torch.compile(tfast.functional()(call), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, 0.5), call(X, 0.5))


@pytest.mark.parametrize("call", [in_block, layer], ids=["a block inside", "a block around"])
def test_compiled_dropout(call: Callable[..., Tensor]) -> None:
    """F.dropout stays torch's. Attention with dropout is ours if the block is inside: a block around may be missing
    when a checkpoint computes the function again."""
    graphs = Graphs()
    compiled = torch.compile(call, fullgraph=True, backend=graphs)
    with tfast.functional():
        first, again = step(compiled, 0.3), step(compiled, 0.3)
    assert all(map(torch.equal, first, again)) and "transformer_fast.layer_norm" in graphs[0]
    assert ("transformer_fast.attention" in graphs[0]) is (call is in_block)
    assert "scaled_dot_product" not in graphs[0] or call is layer


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_a_compiled_block(reentrant: bool) -> None:
    compiled = torch.compile(in_block, fullgraph=True, backend="aot_eager")
    with tfast.functional():
        found = step(lambda x, p: checkpoint(compiled, x, p, use_reentrant=reentrant), 0.3)
    assert all(map(torch.equal, found, step(compiled, 0.3)))


def test_a_checkpoint_of_a_compiled_function_draws_the_same_bits() -> None:
    """Whatever was compiled for a block around it, random bits are those without the block."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with tfast.functional():
        step(compiled, 0.3)
        found = step(lambda x, p: checkpoint(compiled, x, p, use_reentrant=True), 0.3)
    torch.testing.assert_close(found, step(compiled, 0.3))


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return layer(x, 0.0)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    with tfast.functional():
        program = torch.export.export(Model(), (X,), strict=strict)
    assert is_ours(str(program.graph))
    torch.testing.assert_close(program.module()(X), layer(X))
    plain = program.run_decompositions(tfast.decompositions())
    assert "transformer_fast" not in str(plain.graph)
    torch.testing.assert_close(plain.module()(X), layer(X))


def test_traces_and_scripts_have_torch_s_operators() -> None:
    with tfast.functional():
        traced = torch.jit.trace(layer, (X,), check_trace=False)
        scripted = torch.jit.script(scriptable)
        torch.testing.assert_close(scripted(X, GAIN), layer(X))
    assert not any("transformer_fast" in node.kind() for node in traced.inlined_graph.nodes())
    torch.testing.assert_close(traced(X), layer(X))


def scriptable(x: Tensor, gain: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    return F.rms_norm(F.layer_norm(y + x, (16,), gain), (16,))


def test_symbolic_traces() -> None:
    """A tracer of torch.fx records torch's functions."""
    with tfast.functional():
        graph = torch.fx.symbolic_trace(Model())
    assert not is_ours(str(graph.graph))
    torch.testing.assert_close(graph(X), layer(X))


def test_a_trace_of_operators() -> None:
    """``make_fx`` records our ops, as for swapped modules."""
    with tfast.functional():
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: layer(x))(X)
    assert "transformer_fast.attention" in str(graph.graph)
    torch.testing.assert_close(*from_one_seed(lambda: graph(X), lambda: layer(X)))
