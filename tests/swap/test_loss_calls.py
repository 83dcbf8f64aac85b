"""accelerate's fused loss: supported layers and calls, compiled and traced models, and memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_loss_model import D, Gpt, V, assert_same, batch, gradients, loss_of, pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer_fast as tfast
from transformer_fast.swap import lazy_logits, output_layer
from transformer_fast.swap.lazy_logits import LazyLogits

pytestmark = pytest.mark.usefixtures("small_calls")


def surrounded(context: Any) -> Callable[[Gpt, Tensor], Tensor]:
    def call(model: Gpt, ids: Tensor) -> Tensor:
        with context():
            return model(ids)[0]

    return call


def hooked(register: Callable[[Gpt], Callable[..., Any]]) -> Callable[[Gpt, Tensor], Tensor]:
    def call(model: Gpt, ids: Tensor) -> Tensor:
        handle = register(model)(lambda module, args, out: None)
        try:
            return model(ids)[0]
        finally:
            handle.remove()

    return call


def replaced(model: Gpt, ids: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    weight = model.lm_head.weight
    model.lm_head = nn.Sequential(nn.Linear(D, D), nn.Linear(D, V, bias=False))
    model.lm_head[1].weight = weight
    return model(ids)[0]


NOT_LEFT_OUT: dict[str, Callable[[Gpt, Tensor], Tensor]] = {
    "evaluation": lambda m, ids: copy.deepcopy(m).eval()(ids)[0],
    "no_grad": surrounded(torch.no_grad),
    "inference mode": surrounded(torch.inference_mode),
    "autocast": surrounded(lambda: torch.autocast("cpu", torch.bfloat16)),
    "reference": surrounded(lambda: tfast.backend("reference")),
    "saved on the CPU": surrounded(torch.autograd.graph.save_on_cpu),
    "dispatch mode": surrounded(lambda: FlopCounterMode(display=False)),
    "forward mode": surrounded(torch.autograd.forward_ad.dual_level),
    "hook": hooked(lambda model: model.lm_head.register_forward_hook),
    "hook on all": hooked(lambda model: nn.modules.module.register_module_forward_hook),
    "replaced": replaced,
    "checkpoint": lambda m, ids: checkpoint(lambda x: m(x)[0], ids, use_reentrant=False),
    "one vector": lambda m, ids: m(ids[0, 0, 0])[0],
    "frozen": lambda m, ids: copy.deepcopy(m).requires_grad_(False)(ids)[0],
    "compiled": lambda m, ids: torch.compile(m, backend="eager", fullgraph=True)(ids)[0],
    "meta": lambda m, ids: copy.deepcopy(m).to("meta")(ids.to("meta"))[0],
    "functional": lambda m, ids: torch.func.functional_call(m, {"lm_head.weight": Other(m.wte.weight)}, ids)[0],
}


class Other(Tensor):
    """Subclass of a user."""


@pytest.mark.parametrize("call", NOT_LEFT_OUT.values(), ids=NOT_LEFT_OUT)
def test_calls_that_make_logits(call: Callable[[Gpt, Tensor], Tensor]) -> None:
    eager, fast = pair(torch.float32)
    ids = batch()[0].view(-1, 7)[None]
    actual, expected = call(fast, ids), call(eager, ids)
    assert type(actual) is type(expected) and type(actual) is not LazyLogits
    assert actual.is_meta or "replaced" in str(call) or torch.equal(actual, expected)


def test_small_calls_make_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = pair()
    monkeypatch.setattr(output_layer, "WORTH_IT", 21 * V)
    ids, _ = batch()
    assert type(fast(ids)[0]) is LazyLogits and type(fast(ids[:, 1:])[0]) is Tensor


def test_exported() -> None:
    _, fast = pair(torch.float32)
    ids, targets = batch()
    made = torch.export.export(fast, (ids, targets)).module()
    assert_same(made(ids, targets)[1], fast(ids, targets)[1], rtol=1e-5, atol=1e-6)


def test_a_compiled_loss_of_lazy_logits() -> None:
    eager, fast = pair()
    ids, targets = batch()
    compiled = torch.compile(loss_of, backend="aot_eager")
    for model in (eager, fast):
        compiled(model(ids)[0], targets).backward()
    assert_same(gradients(fast), gradients(eager))


def test_the_report_and_undo() -> None:
    m = Gpt()
    names = list(m.state_dict())
    report = tfast.accelerate(m, fused_loss=True)
    assert type(m.lm_head) is output_layer.OutputLayer and list(m.state_dict()) == names
    assert repr(m.lm_head) == f"Linear(in_features={D}, out_features={V}, bias=False)"
    row = next(row for row in report.rows if row.path == "lm_head")
    assert (row.was, row.now) == ("nn.Linear", "fused loss") and report.plain["Linear"] == 1
    again = tfast.accelerate(m, fused_loss=True)
    assert not again.swapped and "lm_head" in {row.path for row in again.already}
    report.undo()
    assert type(m.lm_head) is nn.Linear


class NoLossInIt(nn.Module):
    """Model whose loss is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.wte(ids))


