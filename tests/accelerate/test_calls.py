"""accelerate on calls of torch's functions: forms of calls that it redirects, and those that it leaves, with the
reason."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import sdpa_forms
import torch
import torch.nn.functional as F
from accelerated import copies, pair, step, whose
from sdpa_forms import FORMS, Closure, Global, NoGrad
from sdpa_models import Base, GptNorm, causal_helper
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import transformer_fast as tfast
from transformer_fast.accelerate.rebinding import Rebinding, StandIn
from transformer_fast.accelerate.sdpa import NAME

this = sys.modules[__name__]


UNPICKLED = "Closure", "HeldFunction", "FromAFactory"
"""Forms with a function that pickle does not find by its name."""


@pytest.mark.parametrize("form", FORMS)
def test_however_it_is_called(form: type[nn.Module]) -> None:
    """A module of the same class that was not accelerated still calls torch's function."""
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    place = "chosen" if hasattr(model, "chosen") else "attend"
    assert [(row.path, row.was, row.now) for row in report.rows] == [("", form.__name__, f"{NAME} in {place}")]
    torch.testing.assert_close(fast(x), model(x))
    assert whose(lambda: fast(x)) == {"ours"} and whose(lambda: model(x)) == {"torch"}
    if form is not NoGrad:
        torch.testing.assert_close(step(fast, x), step(model, x))
    assert fast.state_dict().keys() == model.state_dict().keys()
    again = tfast.accelerate(fast)
    assert not again.swapped and [row.path for row in again.already] == [""]
    for twin in copies(fast) if form.__name__ not in UNPICKLED else []:
        assert type(twin) is type(fast) and whose(lambda twin=twin: twin(x)) == {"ours"}
        assert torch.equal(twin(x), fast(x))
    report.undo()
    assert type(fast) is form and whose(lambda: fast(x)) == {"torch"}


@pytest.mark.cover(5)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_and_exported(form: type[nn.Module]) -> None:
    torch._dynamo.reset()
    (model, fast, _), x, graphs = pair(form), torch.randn(2, 5, 16), []

    def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(torch.compile(fast, fullgraph=True, backend=keep_graph)(x), model(x))
    assert len(graphs) == 1
    for strict in (False, True) if form is not Closure else (False,):  # which torch's strict export refuses
        graphs.append(torch.export.export(fast, (x,), strict=strict).graph_module)
    for graph in graphs:  # a checkpoint is a graph of its own
        nodes = str([node.target for part in graph.modules() if hasattr(part, "graph") for node in part.graph.nodes])
        assert "transformer_fast.attention" in nodes and "scaled_dot_product" not in nodes


def test_a_copy_reads_globals_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    _, fast, _ = pair(Global)
    compiled, x = torch.compile(fast, fullgraph=True, backend="eager"), torch.randn(2, 5, 16)
    before = fast(x) - fast.out.bias
    torch.testing.assert_close(compiled(x), fast(x))
    monkeypatch.setattr(sdpa_forms, "SCALE", 3.0)
    for call in (fast, compiled):
        torch.testing.assert_close(call(x) - fast.out.bias, 3 * before)


class Elsewhere:
    """Module that calls another library's function of the same name."""

    @staticmethod
    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


