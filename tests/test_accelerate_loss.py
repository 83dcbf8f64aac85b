"""accelerate's fused loss: logits that are not made, and what happens where somebody looks at them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer_fast as tfast
from transformer_fast.accelerate import lazy_logits, output_layer
from transformer_fast.accelerate.lazy_logits import LazyGradient, LazyLogits

D, V = 16, 50


@pytest.fixture(autouse=True)
def _small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "WORTH_IT", 1)


class Gpt(nn.Module):
    """An embedding, a layer and a head, with the loss in its forward, as people write it."""

    def __init__(self, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor | None]:
        logits = self.lm_head(torch.tanh(self.layer(self.wte(ids))))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **options)


def pair(dtype: torch.dtype = torch.float64, **options: bool) -> tuple[Gpt, Gpt]:
    """An eager model and an accelerated copy."""
    eager = Gpt(**options).to(dtype)
    fast = copy.deepcopy(eager)
    report = tfast.accelerate(fast)
    assert [row.now for row in report.swapped if row.path == "lm_head"] == ["fused loss"]
    return eager, fast


def batch() -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(0, V, (2, 3, 7))
    targets[0, :3] = -100
    return ids, targets


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(actual: Any, expected: Any, **options: Any) -> None:
    torch.testing.assert_close(actual, expected, **(options or {"rtol": 1e-12, "atol": 1e-14}))


def both(use: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[LazyLogits, Tensor]:
    """Run a loss on eager logits and on ours: the same loss and the same gradients; both logits."""
    eager, fast = pair(**options)
    ids, targets = batch()
    logits = []
    for model in (eager, fast):
        made = model(ids)[0]
        loss = use(made, targets)
        loss.backward()
        logits.append((made, loss.detach()))
    assert type(logits[1][0]) is LazyLogits and type(logits[1][1]) is Tensor
    assert_same(logits[1][1], logits[0][1])
    assert len(gradients(eager)) == len(gradients(fast))
    assert_same(gradients(fast), gradients(eager))
    return logits[1][0], logits[0][0]


def loss_of(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1), **options)


FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda y, t: F.cross_entropy(y.view(-1, V), t.view(-1)),
    "reshape": loss_of,
    "flatten": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "module": lambda y, t: nn.CrossEntropyLoss(ignore_index=7)(y.view(-1, V), t.clamp(min=7).view(-1)),
    "keywords": lambda y, t: F.cross_entropy(input=y.view(-1, V), target=t.view(-1)),
    "sum": lambda y, t: loss_of(y, t, reduction="sum") / 5,
    "smoothing": lambda y, t: loss_of(y, t, label_smoothing=0.1),
    "smoothing of a sum": lambda y, t: loss_of(y, t, label_smoothing=1.0, reduction="sum"),
    "shifted": lambda y, t: loss_of(y[..., :-1, :].contiguous(), t[..., 1:]),
    "shifted, not contiguous": lambda y, t: loss_of(y[:, 1:], t[:, 1:]),
    "steps": lambda y, t: loss_of(y[:, ::2], t[:, ::2]),
    "one": lambda y, t: F.cross_entropy(y[1], t[1]),
    "no change of type": lambda y, t: loss_of(y.to("cpu").to(torch.float64).double(), t),
    "bias": lambda y, t: loss_of(y + torch.linspace(0, 1, V, dtype=y.dtype)[None], t),
    "two biases": lambda y, t: loss_of(y + torch.linspace(0, 1, V).to(y) + torch.linspace(2, 0, V).to(y), t),
    "twice": lambda y, t: (lambda loss: loss + loss * loss)(loss_of(y, t)),
    "two losses": lambda y, t: loss_of(y, t) + 0.5 * loss_of(y, t.clamp(min=3), label_smoothing=0.1),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("use", FUSED.values(), ids=FUSED)
def test_a_loss_without_logits(use: Callable[[Tensor, Tensor], Tensor], bias: bool) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return tfast.linear_cross_entropy(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_logits.ops, "linear_cross_entropy", counted)
        logits, _ = both(use, bias=bias)
    assert len(calls) == (2 if use is FUSED["two losses"] else 1)
    if use is not FUSED["two losses"]:  # whose gradients are added up
        assert not logits.node.is_read()


class Doubled(torch.autograd.Function):
    """Somebody's own function."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0].exp()


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    shifted, copied = logits[:, 1:], logits[:, 1:].contiguous()
    logits[..., 3] = -5.0
    logits.mul_(0.5)
    return loss_of(shifted, targets[:, 1:]) + loss_of(copied, targets[:, 1:]) + loss_of(logits, targets)