class Pruned(nn.Linear):
    """Linear layer of a user's own class."""


def with_head(change: Callable[[Gpt], Any], tied: bool = True) -> Gpt:
    model = Gpt(tied=tied)
    change(model)
    return model


HEADS: dict[str, Callable[[], nn.Module]] = {
    "own class": lambda: with_head(lambda m: setattr(m, "lm_head", Pruned(D, V))),
    "weight_norm": lambda: with_head(lambda m: nn.utils.parametrizations.weight_norm(m.lm_head), tied=False),
    "other size": lambda: with_head(lambda m: setattr(m, "lm_head", nn.Linear(D, V + 1)), tied=False),
    "own forward": lambda: with_head(lambda m: setattr(m.lm_head, "forward", lambda x: x)),
    "no embedding": lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)),
}


@pytest.mark.parametrize("name", HEADS)
def test_layers_that_are_left(name: str) -> None:
    report = tfast.accelerate(HEADS[name](), fused_loss=True)
    assert not any(row.now == "fused loss" for row in report.rows)
    if name != "own forward":
        assert "fused_loss: no output layer on a CPU was found" in str(report)


def test_a_model_whose_loss_is_somewhere_else() -> None:
    report = tfast.accelerate(NoLossInIt(), fused_loss=True)
    assert {row.path: row.now for row in report.swapped}["lm_head"] == "fused loss"


def test_nobody_gets_it_who_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fused_loss no output changes its type, and no optimizer gets a hook."""
    monkeypatch.setattr(lazy_logits, "watch_optimizers", pytest.fail)
    m = Gpt()
    assert "fused loss" not in str(tfast.accelerate(m))
    ids, targets = batch()
    logits, loss = m(ids, targets)
    loss.backward()
    assert type(logits) is type(loss) is Tensor


def test_it_may_be_asked_for_later() -> None:
    m = Gpt()
    first = tfast.accelerate(m)
    then = {row.path: row.now for row in tfast.accelerate(m, fused_loss=True).swapped}
    assert then == {"lm_head": "fused loss"} and first.swapped


MEMORY = """
import sys, torch, torch.nn.functional as F, transformer_fast as tfast
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(20000, 32)
        self.lm_head = nn.Linear(32, 20000, bias=False)
        self.lm_head.weight = self.wte.weight
    def forward(self, ids, targets):
        logits = self.lm_head(self.wte(ids))
        return logits, F.cross_entropy(logits.float().view(-1, 20000), targets.view(-1))

def peak():
    # Not ru_maxrss, which begins with the peak of the process that started this one.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) / 1024

model = Model()
if sys.argv[1] == "fast":
    tfast.accelerate(model, fused_loss=True)
def step(rows):
    ids = torch.randint(0, 20000, (2, rows // 2))
    outputs = model(ids, ids)
    outputs[1].backward()
step(64)
before = peak()
step(4096)
print(peak() - before)
"""


@pytest.mark.slow("two processes, one of which makes 600 MiB of logits and gradients")
def test_no_logits_in_memory() -> None:
    """4,096 rows of 20,000 logits take 312 MiB; chunks of 2**23 logits take less than a third of that."""
    grown = {}
    for name in ("eager", "fast"):
        run = subprocess.run([sys.executable, "-c", MEMORY, name], capture_output=True, text=True, check=True)
        grown[name] = float(run.stdout)
    assert grown["eager"] > 600 and grown["fast"] < 150, grown
