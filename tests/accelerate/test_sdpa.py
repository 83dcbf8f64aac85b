"""accelerate on models that call torch's scaled_dot_product_attention: their code stays, its calls are ours."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sdpa_models as models
import torch
import torch.nn.functional as F
from sdpa_models import Base, Seen, causal_helper, pair, step, whose
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.accelerate.sdpa import NAME
from transformer_fast.accelerate.sdpa import scaled_dot_product_attention as theirs_or_ours


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@plain
def decorated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attribute(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout_p)


class Imported(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return imported(q, k, v, is_causal=True)


class InAFunction(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_helper(q, k, v)


class Decorated(Base):
    @torch.enable_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decorated(q, k, v)


class Static(Base):
    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, attend: Any = imported) -> Tensor:
        return attend(q, k, v, is_causal=True)


class Held(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = F.scaled_dot_product_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.chosen(q, k, v, is_causal=True)


def chosen() -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


class HeldFunction(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = chosen()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.chosen(q, k, v)


partly = functools.partial(F.scaled_dot_product_attention, is_causal=True)


class Partial(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return partly(q, k, v)


class Closure(Base):
    """Backward runs the inner function again, from outside of the module."""

    dropout_p = 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = F.scaled_dot_product_attention

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chosen(q, k, v, is_causal=True, dropout_p=self.dropout_p)

        return checkpoint(run, q, k, v, use_reentrant=False)


class Inherited(Attribute):
    pass


FORMS = (Attribute, Imported, InAFunction, Decorated, Static, Partial, Held, HeldFunction, Closure, Inherited)


IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(12) < torch.tensor([[12], [7]])
NORM, ATTENTION = "fused LayerNorm of", f"{NAME} in"
PARTS = [f"{part}.{i}" for part in ("encoder", "decoder", "cross") for i in (0, 1)]
STYLES: dict[str, tuple[Callable[..., nn.Module], tuple[Tensor, ...], dict[str, str]]] = {
    "gpt": (models.Gpt, (IDS,), {
        "tokens": "layers.Embedding", "positions": "layers.Embedding",
        "norm": f"{NORM} weight, bias and 1e-05",
        **{f"blocks.{i}.norm_{j}": f"{NORM} weight, bias and 1e-05" for i in (0, 1) for j in (1, 2)},
        **{f"blocks.{i}.attention": f"tfast.dropout in forward; {ATTENTION} forward" for i in (0, 1)},
    }),
    "vision": (models.Vision, (torch.randn(2, 3, 16, 16),), {
        "norm": "layers.LayerNorm",
        **{f"blocks.{i}.norm_{j}": "layers.LayerNorm" for i in (0, 1) for j in (1, 2)},
        **{f"blocks.{i}.attention": f"{ATTENTION} forward" for i in (0, 1)},
    }),
    "encoder and decoder": (models.EncoderDecoder, (IDS, IDS[:, :9], KEEP), {
        "tokens": "layers.Embedding",
        **{f"{part}.norm": f"{NORM} gamma, beta and 1e-05" for part in PARTS},
        **{f"{part}.attend": f"{ATTENTION} flash" for part in PARTS},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_the_styles_people_write(name: str) -> None:
    make, inputs, expected = STYLES[name]
    model, fast, report = pair(make)
    assert {row.path: row.now for row in report.swapped if row.was not in ("nn.Dropout", "nn.Linear")} == expected
    assert all(NAME in line for line in str(report).splitlines() if "ttention " in line.split("  ")[0])
    for mode in (False, True):
        torch.testing.assert_close(step(fast.train(mode), *inputs), step(model.train(mode), *inputs))
    assert whose(lambda: fast(*inputs)) == {"ours"} and whose(lambda: model(*inputs)) == {"torch"}


@pytest.mark.parametrize("name", STYLES)
def test_dropout_is_ours_and_follows_the_seed(name: str) -> None:
    make, inputs, _ = STYLES[name]
    model, fast, _ = pair(lambda: make(dropout=0.3))
    assert whose(lambda: fast(*inputs)) == {"ours"}
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(step(fast, *inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0][0], results[2][0])
    torch.testing.assert_close(fast.eval()(*inputs), model.eval()(*inputs))


@pytest.mark.parametrize("name", STYLES)
def test_compiled_in_one_graph_and_exported(name: str) -> None:
    torch._dynamo.reset()
    make, inputs, _ = STYLES[name]
    model, fast, _ = pair(make)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, *inputs), step(model, *inputs))
    program = torch.export.export(fast.eval(), inputs, strict=False)
    assert "scaled_dot_product" not in str(program.graph) and "transformer_fast.attention" in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), model.eval()(*inputs))


@pytest.mark.parametrize("form", FORMS)
def test_however_it_is_called(form: type[nn.Module]) -> None:
    """Eager, compiled and exported; a module of the same class that was not accelerated stays torch's."""
    torch._dynamo.reset()
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    assert [(row.path, row.was) for row in report.swapped] == [("", form.__name__)]
    assert report.swapped[0].now == f"{NAME} in {'chosen' if form in (Held, HeldFunction) else 'attend'}"
    assert whose(lambda: step(fast, x)) == {"ours"} and whose(lambda: step(model, x)) == {"torch"}
    torch.testing.assert_close(step(fast, x), step(model, x))
    graphs: list[str] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        nodes = [node for inner in graph.modules() for node in inner.graph.nodes]  # a checkpoint is a graph of its own
        graphs.append(str([node.target for node in nodes]))
        return graph.forward

    compiled = torch.compile(fast, fullgraph=True, backend=keep_graph)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) == 1 and "scaled_dot_product" not in graphs[0] and "transformer_fast.attention" in graphs[0]
    for strict in (False, True) if form is not Closure else (False,):  # which torch's strict export refuses
        program = torch.export.export(fast, (x,), strict=strict)
        assert "transformer_fast.attention" in str(program.graph)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["module", "method"])