def in_place_through_a_view(logits: Tensor, targets: Tensor) -> Tensor:
    logits.view(-1, V)[2:].mul_(2.0)
    logits.transpose(1, 2).add_(torch.arange(7.0, dtype=logits.dtype))
    return loss_of(logits, targets)


def in_place_after_the_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(logits, targets)
    logits.mul_(3.0)
    return loss + logits.square().mean()


DENSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda y, t: loss_of(y, t, reduction="none").sum(),
    "weight": lambda y, t: loss_of(y, t, weight=torch.linspace(1, 2, V, dtype=y.dtype)),
    "probabilities": lambda y, t: F.cross_entropy(y.view(-1, V), torch.full((21, V), 1 / V, dtype=y.dtype)),
    "class axis": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "classes in the middle": lambda y, t: F.cross_entropy(y[:, :, :7], t.clamp(max=6)[:, :7].new_zeros(3, 7)),
    "log_softmax": lambda y, t: F.nll_loss(y.log_softmax(-1).view(-1, V), t.view(-1)),
    "temperature": lambda y, t: loss_of(y / 0.7, t),
    "trained bias": lambda y, t: loss_of(y + nn.Parameter(torch.zeros(V, dtype=y.dtype)), t),
    "autograd function": lambda y, t: Doubled.apply(y).sum(),
    "loss and z-loss": lambda y, t: loss_of(y, t) + 0.1 * y.logsumexp(-1).square().mean(),
    "z-loss and loss": lambda y, t: 0.1 * y.logsumexp(-1).square().mean() + loss_of(y, t),
    "in place": in_place,
    "in place through a view": in_place_through_a_view,
    "in place after the loss": in_place_after_the_loss,
    "masked": lambda y, t: loss_of(y.masked_fill(torch.arange(V) == 60, -1e9), t),
    "gathered": lambda y, t: y.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean(),
    "iterated": lambda y, t: sum((F.cross_entropy(row, target) for row, target in zip(y, t)), y.new_zeros(())),
    "einsum": lambda y, t: torch.einsum("blv,v->bl", y, torch.ones(V, dtype=y.dtype)).square().sum(),
    "all vocabulary in a row": lambda y, t: y.view(-1).square().sum() + y.view(3, -1, 10).exp().sum(),
    "vmap": lambda y, t: torch.vmap(lambda row: row.logsumexp(-1))(y).sum(),
    "checkpoint": lambda y, t: checkpoint(loss_of, y, t, use_reentrant=False),
    "reentrant checkpoint": lambda y, t: checkpoint(loss_of, y, t, use_reentrant=True),
}


@pytest.mark.parametrize("use", DENSE.values(), ids=DENSE)
def test_other_uses_are_eager_ones(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    both(use)
    both(use, bias=True, tied=False)


def test_logits_that_are_read_are_eager_s_bit_for_bit() -> None:
    eager, fast = pair(torch.float32, bias=True)
    ids, targets = batch()
    expected, actual = eager(ids, targets), fast(ids, targets)
    assert type(actual[0]) is LazyLogits and not actual[0].node.is_read()
    assert torch.equal(actual[0].detach(), expected[0].detach())
    first = actual[0].detach()
    assert type(first) is Tensor and first.data_ptr() == actual[0].detach().data_ptr(), "made twice"
    for logits in (expected[0], actual[0]):
        logits.square().sum().backward()
    for a, b in zip(gradients(fast), gradients(eager), strict=True):
        assert torch.equal(a, b)
    assert type(fast(ids)[0] @ torch.ones(V)) is Tensor


OUTSIDE: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda y: y.detach().numpy().tolist(),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: y[0, 0, 0].item(),
    "data": lambda y: y.data.tolist(),
    "print": lambda y: str(y.detach()),
    "format": lambda y: f"{y[0, 0, 0]:.3f}",
    "float": lambda y: float(y.mean()),
    "argmax": lambda y: y.argmax(-1).tolist(),
    "iteration": lambda y: [row.tolist() for row in y],
    "cat": lambda y: torch.cat([y, y]).tolist(),
    "shape": lambda y: (y.shape, y.dtype, y.device, y.stride(), y.numel(), len(y), y.is_contiguous(), y.layout),
    "graph": lambda y: (y.requires_grad, y.is_leaf, y.grad_fn is not None, y.detach().requires_grad),
    "pickle": lambda y: (lambda z: (type(z), z.requires_grad, z.tolist()))(pickle.loads(pickle.dumps(y))),
    "dlpack": lambda y: torch.from_dlpack(y.detach()).tolist(),
    "squeezed": lambda y: y[:1].squeeze(0).tolist(),
    "list of them": lambda y: torch.stack([y, y]).tolist(),
    "no_grad": lambda y: torch.no_grad()(lambda: (y * 2).tolist())(),
    "inference mode": lambda y: torch.inference_mode()(lambda: y.softmax(-1).tolist())(),
    "autocast": lambda y: torch.autocast("cpu", torch.bfloat16)(lambda: y.detach().tolist())(),
}


