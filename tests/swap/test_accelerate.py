"""accelerate: ways to call it, wrong keywords, modules that it leaves unchanged, and undo."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import handwritten as hw
import pytest
import torch
from accelerated import assert_copied_and_undone, kinds, pair, state
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import transformer_fast as tfast
import transformer_fast.swap.lazy_logits
import transformer_fast.swap.packed as walk
from transformer_fast.accelerate import accelerate
from transformer_fast.reference import layers as reference
from transformer_fast.swap import lazy_logits

D = 8
ALREADY = "it runs on the fused ops already"
STATEMENTS = [
    "import transformer_fast.swap.lazy_logits; transformer_fast.swap.lazy_logits.LazyLogits",
    "import transformer_fast.swap.lazy_logits as m; m.LazyLogits",
    "import transformer_fast.accelerate as m; m(torch.nn.TransformerEncoderLayer(8, 2), packed=True); m.Report",
    "from transformer_fast.accelerate import Int8; Int8()",
    "from transformer_fast.swap.lazy_logits import LazyLogits",
    "from transformer_fast import accelerate; accelerate(torch.nn.LayerNorm(4))",
    "from transformer_fast.accelerate import accelerate; accelerate(torch.nn.LayerNorm(4))",
    "from transformer_fast import *; accelerate(torch.nn.LayerNorm(4))",
]


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", [1, -1])
def test_every_way_to_import(order: int) -> None:
    """The name is a function and a module. One fresh process tries all ways to import it, in either order.

    None of them imports transformers for a model without a part of transformers, nor sentence-transformers.
    """
    code = ["import sys, torch", *STATEMENTS[::order]]
    code.append("assert not {'transformers', 'sentence_transformers'} & sys.modules.keys()")
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True)


@pytest.mark.parametrize("function", [tfast.accelerate, accelerate], ids=["module", "function"])
def test_it_is_a_function(function: Callable[..., Any]) -> None:
    assert transformer_fast.swap.lazy_logits is lazy_logits
    assert walk.__name__ == "transformer_fast.swap.packed"
    names = ["model", "fused_loss", "packed", "keep_weights", "functional", "quantize"]
    assert callable(function) and list(inspect.signature(function).parameters) == names
    assert "in place" in (inspect.getdoc(function) or "")
    assert pickle.loads(pickle.dumps(function)) is function and copy.deepcopy(function) is function
    model = nn.Sequential(nn.LayerNorm(4))
    assert function(model).swapped and tfast.accelerate(model).already


NO_MODULE = "accelerate: expected a torch.nn.Module, got "
MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (3, {}, f"{NO_MODULE}int"),
    ([nn.Linear(2, 2)], {}, f"{NO_MODULE}list"),
    (nn.Linear, {}, f"{NO_MODULE}the class Linear: make a model of it first"),
    ("some-model", {}, f"{NO_MODULE}a str: load the model first, as by transformers' from_pretrained('some-model')"),
    (SimpleNamespace(model=nn.Linear(2, 2)), {}, f"{NO_MODULE}SimpleNamespace: pass its .model"),  # as a Trainer's
    (None, {"pack": True}, "accelerate() got an unexpected keyword argument 'pack'; did you mean packed?"),
    (None, {"quantise": "int8"}, "did you mean quantize?"),
    (None, {"x": 1}, "'x'; it takes fused_loss, packed, keep_weights, functional, quantize"),
    (None, {"packed": 1}, "accelerate: packed must be True or False, got 1"),
    (None, {"functional": None}, "accelerate: functional must be True or False, got None"),
]
"""What is given, None for a model, with the keywords, and the message."""


@pytest.mark.parametrize(("given", "keywords", "message"), MISTAKES, ids=str)
def test_a_mistake_is_named(given: Any, keywords: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=re.escape(message)):
        tfast.accelerate(model if given is None else given, **keywords)
    assert type(model[0]) is nn.LayerNorm


class Named(nn.Module):
    """Module with the attribute names of the classic norm and another formula."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x / (x.norm(dim=-1, keepdim=True) + self.eps) + self.bias


class Broken(Named):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


def stock(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 16, dropout=dropout, batch_first=True)


def annotated() -> nn.Module:
    return hw.make_model(11, 11, 2, D, 12, 2)


def reasons(model: nn.Module) -> dict[str, str]:
    """Return the reasons to leave modules, by path."""
    return {row.path: row.why for row in tfast.accelerate(model).left}


