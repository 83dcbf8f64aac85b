"""accelerate on calls of torch's functions: further ways to reach one, and those that are left, with the reason."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdpa_models import Base, GptNorm, causal_helper, pair, step, whose
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

import transformer_fast as tfast
from transformer_fast.accelerate.rebinding import Rebinding, StandIn
from transformer_fast.accelerate.sdpa import NAME

SCALE = 1.0
this = sys.modules[__name__]


def from_a_factory() -> type[nn.Module]:
    """A class made in a function that imports for it."""
    import torch.nn.functional as functional

    class FromAFactory(Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def run() -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            return functional.relu(run())

    return FromAFactory


class Lambda(Base):
    attend = lambda self, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731


class InAComprehension(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(q, k, v, is_causal=i > 0) for i in range(2)]).mean(0)


class NoGrad(Base):
    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=torch.is_tensor(q))


class ByClass(Base):
    @classmethod
    def attend(cls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=issubclass(cls, ByClass))


class Property(Base):
    @property
    def attend(self) -> Callable[..., Tensor]:
        return functools.partial(F.scaled_dot_product_attention, is_causal=True)


class KeywordDefault(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, call: Any = scaled_dot_product_attention) -> Tensor:
        return call(q, k, v, is_causal=True)


class OfAModule(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return this.causal_helper(q, k, v)


class OtherName(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        library = torch.nn
        return library.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Super(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        super().train(self.training)
        return F.scaled_dot_product_attention(q, k, v, is_causal=__class__ is Super)


class Global(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * SCALE


FORMS = (
    from_a_factory(), Lambda, InAComprehension, NoGrad, ByClass, Property, KeywordDefault, OfAModule, OtherName, Super,
    Global,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_it_is_redirected_compiles_and_exports(form: type[nn.Module]) -> None:
    torch._dynamo.reset()
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    assert [row.now for row in report.swapped] == [f"{NAME} in attend"] and not report.left
    torch.testing.assert_close(fast(x), model(x))
    if form is not NoGrad:
        torch.testing.assert_close(step(fast, x), step(model, x))
    assert whose(lambda: fast(x)) == {"ours"} and whose(lambda: model(x)) == {"torch"}
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    program = torch.export.export(fast, (x,), strict=False)
    graphs = "".join(str(part.graph) for part in program.graph_module.modules() if hasattr(part, "graph"))
    assert "transformer_fast.attention" in graphs and "scaled_dot_product" not in graphs
    report.undo()
    assert type(fast) is form and whose(lambda: fast(x)) == {"torch"}


def test_a_copy_reads_globals_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    _, fast, _ = pair(Global)
    compiled, x = torch.compile(fast, fullgraph=True, backend="eager"), torch.randn(2, 5, 16)
    before = fast(x) - fast.out.bias
    torch.testing.assert_close(compiled(x), fast(x))
    monkeypatch.setattr(this, "SCALE", 3.0)
    for call in (fast, compiled):
        torch.testing.assert_close(call(x) - fast.out.bias, 3 * before)


class Elsewhere:
    """What another library calls by the same name."""

    @staticmethod
    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v


class Choice(Base):
    """One of two libraries, by a branch, an argument and in a loop."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, given: Any = Elsewhere) -> Tensor:
        chosen = Elsewhere if self.training else F
        first = chosen.scaled_dot_product_attention(q, k, v) + given.scaled_dot_product_attention(q, k, v)
        library = F
        for _ in range(2):
            first = first + library.scaled_dot_product_attention(q, k, v)
            library = Elsewhere
        return first


@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_may_be_another_one_is_redirected_where_it_is_torch_s(training: bool) -> None:
    model, fast, report = pair(Choice)
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
    """The name of a global and of an attribute."""

    def scaled_dot_product_attention(self, q: Tensor) -> Tensor:
        return q

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.scaled_dot_product_attention(q), k, v, is_causal=True)


LEFT = {
    ImportedInside: "ImportedInside.attend imports torch.nn.functional.scaled_dot_product_attention inside itself",
    ModuleImportedInside: "ModuleImportedInside.attend imports torch.nn.functional inside itself",
    PackageImportedInside: "PackageImportedInside.attend imports torch inside itself",
    CallerImportedInside: "CallerImportedInside.attend imports sdpa_models.causal_helper inside itself",
    InAFunctionThatImports: "importing imports torch.nn.functional inside itself",
    TwoThings: "scaled_dot_product_attention stands for two things in TwoThings.attend",
}


@pytest.mark.parametrize("form", LEFT)
def test_a_call_that_cannot_be_redirected_is_left_by_name(form: type[nn.Module]) -> None:
    model, fast, report = pair(form)
    x = torch.randn(2, 5, 16)
    assert [(row.path, row.why) for row in report.left] == [
        ("", f"its F.scaled_dot_product_attention stays: {LEFT[form]}")
    ]
    assert not report.swapped and type(fast) is form
    for ours, torchs in zip(step(fast, x), step(model, x), strict=True):
        assert torch.equal(ours, torchs)
    assert whose(lambda: fast(x)) == {"torch"}


def test_a_function_of_one_name_stays_where_another_is_redirected() -> None:
    """Dropout is left, attention is not."""

    class Mixed(Base):
        dropout = 0.0

        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dropout(F.scaled_dot_product_attention(q, k, v), self.dropout)

    model, fast, report = pair(Mixed)
    (row,) = (row for row in report.rows if row.path == "")
    assert row.now == f"{NAME} in attend"
    assert row.why == f"its F.dropout stays: dropout stands for two things in {Mixed.attend.__qualname__}"
    torch.testing.assert_close(fast(torch.ones(2, 5, 16)), model(torch.ones(2, 5, 16)))


def test_the_byte_code_of_a_copy_is_that_of_the_original() -> None:
    rebinding = Rebinding([(scaled_dot_product_attention, causal_helper)], "_a_test_")
    copy = rebinding.function(Global.attend)
    assert copy is not None and copy.__code__.co_code == Global.attend.__code__.co_code
    assert copy.__globals__ is globals() and rebinding.function(Base.forward) is None


def test_a_stand_in_is_the_module_but_for_what_was_put_into_it() -> None:
    stand_in = StandIn(this)
    vars(stand_in)["SCALE"] = 7.0
    assert stand_in.SCALE == 7.0 and stand_in.Base is Base and stand_in.__name__ == __name__
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
    """Known by numbers: by its eps too, also where the difference is below every tolerance on ordinary rows."""
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