def test_backward_computes_it_again(part: str, reentrant: bool) -> None:
    """Activation checkpointing of a module, or of a method, with dropout: the second time is the first, bit by bit."""
    _, fast, _ = pair(Attribute)
    fast.dropout_p = 0.4
    x, results = torch.randn(2, 5, 16, requires_grad=True), []
    again: dict[str, Callable[[Tensor], Tensor]] = {
        "module": lambda x: checkpoint(fast, x, use_reentrant=reentrant),
        "method": lambda x: checkpoint(lambda q: fast.attend(q, q, q), x, use_reentrant=reentrant),
    }
    for call in (fast if part == "module" else lambda x: fast.attend(x, x, x), again[part]):
        given = x if part == "module" else x.unsqueeze(1)
        x.grad = None
        torch.manual_seed(3)
        with Seen() as seen:
            call(given).square().sum().backward()
        results.append((x.grad, *seen.calls[:1]))
        assert set(seen.calls) == {"ours"}
    assert torch.equal(results[0][0], results[1][0])


def test_a_function_inside_that_backward_calls_again() -> None:
    _, fast, _ = pair(Closure)
    fast.dropout_p = 0.4
    x, gradients = torch.randn(2, 5, 16, requires_grad=True), []
    for _ in range(2):
        torch.manual_seed(3)
        with Seen() as seen:
            gradients += torch.autograd.grad(fast(x).square().sum(), x)
        assert seen.calls == ["ours", "ours"]  # forward, and once more in backward
    assert torch.equal(*gradients)
    once = Attribute()
    once.load_state_dict(fast.state_dict())
    tfast.accelerate(once)
    once.dropout_p = 0.4
    torch.manual_seed(3)
    assert torch.equal(torch.autograd.grad(once(x).square().sum(), x)[0], gradients[0])


def test_threads() -> None:
    """Models that were accelerated and others, at the same time."""
    model, fast, _ = pair(Attribute)
    x, found = torch.randn(2, 5, 16), {}

    def run(name: str, module: nn.Module) -> None:
        found[name] = [whose(lambda: step(module, x)) for _ in range(20)]

    threads = [threading.Thread(target=run, args=pair) for pair in (("fast", fast), ("plain", model)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"fast": [{"ours"}] * 20, "plain": [{"torch"}] * 20}


@pytest.mark.parametrize("form", [Attribute, Held])
def test_undo_copies_and_pickles(form: type[nn.Module]) -> None:
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    assert isinstance(fast, form) and type(fast).__name__ == form.__name__
    assert fast.state_dict().keys() == model.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), torch.load(buffer, weights_only=False)]
    for twin in copies:
        assert type(twin) is type(fast) and whose(lambda twin=twin: twin(x)) == {"ours"}
        assert torch.equal(twin(x), fast(x))
    again = tfast.accelerate(fast)
    assert not again.swapped and [row.path for row in again.already] == [""]
    report.undo()
    assert type(fast) is form and whose(lambda: fast(x)) == {"torch"}
    assert tfast.accelerate(fast).swapped


