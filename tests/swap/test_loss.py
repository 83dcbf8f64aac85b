"""accelerate's fused loss: logits are not computed unless something reads them."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_loss_model import Gpt, V, assert_same, batch, gradients, loss_of, pair
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.swap import output_layer
from transformer_fast.swap.lazy_logits import LazyLogits

pytestmark = pytest.mark.usefixtures("small_calls")


def both(use: Callable[[Tensor, Tensor], Tensor], **options: Any) -> tuple[LazyLogits, Tensor]:
    """Assert equal losses and gradients of eager and of lazy logits; return both logits."""
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
def test_a_loss_without_logits(use: Callable[[Tensor, Tensor], Tensor], bias: bool, fused: list[Any]) -> None:
    logits, _ = both(use, bias=bias)
    two = use is FUSED["two losses"]
    assert len(fused) == (2 if two else 1)
    assert two or not logits.node.is_read()  # with two losses autograd reads the logits to add the gradients


def test_the_loss_of_logits_that_were_read_is_not_fused(fused: list[Any]) -> None:
    def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.view(-1, V)
        return 0.1 * flat.logsumexp(-1).square().mean() + F.cross_entropy(flat, targets.view(-1))

    both(with_z_loss)
    assert not fused


class Doubled(torch.autograd.Function):
    """Custom autograd function of a user."""

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
    "float": lambda y: float(y.detach().mean()),
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


ATTEMPTS: dict[str, Callable[[Gpt, Tensor, Tensor], Any]] = {
    "numpy": lambda m, ids, targets: m(ids)[0].numpy(),
    "deepcopy": lambda m, ids, targets: copy.deepcopy(m(ids)[0]),
    "a target that is no word": lambda m, ids, targets: m(ids, targets + V),
    "too few targets": lambda m, ids, targets: m(ids, targets[:2]),
    "reduction": lambda m, ids, targets: m(ids, targets, reduction="other"),
    "smoothing": lambda m, ids, targets: m(ids, targets, label_smoothing=2.0),
    "backward twice": lambda m, ids, targets: [loss.backward() for loss in [m(ids, targets)[1]] * 2],
    "view": lambda m, ids, targets: m(ids)[0].view(-1, 7, 11),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_errors_are_eager_s(attempt: Callable[[Gpt, Tensor, Tensor], Any]) -> None:
    kinds = []
    for model in pair():
        with pytest.raises((RuntimeError, ValueError, IndexError)) as raised:
            attempt(model, *batch())
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
    assert type(whole(ids)[0]) is LazyLogits and type(copy.deepcopy(fast).lm_head) is output_layer.OutputLayer


@pytest.mark.parametrize("frozen", [["lm_head"], ["layer"], ["layer", "wte"]], ids=" ".join)
def test_frozen_parts_and_accumulation(frozen: list[str]) -> None:
    eager, fast = pair(bias=True, tied=False)
    for model in (eager, fast):
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
    for _ in range(3):
        ids, targets = batch()
        assert type(fast(ids)[0]) is LazyLogits
        for model in (eager, fast):
            (loss_of(model(ids)[0][:, 1:], targets[:, 1:]) / 3).backward()
    assert len(gradients(fast)) == len([p for p in fast.parameters() if p.requires_grad])
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
    pairs = [list(zip(gradients(model), gradients(exact), strict=True)) for model in (eager, fast)]
    errors = [max(float((a.double() - b).abs().max()) for a, b in both) for both in pairs]
    largest = max(float(g.abs().max()) for g in gradients(exact))
    assert errors[1] <= 2 * errors[0] + 4 * torch.finfo(dtype).eps * largest
    assert abs((losses[1] - losses[2]).item()) <= 2 * abs((losses[0] - losses[2]).item()) + 8 * torch.finfo(dtype).eps


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "/=": lambda loss: operator.itruediv(loss, 4),
    "*=": lambda loss: operator.imul(loss, 0.5),
    "+=": lambda loss: operator.iadd(loss, 1.0),
    "mul_": lambda loss: loss.mul_(3.0),
    "twice": lambda loss: loss.div_(2).add_(loss.detach()),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_loss_that_is_changed_in_place(change: Callable[[Tensor], Any]) -> None:
    """Training loops scale the loss in place for accumulation."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(logits, targets)
        change(loss)
        return loss

    logits, _ = both(loss_fn)
    assert not logits.node.is_read()


class Classifier(nn.Module):
    """Model with an output layer and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 2), nn.Linear(2, 8, bias=False)
        self.loss = nn.CrossEntropyLoss()
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.head(self.table(ids)), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_report_names_a_loss_that_torch_sums_in_16_bits(dtype: torch.dtype) -> None:
    model = Classifier().to(dtype)
    rows = {row.path: row for row in tfast.accelerate(model).left}
    assert ("loss" in rows) == (dtype != torch.float32)
    assert dtype == torch.float32 or "fused_loss=True adds them in float32" in rows["loss"].why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_fused_loss_sums_16_bit_losses_in_float32(dtype: torch.dtype, fused: list[Any]) -> None:
    model = Classifier().to(dtype)
    report = tfast.accelerate(model, fused_loss=True)
    assert "loss" not in {row.path for row in report.left}
    loss = model(torch.arange(100_000) % 8)
    assert fused and loss.item() == torch.tensor(8.0).log().to(dtype).item()
    loss.backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.isfinite().all()