class Choice(Base):
    """Module that calls one of two libraries, chosen by a branch, by an argument and in a loop."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, given: Any = Elsewhere) -> Tensor:
        chosen = Elsewhere if self.training else F
        first = chosen.scaled_dot_product_attention(q, k, v) + given.scaled_dot_product_attention(q, k, v)
        library = F
        for _ in range(2):
            first = first + library.scaled_dot_product_attention(q, k, v)
            library = Elsewhere
        return first


class BothNames(Base):
    """Module whose method has the name of the function."""

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("form", [Choice, BothNames])
def test_what_may_be_another_function_is_redirected_where_it_is_torch_s(form: type[nn.Module], training: bool) -> None:
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    assert [row.now for row in report.swapped] == [f"{NAME} in attend"]
    torch.testing.assert_close(step(fast.train(training), x), step(model.train(training), x))
    assert whose(lambda: fast(x)) == {"ours"} and whose(lambda: model(x)) == {"torch"}


class ImportedInside(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention as other

        return other(q, k, v, is_causal=True)


class ModuleImportedInside(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        import torch.nn.functional as functional

        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class PackageImportedInside(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        import torch

        def run() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run()


class CallerImportedInside(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from sdpa_models import causal_helper as helper

        return helper(q, k, v)


def importing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class InAFunctionThatImports(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return importing(q, k, v)


class TwoThings(Base):
    """Module that uses one name for a global and for an attribute."""

    def scaled_dot_product_attention(self, q: Tensor) -> Tensor:
        return q

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.scaled_dot_product_attention(q), k, v, is_causal=True)


class BySuper(sdpa_forms.Attribute):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * 2


class Replaced(sdpa_forms.Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.forward = super().forward


LEFT = {
    ImportedInside: "ImportedInside.attend imports torch.nn.functional.scaled_dot_product_attention inside itself",
    ModuleImportedInside: "ModuleImportedInside.attend imports torch.nn.functional inside itself",
    PackageImportedInside: "PackageImportedInside.attend imports torch inside itself",
    CallerImportedInside: "CallerImportedInside.attend imports sdpa_models.causal_helper inside itself",
    InAFunctionThatImports: "importing imports torch.nn.functional inside itself",
    TwoThings: "TwoThings.attend uses the name scaled_dot_product_attention for another value too",
    BySuper: "BySuper.attend calls it through super(), in Attribute.attend",
    Replaced: "its forward was replaced",
}


@pytest.mark.parametrize("form", LEFT)
def test_a_call_that_cannot_be_redirected_is_left_by_name(form: type[nn.Module]) -> None:
    model, fast, report = pair(form)
    x, why = torch.randn(2, 5, 16), f"its F.scaled_dot_product_attention stays: {LEFT[form]}"
    for found in (report, tfast.accelerate(fast)):
        assert not found.swapped and [(row.path, row.why) for row in found.left] == [("", why)]
    assert type(fast) is form and whose(lambda: fast(x)) == {"torch"}
    torch.testing.assert_close(step(fast, x), step(model, x), rtol=0, atol=0)


class OwnFunction(BothNames):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(q, k, v)


class Overridden(sdpa_forms.Attribute):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


@pytest.mark.parametrize("form", [OwnFunction, Overridden])
def test_where_torch_s_is_never_called(form: type[nn.Module]) -> None:
    _, fast, report = pair(form)
    assert not report.swapped and type(fast) is form
    assert [row.why for row in report.left] == ["unknown structure; 0 of the modules inside it run on the fused ops"]


def test_a_function_of_one_name_stays_where_another_is_redirected() -> None:
    """Dropout stays torch's, attention is redirected."""

    class Mixed(Base):
        dropout = 0.0

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dropout(F.scaled_dot_product_attention(q, k, v), self.dropout)

    model, fast, report = pair(Mixed)
    (row,) = (row for row in report.rows if row.path == "")
    assert row.now == f"{NAME} in attend"
    assert row.why == f"its F.dropout stays: {Mixed.attend.__qualname__} uses the name dropout for another value too"
    torch.testing.assert_close(fast(torch.ones(2, 5, 16)), model(torch.ones(2, 5, 16)))


def test_the_byte_code_of_a_copy_is_that_of_the_original() -> None:
    rebinding = Rebinding([(scaled_dot_product_attention, causal_helper)], "_a_test_")
    copy = rebinding.function(Global.attend)
    assert copy is not None and copy.__code__.co_code == Global.attend.__code__.co_code
    assert copy.__globals__ is vars(sdpa_forms) and rebinding.function(Base.forward) is None


def test_a_stand_in_is_the_module_but_for_what_was_put_into_it() -> None:
    stand_in = StandIn(this)
    vars(stand_in)["NAME"] = 7.0
    assert stand_in.NAME == 7.0 and stand_in.Base is Base and stand_in.__name__ == __name__
    stand_in.later = 5  # type: ignore[attr-defined]
    assert this.later == 5  # type: ignore[attr-defined]
    del stand_in.later
    assert not hasattr(this, "later")
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        stand_in.missing  # noqa: B018


class Shifted(GptNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight + 1, self.bias, 1e-5)


class WithEps(GptNorm):
    def __init__(self, width: int, bias: bool, eps: float, used: float | None = None) -> None:
        super().__init__(width, bias)
        self.eps, self.used = eps, eps if used is None else used

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.used)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-12])
def test_a_norm_around_the_function_of_torch(bias: bool, eps: float) -> None:
    """The probe tells eps apart even if the difference is below every tolerance on ordinary rows."""
    model, fast, report = pair(lambda: WithEps(8, bias, eps))
    assert [row.now for row in report.swapped] == ["fused LayerNorm of weight, bias and eps"]
    for scale in (1.0, eps**0.5):
        x = scale * torch.randn(3, 8, dtype=torch.float32)
        torch.testing.assert_close(step(fast, x), step(model, x))
    for other in (torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 7)):
        with pytest.raises(RuntimeError) as expected:
            model(other)
        with pytest.raises(RuntimeError) as actual:
            fast(other)
        assert str(actual.value) == str(expected.value)
    for wrong in (Shifted(8, bias), WithEps(8, bias, eps, used=2 * eps)):
        assert "computes something else" in tfast.accelerate(wrong).left[0].why