def test_an_attribute_that_holds_it_can_be_set() -> None:
    model, fast, report = pair(Held)
    assert fast.chosen is theirs_or_ours and model.chosen is imported
    fast.chosen = other = lambda q, k, v, **options: q
    assert fast.chosen is other
    fast.chosen = imported
    assert fast.chosen is theirs_or_ours
    report.undo()
    assert fast.chosen is imported
    fast.chosen = other
    report.undo()
    assert fast.chosen is other and not tfast.accelerate(fast).swapped
    fast.chosen = imported
    assert tfast.accelerate(fast).swapped and fast.chosen is theirs_or_ours
    fast.chosen = module = nn.Identity()
    assert fast.chosen is module
    del fast.chosen
    fast.chosen = imported
    assert fast.chosen is theirs_or_ours


@pytest.mark.parametrize("form", [Held, HeldFunction])
def test_a_compiled_module_calls_what_its_attribute_holds_now(form: type[nn.Module]) -> None:
    torch._dynamo.reset()
    _, fast, _ = pair(form)
    compiled, x = torch.compile(fast, fullgraph=True, backend="eager"), torch.randn(2, 5, 16)
    torch.testing.assert_close(compiled(x), fast(x))
    fast.chosen = lambda q, k, v, **options: 2 * v
    expected = 2 * fast.qkv(x).chunk(3, -1)[2]
    for call in (fast, compiled):
        torch.testing.assert_close(call(x), fast.out(expected))


class OwnFunction(Base):
    """A method of the same name, which is not torch's."""

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(q, k, v)


class Both(OwnFunction):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v)


class BySuper(Attribute):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * 2


class Overridden(Attribute):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


def test_what_is_left_is_named_with_the_reason() -> None:
    model = nn.ModuleDict({form.__name__: form() for form in (OwnFunction, BySuper, Overridden, Attribute)})
    model["Attribute"].forward = lambda x: x
    x = torch.randn(2, 5, 16)
    before = [model[name](x) for name in model]
    report = tfast.accelerate(model)
    found = {row.path: row.why for row in report.left}
    assert not report.swapped and found == {row.path: row.why for row in tfast.accelerate(model).left}
    assert (
        found["OwnFunction"]
        == found["Overridden"]
        == "unknown structure; 0 of the modules inside it run on the fused ops"
    )
    stays = "its F.scaled_dot_product_attention stays: "
    assert found["BySuper"] == stays + "BySuper.attend calls super(), whose Attribute.attend calls it"
    assert found["Attribute"] == stays + "its forward was replaced"
    torch.testing.assert_close([model[name](x) for name in model], before, rtol=0, atol=0)


def test_a_name_that_stands_for_the_module_s_own_method_too() -> None:
    model, fast, report = pair(Both)
    x = torch.randn(2, 5, 16)
    assert [row.now for row in report.rows if row.path == ""] == [f"{NAME} in attend"]
    torch.testing.assert_close(step(fast, x), step(model, x))
    assert whose(lambda: fast(x)) == {"ours"} and whose(lambda: model(x)) == {"torch"}


def test_other_devices_stay_with_torch() -> None:
    q = torch.empty(2, 4, 5, 8, device="meta")
    assert whose(lambda: theirs_or_ours(q, q, q, dropout_p=0.1, is_causal=True, scale=2.0)) <= {"torch"}
    assert "meta device" in tfast.accelerate(Attribute().to("meta")).left[0].why


def test_a_wrong_call_gets_the_error_it_got() -> None:
    _, fast, _ = pair(Attribute)
    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(RuntimeError, match="same dtype"):
        fast.attend(q, q.double(), q)
