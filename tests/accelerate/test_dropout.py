"""accelerate on dropout: modules, and calls of torch's functions in code of any structure."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import dropout as imported
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.accelerate.sdpa import NAME as ATTENTION
from transformer_fast.layers.dropout import Dropout, builtin_dropout, dropout

OURS = "tfast.dropout"
X = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))


class Seen(TorchDispatchMode):
    """Whether our dropout ran forward."""

    ours = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ours |= str(func) == "transformer_fast.dropout.default"
        return func(*args, **(kwargs or {}))


def is_ours(call: Callable[[], Tensor]) -> bool:
    """Whether a call runs our op."""
    with Seen() as seen:
        call()
    return seen.ours


def leaf(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_the_share_the_scale_and_the_mask_of_the_gradient(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(500, 400, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    kept = y != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert y.dtype == dtype
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(grad, y)


def test_the_seed_of_torch_decides() -> None:
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append((dropout(X, 0.3), dropout(X, 0.3)))
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1]) and not torch.equal(drawn[0][0], drawn[2][0])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, 0, 1])
def test_nothing_to_drop_returns_the_input_itself(p: float) -> None:
    for ours, torchs in ((dropout, F.dropout), (lambda *a: builtin_dropout(*a), torch.dropout)):
        assert (ours(X, p, False) is X) and (torchs(X, p, False) is X)
        if p == 0:
            assert ours(X, p, True) is X and torchs(X, p, True) is X
    empty = torch.zeros(3, 0)
    assert dropout(empty, 0.3) is F.dropout(empty, 0.3) is empty


class Labelled(Tensor):
    pass


SERVED_BY_TORCH: dict[str, Callable[[Any], Tensor]] = {
    "a subclass": lambda f: f(X.as_subclass(Labelled), 0.4),
    "in place": lambda f: f(X.clone(), 0.4, True, True),
    "all of it, not a number": lambda f: f(torch.full((3, 4), float("nan")), 1.0),
    "no dimension": lambda f: f(torch.tensor(2.0), 0.4),
    "gaps": lambda f: f(X[:, ::2], 0.4),
    "expanded": lambda f: f(X[:1].expand(9, -1), 0.4),
    "vmap": lambda f: torch.func.vmap(lambda x: f(x, 0.4), randomness="different")(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x, 0.4).square().sum())(X),
    "traced": lambda f: torch.jit.trace(lambda x: f(x, 0.4), X, check_trace=False)(X),
    "keywords": lambda f: f(input=X.clone(), p=0.4, training=True, inplace=True),
}


@pytest.mark.parametrize("what", SERVED_BY_TORCH)
def test_what_the_op_does_not_serve_is_torchs(what: str) -> None:
    results = []
    for function in (dropout, F.dropout):
        torch.manual_seed(1)
        results.append(SERVED_BY_TORCH[what](function))
    ours, torchs = results
    assert type(ours) is type(torchs) and ours.stride() == torchs.stride()
    assert torch.allclose(ours, torchs, rtol=0, atol=0, equal_nan=True)


def test_forward_mode_differentiation() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, torch.ones_like(X))
        y, tangent = forward_ad.unpack_dual(dropout(x, 0.4))
        assert torch.equal(tangent != 0, y != 0)


WRONG: dict[str, Callable[[Any], Tensor]] = {
    "p above": lambda f: f(X, 1.5),
    "p below, in evaluation": lambda f: f(X, -0.5, False),
    "p is not a number": lambda f: f(X, "half"),
    "training is a number": lambda f: f(X, 0.4, 1),
    "complex": lambda f: f(torch.randn(40, 40, dtype=torch.complex64), 0.4),
    "no tensor": lambda f: f([1.0], 0.5),
    "integers": lambda f: f(torch.ones(3, 4, dtype=torch.long), 0.5),
    "too many": lambda f: f(X, 0.5, True, False, 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_gets_torchs_error(what: str) -> None:
    errors = []
    for function in (dropout, F.dropout):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            WRONG[what](function)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (2, 0, 1)])
def test_the_order_of_the_strides_stays(order: tuple[int, ...]) -> None:
    """What a view of torch's result can do, a view of ours can: (L, B, D) tensors of transposed (B, L, D)."""
    x = leaf(torch.randn(4, 5, 6))
    y = dropout(x.permute(order), 0.4)
    assert y.stride() == F.dropout(x.permute(order), 0.4).stride() == x.permute(order).stride()
    assert is_ours(lambda: dropout(x.permute(order), 0.4))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = (y != 0).permute([order.index(i) for i in range(3)])
    torch.testing.assert_close(grad, kept / 0.6)