def test_parameters_optimizer_and_mode_stay() -> None:
    m = stock(0.1).eval()
    m.self_attn.in_proj_weight.requires_grad_(False)
    before = dict(m.named_parameters())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    tfast.accelerate(m)
    after = dict(m.named_parameters())
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)
    assert not m.training and not m.self_attn.in_proj_weight.requires_grad
    assert isinstance(m, nn.TransformerEncoderLayer)
    m.train()(torch.randn(2, 3, D)).sum().backward()
    moved = m.linear1.bias.clone()
    optimizer.step()
    assert not torch.equal(moved, m.linear1.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "classic": lambda: reference.Transformer(11, 11, D, 1, 2, 0.1),
    "annotated": annotated,
    "torch": lambda: nn.Sequential(nn.Embedding(5, D), stock(0.1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_second_time_and_undo(name: str) -> None:
    plain, m, first = pair(MODELS[name])
    again, swapped = tfast.accelerate(m), len(first.swapped)
    assert not first.already and {row.why for row in again.already} == {ALREADY}
    already = f"0 modules swapped, {swapped} on the fused ops already, {len(first.left)} left"
    assert already in str(again).splitlines()
    assert_copied_and_undone(m, first, state(plain), lambda m: list(m.parameters()))
    assert len(tfast.accelerate(m).swapped) == swapped


def test_signatures_stay() -> None:
    """The norms have arguments of their own, and the others those of the class before."""
    model = nn.Sequential(nn.LayerNorm(D), nn.MultiheadAttention(D, 2), nn.Linear(D, D), hw.AnnotatedNorm(D), Own())
    before = [list(inspect.signature(m.forward).parameters) for m in model]
    assert len(accelerate(model, functional=True, keep_weights=True).swapped) == 5
    after = [list(inspect.signature(m.forward).parameters) for m in model]
    assert after == [[*before[0], "residual", "dropout_p"], *before[1:]]


class Own(nn.Module):
    """A module of unknown structure."""

    def forward(self, states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return states if attention_mask is None else states * attention_mask


def test_undo_leaves_a_class_that_was_changed_since() -> None:
    class Mine(nn.LayerNorm):
        pass

    m = nn.Sequential(nn.LayerNorm(D), nn.LayerNorm(D))
    report = tfast.accelerate(m)
    m[0].__class__ = Mine
    report.undo()
    assert kinds(m) == kinds(nn.Sequential(Mine(D), nn.LayerNorm(D)))


def test_a_second_time_swaps_what_came_since() -> None:
    m = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D))
    tfast.accelerate(m)
    m.append(nn.LayerNorm(D))
    again = tfast.accelerate(m)
    assert [row.path for row in again.swapped] == ["2"]
    assert "1 modules swapped, 1 on the fused ops already, 0 left" in str(again)


def test_a_model_of_ours_runs_on_the_fused_ops_already() -> None:
    report = tfast.accelerate(tfast.Transformer(11, 11, D, 1, 2, 0.1))
    assert {row.was for row in report.swapped} == {"nn.Embedding", "nn.Dropout"} and report.already == report.left
    assert f"{len(report.swapped)} modules swapped, {len(report.left)} on the fused ops already, 0 left" in str(report)


def test_what_holds_swapped_modules_says_how_many() -> None:
    """The code of a container may do anything, so the report names it with the number of fused modules inside."""
    found = reasons(nn.ModuleDict({"annotated": annotated()}))
    assert set(found) == {"annotated", "annotated.generator"}
    assert re.fullmatch(
        r"it keeps its own forward; \d\d of the modules inside it run on the fused ops", found["annotated"]
    )
    assert found["annotated.generator"] == "it keeps its own forward; 0 of the modules inside it run on the fused ops"


def replaced_norm() -> nn.Module:
    m = nn.LayerNorm(4)
    m.forward = lambda x: x + 1
    return m


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: nn.LayerNorm((4, 4)), "2 dimensions"),
    (lambda: nn.Embedding(5, 4, max_norm=1.0), "max_norm"),
    (lambda: nn.Embedding(5, 4, sparse=True), "sparse"),
    (lambda: nn.MultiheadAttention(4, 2, add_zero_attn=True), "add_zero_attn"),
    (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), "add_bias_kv"),
    (lambda: Named(4), "computes something else"),
    (lambda: Broken(4), "not today"),
    (lambda: nn.LayerNorm(4, device="meta"), "meta device"),
    (lambda: parametrizations.weight_norm(nn.LayerNorm(4)), "parametrizations"),
    (lambda: parametrizations.orthogonal(nn.MultiheadAttention(4, 2), "in_proj_weight"), "parametrizations"),
    (replaced_norm, "replaced"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_has_no_kernel_is_named_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    assert reason in reasons(make())[""] and reason in reasons(nn.ModuleDict({"part": make()}))["part"]


def test_shared_modules_and_tied_weights() -> None:
    norm = nn.LayerNorm(D)
    m = nn.Sequential(norm, nn.Linear(D, D), norm)
    m.table = nn.Embedding(D, D)
    m[1].weight = m.table.weight
    assert [row.path for row in tfast.accelerate(m).swapped] == ["0", "table"]
    assert m[0] is m[2] and m[1].weight is m.table.weight