@pytest.mark.parametrize("read", OUTSIDE.values(), ids=OUTSIDE)
def test_what_leaves_pytorch(read: Callable[[Tensor], Any]) -> None:
    eager, fast = pair(torch.float32)
    ids, targets = batch()
    lazy = fast(ids, targets)[0]
    assert read(lazy) == read(eager(ids, targets)[0])
    loss_of(lazy, targets).backward()  # and still


def test_errors_are_eager_s() -> None:
    eager, fast = pair()
    ids, targets = batch()
    attempts: list[Callable[[Gpt], Any]] = [
        lambda m: m(ids)[0].numpy(),
        lambda m: copy.deepcopy(m(ids)[0]),
        lambda m: m(ids, targets + V),
        lambda m: m(ids, targets[:2]),
        lambda m: m(ids, targets, reduction="other"),
        lambda m: m(ids, targets, label_smoothing=2.0),
        lambda m: [loss.backward() for loss in [m(ids, targets)[1]] * 2],
        lambda m: m(ids)[0].view(-1, 7, 11),
    ]
    for attempt in attempts:
        kinds = []
        for model in (eager, fast):
            with pytest.raises((RuntimeError, ValueError, IndexError)) as raised:
                attempt(model)
            kinds.append(raised.type)
        assert kinds[0] is kinds[1]


def test_saved_and_printed() -> None:
    _, fast = pair()
    ids, targets = batch()
    logits = fast(ids, targets)[0]
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["logits"]
    assert type(loaded) is Tensor and torch.equal(loaded, logits)
    assert "tensor(" in repr(fast(ids)[0]) and "requires_grad" in repr(logits)
    whole = pickle.loads(pickle.dumps(fast))
    assert type(whole(ids)[0]) is LazyLogits and type(copy.deepcopy(fast).lm_head) is output_layer.Linear


def test_hooks_and_gradients_of_logits() -> None:
    """Also those that come after the loss was computed."""
    eager, fast = pair()
    ids, targets = batch()
    seen: dict[nn.Module, list[Any]] = {eager: [], fast: []}
    for model in (eager, fast):
        logits, loss = model(ids, targets)
        logits.retain_grad()
        logits.register_hook(lambda g, model=model: seen[model].append(g.sum(-1)))
        logits.register_hook(lambda g: 2 * g)
        loss.backward()
        seen[model] += [logits.grad, *gradients(model)]
        logits, loss = model(ids, targets)
        seen[model] += torch.autograd.grad(loss, logits, retain_graph=True)
        seen[model] += torch.autograd.grad(loss * 3, [logits, model.layer.weight])
        logits, loss = model(ids, targets)
        logits.register_hook(lambda g, model=model: seen[model].append(g.clone()))
        with torch.autograd.set_detect_anomaly(True):
            loss.backward()
    assert any(isinstance(t, LazyGradient) for t in seen[fast])
    for ours, theirs in zip(seen[fast], seen[eager], strict=True):
        assert_same(ours.detach().clone(), theirs.detach())


def test_backward_again_and_gradients_of_gradients() -> None:
    eager, fast = pair()
    fast.wte.__class__ = nn.Embedding  # ours has no second derivative
    ids, targets = batch()
    found: dict[nn.Module, list[Tensor]] = {}
    for model in (eager, fast):
        loss = model(ids, targets, label_smoothing=0.1)[1]
        loss.backward(retain_graph=True)
        first = [g.clone() for g in gradients(model)]
        (2 * loss).backward()
        parameters = list(model.parameters())
        grads = torch.autograd.grad(model(ids, targets)[1], parameters, create_graph=True)
        norm = sum(g.square().sum() for g in grads)
        found[model] = [*first, *gradients(model), *grads, *torch.autograd.grad(norm, parameters)]
    assert_same(found[fast], found[eager])