def test_modules() -> None:
    m = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4), nn.Dropout(0.3, inplace=True), nn.Dropout1d(0.1))
    twin = copy.deepcopy(m)
    fired: list[Any] = []
    m[1].register_forward_hook(lambda module, args, out: fired.append(module))
    report = tfast.accelerate(m)
    assert [(row.path, row.was, row.now) for row in report.swapped] == [("1", "nn.Dropout", "layers.Dropout")]
    assert [(row.path, row.why) for row in report.left] == [("2", "it works in place, which the kernel does not")]
    assert (
        type(m[1]) is Dropout
        and repr(m) == repr(twin)
        and report.plain["Dropout1d"] == 1
        and "Dropout" not in report.plain
    )
    assert is_ours(lambda: m[1](leaf())) and not is_ours(lambda: twin[1](leaf()))
    assert m.eval()[1](X) is X and torch.equal(m(X), twin.eval()(X)) and fired == [m[1]] * 3
    m[1]._forward_hooks.clear()
    assert type(copy.deepcopy(m)[1]) is type(pickle.loads(pickle.dumps(m[1]))) is Dropout
    assert [row.path for row in tfast.accelerate(m).already] == ["1"]
    report.undo()
    assert type(m[1]) is nn.Dropout


def test_many_are_one_line() -> None:
    m = nn.Sequential(*[nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1)) for _ in range(5)], nn.Dropout(inplace=True))
    report = tfast.accelerate(m)
    assert [row.path for row in report.swapped if row.was == "nn.Dropout"] == [f"{i}.1" for i in range(5)]
    lines = [line.split("  ")[0] for line in str(report).splitlines()[2:-1]]
    assert lines == ["0.0", "0.1 and 4 more", "1.0", "2.0", "3.0", "4.0", "5"]
    assert str(report).endswith("10 modules swapped, 1 left; nothing to gain in 6 Sequential")


@pytest.mark.parametrize("training", [False, True])
def test_graphs_hold_what_they_held(training: bool) -> None:
    """Compiled, exported, traced and scripted: torch's dropout, which a compiler knows how to fuse."""
    torch._dynamo.reset()
    m = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4), Calls()).train(training)
    fast = copy.deepcopy(m)
    assert len(tfast.accelerate(fast).swapped) == 2
    graphs: list[list[str]] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    for model in (m, fast):
        torch.manual_seed(2)
        out = torch.compile(model, fullgraph=True, backend=keep_graph)(X)
        torch.manual_seed(2)
        assert torch.equal(out, m(X))
        for strict in (False, True):
            program = torch.export.export(model, (X,), strict=strict)
            graphs.append([str(node.target) for node in program.graph.nodes if node.op == "call_function"])
        traced = torch.jit.trace(model, X, check_trace=False)
        graphs.append([node.kind() for node in traced.inlined_graph.nodes()])
    half = len(graphs) // 2
    assert any("dropout" in name for name in graphs[0]) and not any("transformer_fast" in n for g in graphs for n in g)
    assert graphs[1:half] == graphs[half + 1 :]
    scripted = [torch.jit.script(model) for model in (m[:2], fast[:2])]
    torch.manual_seed(2)
    expected = scripted[0](X)
    torch.manual_seed(2)
    assert torch.equal(scripted[1](X), expected)


