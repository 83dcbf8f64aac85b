"""accelerate on dropout modules. ``tests/functional`` has the calls that the function behind them takes or leaves, and
``tests/ops/test_torch_samples.py`` its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import copies, from_one_seed, pair, seems_on_gpu, seen
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers.dropout import Dropout, dropout

X = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))


def is_ours(call: Callable[[], Tensor]) -> bool:
    """Return True if a call runs this package's op."""
    return "dropout" in seen(call)


def leaf(x: Tensor = X) -> Tensor:
    return x.clone().requires_grad_()


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


def test_on_a_gpu_dropout_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.3), nn.LayerNorm(8))
    report = tfast.accelerate(seems_on_gpu(model, monkeypatch))
    reason = "dropout alone is not measured on a GPU, and its launch takes the host longer than torch's"
    assert [(row.path, row.why) for row in report.left] == [("0", reason), ("1", reason)]
    assert [row.path for row in report.swapped] == ["2"]
    assert f"2 nn.Dropout left: {reason} (0" in " ".join(str(report).split())