@pytest.mark.parametrize("frozen", ["lm_head", "layer", "wte"])
def test_frozen_parts_and_accumulation(frozen: str) -> None:
    eager, fast = pair(bias=True, tied=False)
    for model in (eager, fast):
        model.get_submodule(frozen).requires_grad_(False)
    for _ in range(3):
        ids, targets = batch()
        assert type(fast(ids)[0]) is LazyLogits
        for model in (eager, fast):
            (model(ids, targets)[1] / 3).backward()
    assert len(gradients(fast)) == 6 - len(list(fast.get_submodule(frozen).parameters())) - 1
    assert_same(gradients(fast), gradients(eager))


def test_all_ignored() -> None:
    eager, fast = pair()
    ids, targets = batch()
    for model in (eager, fast):
        loss = model(ids, torch.full_like(targets, -100))[1]
        assert loss.isnan()
        loss.backward()
    assert_same(gradients(fast), gradients(eager))


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, upcast: bool) -> None:
    eager, fast = pair(dtype, bias=True)
    exact = copy.deepcopy(eager).double()
    ids, targets = batch()
    losses = []
    for model in (eager, fast, exact):
        logits = model(ids)[0]
        losses.append(loss_of(logits.float() if upcast and model is not exact else logits, targets))
        losses[-1].backward()
    assert losses[1].dtype == losses[0].dtype == (torch.float32 if upcast else dtype)
    assert not logits.is_cuda and all(g.dtype == dtype for g in gradients(fast))
    errors = [
        max(float((a.double() - b).abs().max()) for a, b in zip(gradients(model), gradients(exact), strict=True))
        for model in (eager, fast)
    ]
    largest = max(float(g.abs().max()) for g in gradients(exact))
    assert errors[1] <= 2 * errors[0] + 4 * torch.finfo(dtype).eps * largest
    assert abs(float(losses[1] - losses[2])) <= 2 * abs(float(losses[0] - losses[2])) + 8 * torch.finfo(dtype).eps


def test_logits_after_the_step_are_those_of_before() -> None:
    """The loop of many tutorials: backward, step, and then the accuracy."""
    eager, fast = pair(bias=True)
    ids, targets = batch()
    optimizers = [torch.optim.SGD(model.parameters(), lr=5.0) for model in (eager, fast)]
    for _ in range(3):
        outputs = []
        for model, optimizer in zip((eager, fast), optimizers):
            logits, loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outputs.append(logits)
        assert not outputs[1].node.is_read()
        assert_same(outputs[1].detach(), outputs[0].detach())
        assert not torch.allclose(outputs[1], fast(ids)[0])


def test_the_gradient_of_logits_after_the_step_is_that_of_before() -> None:
    eager, fast = pair()
    ids, targets = batch()
    found = []
    for model in (eager, fast):
        logits, loss = model(ids, targets)
        grads = torch.autograd.grad(loss, [logits, *model.parameters()])
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        for p, g in zip(model.parameters(), grads[1:], strict=True):
            p.grad = g
        optimizer.step()
        found.append(grads[0])
    assert type(found[1]) is LazyGradient
    assert_same(found[1].clone(), found[0])


@pytest.mark.parametrize("way", ["in place", "data", "hidden"])
def test_logits_after_another_change_say_so(way: str) -> None:
    _, fast = pair()
    _, targets = batch()
    x = torch.randn(5, D, dtype=torch.float64)
    logits = fast.lm_head(x)
    assert type(logits) is LazyLogits
    with torch.no_grad():
        if way == "in place":
            fast.lm_head.weight.mul_(0.5)
        elif way == "data":
            fast.lm_head.weight.data.mul_(0.5)
        else:
            x.add_(1.0)
    with pytest.raises(RuntimeError, match=r"these logits are computed when they are read.*logits\.detach\(\)"):
        logits.argmax(-1)
    with pytest.raises(RuntimeError, match="these logits are computed when they are read"):
        F.cross_entropy(logits, targets.view(-1)[:5])


def test_a_parameter_with_other_memory_changes_nothing() -> None:
    eager, fast = pair()
    ids, _ = batch()
    logits, expected = fast(ids)[0], eager(ids)[0].detach()
    fast.lm_head.weight.data = torch.zeros(V, D, dtype=torch.float64)
    assert torch.equal(logits.detach(), expected)