def test_onnx(tmp_path: Any) -> None:
    m = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4)).eval()
    fast = copy.deepcopy(m)
    tfast.accelerate(fast)
    for name, model in (("before", m), ("after", fast)):
        torch.onnx.export(model, (X,), tmp_path / name, dynamo=False)
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


class Calls(nn.Module):
    """The name that stands for torch's function, and for an attribute of the module."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.dropout = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.dropout, training=self.training)


class FullName(Calls):
    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout
        return nn.functional.dropout(x, dropout, self.training) if dropout > 0 else x


class ByName(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return imported(x, self.dropout, self.training)


class Builtin(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, self.dropout, train=self.training)


class Inside(Calls):
    def forward(self, x: Tensor) -> Tensor:
        def run(y: Tensor) -> Tensor:
            return imported(y, self.dropout, self.training)

        return checkpoint(run, x, use_reentrant=False)


class Held(Calls):
    def __init__(self) -> None:
        super().__init__()
        self.drop = F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, self.dropout, self.training)


def helper(x: Tensor, module: Calls) -> Tensor:
    return F.dropout(x, module.dropout, module.training)


class Helper(Calls):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x, self)


FORMS = (Calls, FullName, ByName, Builtin, Inside, Held, Helper)


@pytest.mark.parametrize("form", FORMS)
def test_however_it_is_called(form: type[Calls]) -> None:
    torch._dynamo.reset()
    model, fast = form(), form()
    report = tfast.accelerate(fast)
    where = "drop" if form is Held else "forward"
    assert [(row.was, row.now, row.why) for row in report.rows] == [(form.__name__, f"{OURS} in {where}", "")]
    x = leaf()
    assert is_ours(lambda: fast(x)) and not is_ours(lambda: model(x))
    assert fast.dropout == model.dropout == 0.4
    torch.manual_seed(3)
    y = fast(x)
    torch.manual_seed(3)
    assert torch.equal(y, dropout(x, 0.4))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))  # Inside: drawn again by the checkpoint
    torch.testing.assert_close(grad, (y != 0) / 0.6)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    out = compiled(leaf())
    torch.manual_seed(3)
    assert torch.equal(out, torch.compile(model, fullgraph=True, backend="aot_eager")(leaf()))
    twins = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))]
    assert all(type(twin) is type(fast) and is_ours(lambda twin=twin: twin(leaf())) for twin in twins)
    assert torch.equal(fast.eval()(X), X)
    assert [row.path for row in tfast.accelerate(fast).already] == [""]
    report.undo()
    assert type(fast) is form and not is_ours(lambda: fast.train()(leaf()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask(reentrant: bool) -> None:
    fast = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4), Calls())
    tfast.accelerate(fast)
    x, results = leaf(), []
    for again in (False, True):
        x.grad = None
        torch.manual_seed(3)
        out = checkpoint(fast, x, use_reentrant=reentrant, preserve_rng_state=True) if again else fast(x)
        out.square().sum().backward()
        results.append((out, x.grad))
    assert all(torch.equal(*tensors) for tensors in zip(*results, strict=True))


class Both(nn.Module):
    """Two functions of torch in one class, one of them in two methods."""

    p = 0.4

    def attend(self, q: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return shared(attended, self.p if self.training else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.attend(x.unflatten(-1, (4, -1)).transpose(0, 1)), self.p, self.training)


def shared(q: Tensor, p: float) -> Tensor:
    return F.scaled_dot_product_attention(F.dropout(q, p), q, q)


class OnlyDropout(Calls):
    """It shares a function with a class that calls both, and is replaced on its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def other(self, q: Tensor) -> Tensor:
        return shared(q, self.dropout)


class SuperDropout(Both):
    def attend(self, q: Tensor) -> Tensor:
        return q * 2

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(0, 1)
        return F.scaled_dot_product_attention(q, q, q) + super().forward(x)


