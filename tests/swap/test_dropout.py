"""accelerate on dropout modules, and the function that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import copies, from_one_seed, pair, seems_on_gpu, seen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.layers.dropout import Dropout, dropout

X = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))


def is_ours(call: Callable[[], Tensor]) -> bool:
    """Return True if a call runs this package's op."""
    return "dropout" in seen(call)


def leaf(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_the_mask_the_scale_and_the_gradient(p: float, dtype: torch.dtype) -> None:
    """The mask equals the reference's mask of the same seed. The op's tests test its share."""
    x = torch.ones(500, 400, dtype=dtype, requires_grad=True)
    y, again = from_one_seed(lambda: dropout(x, p), lambda: dropout(x, p))
    with tfast.backend("reference"):
        assert torch.equal(y, from_one_seed(lambda: dropout(x, p))[0])
    kept = y != 0
    assert torch.equal(y, again) and not torch.equal(y, dropout(x, p)) and y.dtype == dtype
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - p)))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(grad, y)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0, 0, 1])
def test_nothing_to_drop_returns_the_input_itself(p: float) -> None:
    for function in (dropout, F.dropout):
        assert function(X, p, False) is X and (p != 0 or function(X, p, True) is X)
    empty = torch.zeros(3, 0)
    assert dropout(empty, 0.3) is F.dropout(empty, 0.3) is empty


class Labelled(Tensor):
    """Tensor subclass of a user."""


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
    call = SERVED_BY_TORCH[what]
    ours, torchs = from_one_seed(lambda: call(dropout), lambda: call(F.dropout))
    assert type(ours) is type(torchs) and ours.stride() == torchs.stride()
    assert torch.allclose(ours, torchs, rtol=0, atol=0, equal_nan=True)


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
    """A view that works on torch's result works on ours: (L, B, D) tensors of transposed (B, L, D)."""
    x = leaf(torch.randn(4, 5, 6))
    y = dropout(x.permute(order), 0.4)
    assert y.stride() == F.dropout(x.permute(order), 0.4).stride() == x.permute(order).stride()
    assert is_ours(lambda: dropout(x.permute(order), 0.4))
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(grad, (y != 0).permute([order.index(i) for i in range(3)]) / 0.6)


def test_modules() -> None:
    twin, m, report = pair(
        nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4), nn.Dropout(0.3, inplace=True), nn.Dropout1d(0.1))
    )
    fired: list[Any] = []
    m[1].register_forward_hook(lambda module, args, out: fired.append(module))
    assert [(row.path, row.was, row.now) for row in report.swapped] == [("1", "nn.Dropout", "layers.Dropout")]
    assert [(row.path, row.why) for row in report.left] == [("2", "it works in place, which the kernel does not")]
    assert report.plain["Dropout1d"] == 1 and "Dropout" not in report.plain
    assert type(m[1]) is Dropout and repr(m) == repr(twin)
    assert is_ours(lambda: m[1](leaf())) and not is_ours(lambda: twin[1](leaf()))
    assert m.eval()[1](X) is X and torch.equal(m(X), twin.eval()(X)) and fired == [m[1]] * 3
    m[1]._forward_hooks.clear()
    assert all(type(copy) is Dropout for copy in copies(m[1]))
    assert [row.path for row in tfast.accelerate(m).already] == ["1"]
    report.undo()
    assert type(m[1]) is nn.Dropout


@pytest.mark.parametrize("training", [False, True])
def test_graphs_hold_what_they_held(training: bool) -> None:
    """Compiled and exported models contain torch's dropout, which a compiler can fuse."""
    torch._dynamo.reset()
    m, fast, report = pair(nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4), nn.Dropout(0.3)).train(training))
    assert [row.was for row in report.swapped] == ["nn.Dropout"] * 2
    graphs: list[list[str]] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    for model in (m, fast):
        compiled = torch.compile(model, fullgraph=True, backend=keep_graph)
        assert torch.equal(*from_one_seed(lambda compiled=compiled: compiled(X), lambda: m(X)))
        for strict in (False, True):
            program = torch.export.export(model, (X,), strict=strict)
            graphs.append([str(node.target) for node in program.graph.nodes if node.op == "call_function"])
    half = len(graphs) // 2
    assert any("dropout" in name for name in graphs[0]) and not any("transformer_fast" in n for g in graphs for n in g)
    assert graphs[1:half] == graphs[half + 1 :]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_mask(reentrant: bool) -> None:
    fast, x, results = nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.4)), leaf(), []
    tfast.accelerate(fast)
    for call in (fast, lambda x: checkpoint(fast, x, use_reentrant=reentrant, preserve_rng_state=True)):
        x.grad = None
        (out,) = from_one_seed(lambda call=call: call(x))
        out.square().sum().backward()
        results.append((out, x.grad))
    assert all(torch.equal(*tensors) for tensors in zip(*results, strict=True))


def test_other_devices_stay_with_torch() -> None:
    report = tfast.accelerate(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4)).to("meta"))
    assert not report.swapped and all("meta device" in row.why for row in report.left)
    assert dropout(torch.empty(3, 4, device="meta"), 0.4).is_meta


def test_on_a_gpu_dropout_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.3), nn.LayerNorm(8))
    report = tfast.accelerate(seems_on_gpu(model, monkeypatch))
    reason = "dropout alone is not measured on a GPU, and its launch takes the host longer than torch's"
    assert [(row.path, row.why) for row in report.left] == [("0", reason), ("1", reason)]
    assert [row.path for row in report.swapped] == ["2"]
    assert f"2 nn.Dropout left: {reason} (0" in " ".join(str(report).split())
