"""Accelerated models in torch.fx: equal graph nodes, results, copies and pickles as before."""

import copy
import io
import operator
import pickle
import warnings
from typing import Any

import handwritten as hw
import pytest
import torch
from swapped_modules import E, L, N, assert_alike, assert_as_torch, every_kind, inputs, make, outcome, swapped
from torch import Tensor, fx, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import transformer_fast as tfast


class Holder(nn.Module):
    """Module that passes the right number of arguments to another one and computes with the result."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.count = inner, len(inputs(type(inner)))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out = self.inner(*(a, b, c)[: self.count])
        return (out[0] if isinstance(self.inner, nn.MultiheadAttention) else out) * 2.0


class Model(nn.Module):
    """Modules of all kinds, several of them nested."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = make(nn.Embedding)
        self.norms = nn.Sequential(make(nn.LayerNorm), make(nn.RMSNorm), make(nn.Dropout))
        self.attention = make(nn.MultiheadAttention)
        self.model = nn.Transformer(E, 2, 1, 1, 12, 0.0, batch_first=True)
        self.out = nn.Linear(E, 6)

    def forward(self, ids: Tensor, blocked: Tensor) -> Tensor:
        x = self.norms(self.embed(ids))
        out, _ = self.attention(x, x, value=x, key_padding_mask=blocked)
        x = self.model.encoder(x + out, src_key_padding_mask=blocked)
        return self.out(self.model.decoder(out, x, memory_key_padding_mask=blocked))


class Inside(fx.Tracer):
    """Tracer that traces into each module."""

    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return False


class Attentions(fx.Tracer):
    """Tracer that treats attention as a leaf by its class, as tracers of libraries do."""

    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return isinstance(m, nn.MultiheadAttention) or super().is_leaf_module(m, path)


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (N, L)), torch.arange(L) >= torch.tensor([[L], [L - 2], [1]])


def nodes(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(node.op, node.target) for node in graph.nodes]


def copies(traced: fx.GraphModule) -> list[nn.Module]:
    """Return the module, and its copies by copy, pickle and file."""
    file = io.BytesIO()
    torch.save(traced, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced)), loaded]


@every_kind
def test_a_swapped_module_is_a_leaf(kind: type[nn.Module]) -> None:
    plain, args = Holder(make(kind)), (inputs(kind) * 3)[:3]
    fast = Holder(swapped(plain.inner))
    ours, theirs = fx.symbolic_trace(fast), fx.symbolic_trace(plain)
    assert nodes(ours.graph) == nodes(theirs.graph) and ("call_module", "inner") in nodes(ours.graph)
    assert type(ours.inner) is type(fast.inner)
    for training in (True, False):
        expected = plain.train(training)(*args)
        for traced in copies(ours):
            torch.testing.assert_close(traced.train(training)(*args), expected)


@every_kind
@pytest.mark.parametrize("tracer", [Inside, Attentions])
def test_tracers_that_look_inside(kind: type[nn.Module], tracer: type[fx.Tracer]) -> None:
    """Such tracers give the graph of torch.nn's class, or fail with its error."""

    def found(module: nn.Module) -> tuple[Any, ...]:
        root, args = Holder(module), (inputs(kind) * 3)[:3]
        graph = tracer().trace(root)
        torch.testing.assert_close(fx.GraphModule(root, graph)(*args), root(*args))
        return tuple(nodes(graph))

    assert_as_torch(make(kind), found)


@every_kind
def test_a_swapped_module_as_the_root(kind: type[nn.Module]) -> None:
    """A root is always traced into, and all of its arguments are placeholders."""
    plain, args = make(kind), inputs(kind)

    def found(module: nn.Module) -> tuple[Any, ...]:
        traced = fx.symbolic_trace(module)
        assert_alike(outcome(lambda: traced(*args)), outcome(lambda: plain(*args)), exactly=False)
        return tuple(node for node in nodes(traced.graph) if node[0] != "placeholder")

    assert_as_torch(plain, found)


def test_a_whole_model() -> None:
    plain, args = Model(), arguments()
    fast = copy.deepcopy(plain)
    assert len(tfast.accelerate(fast).swapped) > 8
    ours, theirs = fx.symbolic_trace(fast), fx.symbolic_trace(plain)
    assert nodes(ours.graph) == nodes(theirs.graph)
    expected = plain(*args)
    for traced in copies(ours):
        torch.testing.assert_close(traced(*args), expected)
        loss = traced(*args).square().sum()
        grads = torch.autograd.grad(loss, list(traced.parameters()), allow_unused=True)
        assert any(grad is not None for grad in grads)


def test_dropout_follows_the_mode_of_the_graph_module() -> None:
    traced = fx.symbolic_trace(nn.Sequential(swapped(nn.Dropout(0.5))))
    x = torch.ones(100)
    assert traced.train()(x).eq(0).any() and torch.equal(traced.eval()(x), x)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Dropout, nn.Linear])
def test_a_hook_runs_once(kind: type[nn.Module]) -> None:
    """The tracer runs and records the hooks of modules that it does not know."""
    model, (x,) = nn.Sequential(swapped(make(kind))), inputs(kind)
    model[0].register_forward_hook(lambda module, args, out: out * 3.0)
    expected = model(x)
    torch.testing.assert_close(fx.symbolic_trace(model)(x), expected)


def test_a_norm_that_takes_the_sum_along_is_recorded() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = swapped(make(nn.LayerNorm))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.norm(y, residual=x)

    model, x, y = Summed(), torch.randn(N, L, E), torch.randn(N, L, E)
    traced = fx.symbolic_trace(model)
    assert ("call_function", operator.add) in nodes(traced.graph) and ("call_module", "norm") in nodes(traced.graph)
    torch.testing.assert_close(traced(x, y), model(x, y))


@pytest.mark.parametrize(
    "name, args",
    [("AnnotatedNorm", (E,)), ("AnnotatedFeedForward", (E, 12)), ("Embeddings", (E, 11))],
)
def test_modules_written_by_hand_are_looked_into(name: str, args: tuple[int, ...]) -> None:
    plain = nn.Sequential(getattr(hw, name)(*args)).eval()
    fast = copy.deepcopy(plain)
    assert any(row.now for row in tfast.accelerate(fast).rows)
    ours, theirs = fx.symbolic_trace(fast), fx.symbolic_trace(plain)
    assert nodes(ours.graph) == nodes(theirs.graph)
    x = torch.randint(0, 11, (N, L)) if name == "Embeddings" else torch.randn(N, L, E)
    torch.testing.assert_close(ours(x), plain(x))


def test_quantisation_of_a_graph() -> None:
    plain = nn.Sequential(nn.Linear(E, E), make(nn.LayerNorm), nn.Linear(E, E), make(nn.RMSNorm)).eval()
    x, results = torch.randn(N, L, E), []
    fast = copy.deepcopy(plain)
    assert len(tfast.accelerate(fast).swapped) >= 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of torchao
        for model in (fast, plain):
            prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
            prepared(x)
            converted = convert_fx(prepared)
            results.append(nodes(converted.graph))
            assert (converted(x) - plain(x)).abs().max() < 0.5
    assert sum(op == "call_module" for op, _ in results[0]) >= 4