def test_two_functions_in_one_class() -> None:
    fast = Both()
    report = tfast.accelerate(fast)
    assert [row.now for row in report.rows] == [f"{OURS} in attend, forward; {ATTENTION} in attend"]
    torch.testing.assert_close(fast.eval()(X), Both().eval()(X))
    calls = [str(node) for node in torch.export.export(fast, (X,)).graph.nodes]
    assert sum("attention" in call for call in calls) >= 2 and not any("scaled_dot" in call for call in calls)
    assert is_ours(lambda: fast.train()(leaf()))
    report.undo()
    assert type(fast) is Both


def test_one_of_two_functions_stays() -> None:
    fast = SuperDropout()
    (row,) = tfast.accelerate(fast).rows
    assert row.now == f"{ATTENTION} in forward"
    assert row.why == "its F.dropout stays: SuperDropout.forward calls super(), whose Both.forward calls it"
    torch.testing.assert_close(fast.eval()(X), SuperDropout().eval()(X))


def test_every_set_of_functions_has_its_own_copies() -> None:
    """A function that calls both, reached from a class that has both replaced and, later, from one of another set."""
    first, second = Both(), OnlyDropout()
    tfast.accelerate(first)
    expected = Both().eval()(X)
    assert tfast.accelerate(second).rows[0].now == f"{OURS} in forward, other; {ATTENTION} in other"
    torch.testing.assert_close(first.eval()(X), expected)


def test_a_class_with_more_names_than_an_instruction_has_room_for() -> None:
    names = "\n".join(f"    x = x + self.n{i}" for i in range(300))
    scope: dict[str, Any] = {"F": F}
    late = f"def forward(self, x):\n{names}\n    return F.dropout(x, self.dropout, self.training)"
    early = f"def forward(self, x):\n    x = F.dropout(x, self.dropout, self.training)\n{names}\n    return x"
    for source in (late, early):
        exec(source, scope)
        kind = type("Many", (Calls,), {"forward": scope["forward"], **{f"n{i}": 0.0 for i in range(300)}})
        fast = kind()
        (row,) = tfast.accelerate(fast).rows
        assert row.now == f"{OURS} in forward"
        assert is_ours(lambda fast=fast: fast(leaf())) and torch.equal(fast.eval()(X), X)


def test_a_module_whose_call_was_overridden() -> None:
    """Only its methods are copied: what its __call__ does stays."""

    class Counted(Calls):
        calls = 0

        def __call__(self, *args: Any) -> Any:
            type(self).calls += 1
            return super().__call__(*args)

    fast = Counted()
    assert tfast.accelerate(fast).rows[0].now == f"{OURS} in forward"
    assert is_ours(lambda: fast(leaf())) and fast.calls == 1


def test_other_devices_stay_with_torch() -> None:
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), Calls()).to("meta")
    report = tfast.accelerate(m)
    assert not report.swapped and all("meta device" in row.why for row in report.left)
    assert dropout(torch.empty(3, 4, device="meta"), 0.4).is_meta


def test_the_reference_is_used_when_it_is_asked_for() -> None:
    with tfast.backend("reference"):
        torch.manual_seed(1)
        reference = dropout(X, 0.4)
    torch.manual_seed(1)
    assert torch.equal(reference, dropout(X, 0.4))


class OnGpu(nn.Sequential):
    """It says that its parameters are on a GPU."""

    def parameters(self, recurse: bool = True) -> Any:
        yield types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)


def test_on_a_gpu_it_stays_with_the_reason() -> None:
    report = tfast.accelerate(OnGpu(nn.Dropout(0.4), nn.Dropout(0.3), Both()))
    reason = "on a GPU it was not measured against ours"
    assert not report.swapped and [row.why for row in report.left if row.path in ("0", "1")] == [reason] * 2
    stays = f"its F.dropout stays: {reason}; its F.scaled_dot_product_attention stays: {reason}"
    assert [row.why for row in report.left if row.path == "2"] == [stays]
    assert "\n0, 1 " in str(report)
