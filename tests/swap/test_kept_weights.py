"""``accelerate(model, keep_weights=True)``: the same numbers as the plain model, whatever was written to a weight."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import linear_models
import pytest
import torch
from accelerated import copies, state
from linear_models import D, call
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.inference import prepacked
from transformer_fast.ops.weight_layout import LAYOUT
from transformer_fast.testing import assert_as_exact_as_eager

pytestmark = pytest.mark.skipif(not extension.load(), reason="needs the C++ extension")

ROWS = 6
MODELS = (*linear_models.MODELS, "tied")


def made(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied().to(dtype).eval() if name == "tied" else linear_models.made(name, dtype, seed)


def given(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    return linear_models.given(dtype, rows, 1)


class Tied(nn.Module):
    """An embedding and the output layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, D), nn.Linear(D, 50, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table.weight[:1])


def kept(model: nn.Module) -> dict[int, Any]:
    """The object of each weight with kept copies."""
    found = {}
    for parameter in model.parameters():
        for key, value in getattr(parameter, "_tensor_cache", {}).items():
            if key[0] == prepacked._KEPT:
                found[id(parameter)] = value
    return found


def assert_equal_to_plain(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """The numbers of a plain model, and those again from the kept copies."""
    plain.load_state_dict(model.state_dict())
    exact = call(copy.deepcopy(plain).double(), x.double())
    for _ in range(2):
        assert_as_exact_as_eager(call(model, x), call(plain, x), exact)


@pytest.mark.parametrize("rows", [1, ROWS, 100, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_as_exact_as_the_plain_model(name: str, dtype: torch.dtype, rows: int) -> None:
    model, plain = made(name, dtype), made(name, dtype)
    report = tfast.accelerate(model, keep_weights=True)
    assert any("kept weights" in (row.now or "") for row in report.rows) and not report.notes
    assert_equal_to_plain(model, plain, given(dtype, rows))
    assert kept(model)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_weight_has_a_copy(name: str) -> None:
    model = made(name)
    tfast.accelerate(model, keep_weights=True)
    call(model, given())
    layers = (m for m in model.modules() if isinstance(m, nn.Linear | nn.MultiheadAttention))
    weights = {id(p) for layer in layers for p in layer._parameters.values() if p is not None and p.dim() == 2}
    assert kept(model).keys() == weights and all(one.bytes > 0 for one in kept(model).values())


def step(model: nn.Module, other: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.enable_grad():
        call(model, given()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def of_each(write: Callable[[nn.Parameter, Tensor], object]) -> Callable[[nn.Module, nn.Module], None]:
    def write_all(model: nn.Module, other: nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                write(mine, theirs.detach())

    return write_all


def new_parameters(model: nn.Module, other: nn.Module) -> None:
    for module, theirs in zip(model.modules(), other.modules(), strict=True):
        for key, value in theirs._parameters.items():
            setattr(module, key, value)


WRITES: dict[str, Callable[[nn.Module, nn.Module], object]] = {
    "optimizer": step,
    "load_state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "assigned state": lambda model, other: model.load_state_dict(copy.deepcopy(other).state_dict(), assign=True),
    "in place": of_each(lambda p, value: p.copy_(value)),
    "data": of_each(lambda p, value: p.data.copy_(value)),
    "average": of_each(lambda p, value: p.data.mul_(0.5).add_(value, alpha=0.5)),
    "other memory": of_each(lambda p, value: setattr(p, "data", value.clone())),
    "numpy": of_each(lambda p, value: p.detach().numpy().__setitem__(..., value.numpy())),
    "new parameters": new_parameters,
    "wider and back": lambda model, other: model.double().load_state_dict(other.state_dict()) and model.float(),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_seen(write: str, name: str) -> None:
    model, plain, other = made(name), made(name), made(name, seed=2)
    tfast.accelerate(model, keep_weights=True)
    with torch.no_grad():
        before = [call(model, given(rows=rows)) for rows in (ROWS, 100)]
    WRITES[write](model, other)
    with torch.no_grad():
        for rows, old in zip((ROWS, 100), before, strict=True):
            assert not torch.allclose(call(model, given(rows=rows)), old)
            assert_equal_to_plain(model, plain, given(rows=rows))


@pytest.mark.parametrize("write", [write for write in WRITES if write != "optimizer"])
@torch.no_grad()
def test_int8_weights_follow_every_write(write: str) -> None:
    model, plain = made("author's code"), made("author's code")
    tfast.accelerate(model, quantize="int8")
    before = call(model, given())
    WRITES[write](model, made("author's code", seed=2))
    plain.load_state_dict(model.state_dict())
    tfast.accelerate(plain, quantize="int8")
    assert not torch.equal(call(model, given()), before)
    torch.testing.assert_close(call(model, given()), call(plain, given()))


@torch.no_grad()
def test_a_counted_write_to_a_single_value_is_seen() -> None:
    """Wherever the value is: PyTorch's counter shows it, not a sample of the weight."""
    model = nn.Sequential(nn.Linear(300, 200)).eval()
    tfast.accelerate(model, keep_weights=True)
    x = torch.ones(3, 300)
    for column in range(0, 300, 7):
        before = model(x)
        model[0].weight[5, column] += 100
        assert ((model(x) - before)[:, 5] - 100).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_another_dtype_after_accelerate(name: str, dtype: torch.dtype) -> None:
    model, plain = made(name), made(name)
    tfast.accelerate(model, keep_weights=True)
    with torch.no_grad():
        call(model, given())
        assert_equal_to_plain(model.to(torch.bfloat16), plain.to(torch.bfloat16), given(torch.bfloat16))
        assert_equal_to_plain(model.to(dtype), plain.to(dtype), given(dtype))
        assert_equal_to_plain(model.double(), plain.double(), given(torch.float64))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_training_are_as_without(name: str, training: bool) -> None:
    """In training mode, and in evaluation with gradients: bit for bit."""
    found = []
    for keep in (False, True):
        model = made(name)
        tfast.accelerate(model, keep_weights=keep)
        with torch.no_grad():
            call(model, given())
        model.train(training)
        torch.manual_seed(3)
        x = given().requires_grad_()
        out = call(model, x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_undo_and_the_end_of_the_model_free_everything(name: str) -> None:
    model = made(name)
    before = state(model)
    for undone in (True, False):
        report = tfast.accelerate(model, keep_weights=True)
        call(model, given())
        held = [weakref.ref(one) for one in kept(model).values()]
        assert held
        if undone:
            report.undo()
            assert not kept(model) and state(model) == before
        else:
            del model, report
        gc.collect()
        assert not any(ref() for ref in held)


@torch.no_grad()
def test_a_tied_weight_has_one_copy() -> None:
    model = made("tied")
    tfast.accelerate(model, keep_weights=True)
    call(model, given())
    call(model, given(rows=2))
    (one,) = kept(model).values()
    assert one.bytes < 1.5 * model.out.weight.nbytes


@pytest.mark.parametrize("name", ["author's code", "encoder"])
@torch.no_grad()
def test_copies_of_a_model(name: str) -> None:
    """A copied model keeps weights too, its own ones, and no file holds copies of weights."""
    model = made(name)
    tfast.accelerate(model, keep_weights=True)
    size, before = len(pickle.dumps(model)), call(model, given())
    assert abs(len(pickle.dumps(model)) - size) < 2000
    for other in copies(model):
        assert not kept(other)
        assert torch.equal(call(other, given()), before)
        assert kept(other).keys().isdisjoint(kept(model)) and len(kept(other)) == len(kept(model))
        for parameter in other.parameters():
            parameter.add_(1.0)
        assert torch.equal(call(model, given()), before)
        assert not torch.equal(call(other, given()), before)


@torch.no_grad()
def test_hooks_subclasses_and_parametrisations() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    kinds = nn.Linear, Twice, nn.Linear, nn.Linear
    model, plain = (nn.Sequential(*(kind(D, D) for kind in kinds)).eval() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    tfast.accelerate(model, keep_weights=True)
    for one in (model, plain):
        one[0].register_forward_hook(lambda module, args, out: out + 1)
        nn.utils.parametrizations.orthogonal(one[2])
        nn.utils.weight_norm(one[3])  # a hook computes the weight
        one[3].weight_g.mul_(2)
    plain.load_state_dict(model.state_dict())
    assert torch.allclose(model(given()), plain(given()), atol=1e-5)
    assert kept(model).keys() == {id(model[0].weight)}
    assert LAYOUT not in model[1].__dict__


def in_training(model: nn.Module) -> Tensor:
    return call(model.train(), given())


def under_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call(model, given())


def with_a_gradient_of_the_input(model: nn.Module) -> Tensor:
    with torch.enable_grad():
        x = given().requires_grad_()
        return torch.autograd.grad(call(model.requires_grad_(False), x).sum(), x)[0]


@pytest.mark.parametrize("run", [in_training, under_autocast, with_a_gradient_of_the_input])
@torch.no_grad()
def test_calls_that_keep_nothing(run: Callable[[nn.Module], Tensor]) -> None:
    model, other = made("encoder"), made("encoder")
    tfast.accelerate(model, keep_weights=True)
    tfast.accelerate(other)
    results = []
    for one in (model, other):
        torch.manual_seed(1)
        results.append(run(one))
    assert torch.equal(*results)
    assert not any(one.bytes for one in kept(model).values())


@pytest.mark.parametrize("name", ["author's code", "encoder layer"])
@torch.no_grad()
def test_graphs_hold_the_ordinary_product(name: str) -> None:
    """Compiled, exported and traced calls, also after copies were made, see the weights of their call."""
    model, plain = made(name), made(name)
    tfast.accelerate(model, keep_weights=True)
    x = given()
    call(model, x)
    exported = torch.export.export(model, (x,)).module()
    traced = torch.jit.trace(model, (x,), check_trace=False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (compiled, exported, traced):
        assert torch.allclose(run(x), plain(x), atol=1e-5)
    for parameter in [*model.parameters(), *plain.parameters()]:
        parameter.mul_(1.5)
    for run in (compiled, traced, model):
        assert torch.allclose(run(x), plain(x), atol=1e-5)
    torch.compiler.reset()


def test_inference_mode() -> None:
    model, plain = made("encoder"), made("encoder")
    tfast.accelerate(model, keep_weights=True)
    with torch.inference_mode():
        call(model, given())
        call(model, given(rows=100))
    with torch.no_grad():
        assert_equal_to_plain(model, plain, given())
        assert_equal_to_plain(model, plain, given(rows=100))
    with torch.inference_mode():  # such weights have no version counter
        other = made("encoder")
        tfast.accelerate(other, keep_weights=True)
        assert torch.allclose(call(other, given()), call(plain, given()), atol=1e-5)
        assert not any(one.bytes for one in kept(other).values())


@torch.no_grad()
def test_other_backends_and_libraries() -> None:
    model, other = made("author's code"), made("author's code")
    tfast.accelerate(model, keep_weights=True)
    with tfast.backend("reference"):
        assert torch.equal(model(given()), other(given()))
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.allclose(model(given(rows=600)), other(given(rows=600)), atol=1e-5)


@torch.no_grad()
def test_a_second_call_and_the_report() -> None:
    model = made("author's code")
    tfast.accelerate(model)
    report = tfast.accelerate(model, keep_weights=True)
    assert [row.now for row in report.swapped] == ["layers.Linear, kept weights"] * 3
    assert "layers.Linear, kept weights" in str(report)
    assert not tfast.accelerate(model, keep_weights=True).swapped
    report.undo()
    assert not any(LAYOUT in module.__dict__ for module in model.modules())


def test_a_model_without_such_layers() -> None:
    for model in (nn.Linear(4, 4).double(), nn.Linear(4, 4, device="meta"), nn.ReLU()):
        (note,) = tfast.accelerate(model, keep_weights=True).notes
        assert note == "keep_weights: no linear layer in float32 or bfloat16 on a CPU was found"


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("author's code")
    monkeypatch.setattr(extension, "module_obstacle", lambda: "no kernels here")
    assert tfast.accelerate(model, keep_weights=True).notes == ["keep_weights: no kernels here"]