def test_backward_after_a_change_of_weights_is_eager_s_error() -> None:
    for model in pair():
        loss = model(*batch())[1]
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_nothing_stays_alive() -> None:
    _, fast = pair()
    ids, targets = batch()
    gc.collect()
    gc.disable()
    try:
        logits, loss = fast(ids, targets)
        assert len(lazy_logits._alive) == 1
        del logits
        loss.backward()
        assert not lazy_logits._alive, "a loss that was used keeps the logits"
        logits, loss = fast(ids, targets)
        logits.sum()
        loss.backward()
        del logits
        assert not lazy_logits._alive
        fast(ids, targets)
        assert not lazy_logits._alive
    finally:
        gc.enable()


def surrounded(context: Any) -> Callable[[Gpt, Tensor], Tensor]:
    def call(model: Gpt, ids: Tensor) -> Tensor:
        with context():
            return model(ids)[0]

    return call


def hooked(model: Gpt, ids: Tensor) -> Tensor:
    handle = model.lm_head.register_forward_hook(lambda module, args, out: None)
    try:
        return model(ids)[0]
    finally:
        handle.remove()


def under_a_hook_on_all(model: Gpt, ids: Tensor) -> Tensor:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        return model(ids)[0]
    finally:
        handle.remove()


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
    "hook": hooked,
    "hook on all": under_a_hook_on_all,
    "replaced": replaced,
    "checkpoint": lambda m, ids: checkpoint(lambda x: m(x)[0], ids, use_reentrant=False),
    "one vector": lambda m, ids: m(ids[0, 0, 0])[0],
    "frozen": lambda m, ids: copy.deepcopy(m).requires_grad_(False)(ids)[0],
    "compiled": lambda m, ids: torch.compile(m, backend="eager", fullgraph=True)(ids)[0],
    "meta": lambda m, ids: copy.deepcopy(m).to("meta")(ids.to("meta"))[0],
    "functional": lambda m, ids: torch.func.functional_call(m, {"lm_head.weight": Other(m.wte.weight)}, ids)[0],
}


class Other(Tensor):
    """A subclass of somebody else."""


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


def test_traced_and_exported() -> None:
    _, fast = pair(torch.float32)
    ids, targets = batch()
    traced = torch.jit.trace(fast, (ids, targets))
    assert_same(traced(ids, targets)[1], fast(ids, targets)[1], rtol=1e-5, atol=1e-6)
    exported = torch.export.export(fast, (ids, targets)).module()
    assert_same(exported(ids, targets)[1], fast(ids, targets)[1], rtol=1e-5, atol=1e-6)


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
    report = tfast.accelerate(m)
    assert type(m.lm_head) is output_layer.Linear and list(m.state_dict()) == names
    assert repr(m.lm_head) == f"Linear(in_features={D}, out_features={V}, bias=False)"
    row = next(row for row in report.rows if row.path == "lm_head")
    assert (row.was, row.now) == ("nn.Linear", "fused loss") and report.plain["Linear"] == 1
    again = tfast.accelerate(m)
    assert not again.swapped and "lm_head" in {row.path for row in again.already}
    report.undo()
    assert type(m.lm_head) is nn.Linear


class NoLossInIt(nn.Module):
    """The loss is somewhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.wte(ids))


class Pruned(nn.Linear):
    """Somebody's own class."""


def test_layers_that_are_left() -> None:
    other = Gpt()
    other.lm_head = Pruned(D, V)
    normed = Gpt(tied=False)
    nn.utils.parametrizations.weight_norm(normed.lm_head)
    other_size = Gpt(tied=False)
    other_size.lm_head = nn.Linear(D, V + 1)
    replaced = Gpt()
    replaced.lm_head.forward = lambda x: x  # type: ignore[method-assign]
    for model in (other, normed, other_size, replaced, NoLossInIt()):
        assert not any(row.now == "fused loss" for row in tfast.accelerate(model).rows)


MEMORY = """
import resource, sys, torch, torch.nn.functional as F, transformer_fast as tfast
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

model = Model()
if sys.argv[1] == "fast":
    tfast.accelerate(model)
def step(rows):
    ids = torch.randint(0, 20000, (2, rows // 2))
    outputs = model(ids, ids)
    outputs[1].backward()
step(64)
before = peak()
step(4096)
print(peak() - before)
"""


def test_no_logits_in_memory() -> None:
    """4,096 rows of 20,000 logits are 312 MiB; a few chunks of 2**23 of them are less than a third of that."""
    grown = {}
    for name in ("eager", "fast"):
        run = subprocess.run([sys.executable, "-c", MEMORY, name], capture_output=True, text=True, check=True)
        grown[name] = float(run.stdout)
    assert grown["eager"] > 600 and grown["fast"] < 150, grown
