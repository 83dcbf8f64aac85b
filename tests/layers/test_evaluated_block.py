"""The end of an encoder block, and linear layers of one input, as one call each in evaluation: the numbers of the
modules, bit for bit, and None where the modules must be called."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.layers import LayerNorm, RMSNorm
from transformer_fast.layers.activated import _OF_TRANSFORMERS, name_of
from transformer_fast.layers.evaluated_block import block_end
from transformer_fast.layers.int8 import free_weights
from transformer_fast.layers.linear import Linear, evaluated_linears
from transformer_fast.layers.norm import norm_and_sum, unsummed
from transformer_fast.layers.prepacked import LAYOUT, WeightLayout

pytestmark = pytest.mark.skipif(not extension.load(), reason="needs the extension")
D, INNER, CONTEXT = 24, 40, 16
LAYOUTS = {"plain": None, "kept": WeightLayout(keep=True), "int8": WeightLayout("int8", keep=True), "freed": "freed"}
ROWS = ((1, 1), (3, 5), (2, 193))
"""Sizes in front of the columns: one row, some, and several chunks."""


def linear(inputs: int, outputs: int, layout: Any, bias: bool = True) -> Linear:
    made = Linear(inputs, outputs, bias).eval().requires_grad_(False)
    if layout is not None:
        made.__dict__[LAYOUT] = LAYOUTS["int8"] if layout == "freed" else layout
    if layout == "freed":
        free_weights(made, ("weight",))
    return made


def parts(layout: Any = None, *, bias: bool = True, kind: type = LayerNorm, project: bool = True) -> dict[str, Any]:
    norms = [kind(D).eval().requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.uniform_(0.5, 1.5)
    return {
        "projection": linear(CONTEXT, D, layout, bias) if project else None,
        "norm_1": norms[0],
        "first": linear(D, INNER, layout, bias),
        "activation": F.gelu,
        "second": linear(INNER, D, layout, bias),
        "norm_2": norms[1],
    }


def inputs(*size: int, project: bool = True, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(*size, D, dtype=dtype), torch.randn(*size, CONTEXT if project else D, dtype=dtype)


def by_modules(x: Tensor, attended: Tensor, p: dict[str, Any], *, norm_first: bool) -> Tensor:
    last = unsummed(x, attended if p["projection"] is None else p["projection"](attended), 0.0)
    normed, summed = norm_and_sum(p["norm_2" if norm_first else "norm_1"], last)
    inner = p["second"](p["activation"](p["first"](normed)))
    return summed + inner if norm_first else norm_and_sum(p["norm_2"], unsummed(normed, inner, 0.0))[0]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_the_modules(layout: str, project: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    for size in ROWS:
        for bias, kind in ((True, LayerNorm), (False, RMSNorm)):
            p = parts(LAYOUTS[layout], bias=bias, kind=kind, project=project)
            x, attended = inputs(*size, project=project)
            found = block_end(x, attended, **p, norm_first=norm_first)
            assert found.shape == x.shape
            torch.testing.assert_close(found, by_modules(x, attended, p, norm_first=norm_first), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["plain", "kept"])
def test_numbers_in_other_types(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p = {name: part.to(dtype) if isinstance(part, nn.Module) else part for name, part in parts(LAYOUTS[layout]).items()}
    x, attended = inputs(3, 5, dtype=dtype)
    found = block_end(x, attended, **p, norm_first=False)
    assert found.dtype == dtype
    torch.testing.assert_close(found, by_modules(x, attended, p, norm_first=False))


def activations() -> list[Any]:
    import transformers.activations

    named = [getattr(transformers.activations, name.rpartition(".")[2]) for name in _OF_TRANSFORMERS]
    modules = [nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh")]
    return [F.relu, torch.relu, F.gelu, *modules, *(kind() for kind in named)]


def test_an_activation_with_a_function_of_another_formula_has_no_name() -> None:
    pytest.importorskip("transformers")
    for activation in activations():
        if hasattr(activation, "act"):
            activation.act = torch.tanh
            assert not name_of(activation)


class Mlp(nn.Module):
    """Network with a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.activation = nn.Linear(D, INNER), nn.Linear(INNER, D), nn.GELU()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.lin2(self.activation(self.lin1(x))))


class Attention(nn.Linear):
    """Stand-in for attention: one linear layer."""

    def __init__(self) -> None:
        super().__init__(D, D)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return super().forward(hidden_states), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = hidden_states + self.self_attn(self.layer_norm1(hidden_states), attention_mask=attention_mask)[0]
        return x + self.mlp(self.layer_norm2(x))


@torch.no_grad()
def test_a_dropout_of_the_network_that_trains_by_itself() -> None:
    model = Block().eval()
    fast = copy.deepcopy(model)
    report = tfast.accelerate(fast)
    assert any(row.now == "fused ClipLayer" for row in report.rows)
    for one in (model, fast):
        one.mlp.dropout.p = 1.0
        one.mlp.dropout.train()
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("layout", ["plain", "int8"])
def test_each_activation_that_has_a_name(layout: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    for activation in activations():
        assert name_of(activation)
        p = parts(LAYOUTS[layout]) | {"activation": activation}
        x, attended = inputs(3, 5)
        found = block_end(x, attended, **p, norm_first=False)
        torch.testing.assert_close(found, by_modules(x, attended, p, norm_first=False), rtol=1e-5, atol=2e-6)


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class Doubled(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def doubled(module: Linear) -> Linear:
    return Doubled(module.in_features, module.out_features).eval().requires_grad_(False)


NOT_TAKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"{name} has a hook": lambda p, name=name: with_hook(p[name]) for name in parts() if name != "activation"},
    **{
        f"{name} is of another class": lambda p, name=name: p.update({name: doubled(p[name])})
        for name in ("projection", "first", "second")
    },
    **{f"{name} trains": lambda p, name=name: p[name].train() for name in ("projection", "first", "second")},
    **{
        f"{name} needs a gradient": lambda p, name=name: p[name].weight.requires_grad_()
        for name in parts()
        if name != "activation"
    },
    "a norm of torch": lambda p: p.update(norm_2=nn.LayerNorm(D)),
    "a norm of two dimensions": lambda p: p.update(norm_2=LayerNorm((5, D))),
    "a norm without weight": lambda p: p.update(norm_1=LayerNorm(D, elementwise_affine=False)),
    "an activation without name": lambda p: p.update(activation=torch.tanh),
    "a subclass of an activation": lambda p: p.update(activation=type("Gelu", (nn.GELU,), {})()),
    "parameters of another type": lambda p: p["first"].double(),
    "an input of another width": lambda p: p.update(first=linear(D + 1, INNER, None)),
    "an inner width that differs": lambda p: p.update(second=linear(INNER + 1, D, None)),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_modules_that_must_be_called(case: str) -> None:
    p = parts()
    NOT_TAKEN[case](p)
    assert block_end(*inputs(3, 5), **p, norm_first=False) is None


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a function mode": lambda: torch.overrides.BaseTorchFunctionMode(),
    "torch.device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_that_see_each_call(context: str) -> None:
    p, (x, attended) = parts(), inputs(3, 5)
    with CONTEXTS[context]():
        assert block_end(x, attended, **p, norm_first=False) is None
        assert evaluated_linears([p["first"]], x) is None


def test_inputs_that_other_ops_take() -> None:
    p, (x, attended) = parts(), inputs(3, 5)
    others = {
        "a gradient": (x.clone().requires_grad_(), attended),
        "another type": (x, attended.double()),
        "other rows": (x, attended[:, :4]),
        "another rank": (x, attended[0]),
        "a subclass": (x.as_subclass(type("Own", (Tensor,), {})), attended),
        "no row": (x[:0], attended[:0]),
        "meta": (x.to("meta"), attended.to("meta")),
    }
    for name, given in others.items():
        assert block_end(*given, **p, norm_first=False) is None, name
    strided = torch.randn(5, 3, D).transpose(0, 1), torch.randn(5, 3, CONTEXT).transpose(0, 1)
    torch.testing.assert_close(
        block_end(*strided, **p, norm_first=False), by_modules(*strided, p, norm_first=False), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("layout", ["int8", "freed"])
def test_int8_says_what_it_does_not_take(layout: str) -> None:
    p, (x, attended) = parts(LAYOUTS[layout]), inputs(3, 5)
    for given in ((x.double(), attended.double()), (x.clone().requires_grad_(), attended)):
        with pytest.raises(RuntimeError, match="int8 layers"):
            block_end(*given, **p, norm_first=False)
    wrong = p | {"first": linear(D + 1, INNER, LAYOUTS[layout])}
    assert block_end(x, attended, **wrong, norm_first=False) is None


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linears_of_one_input(layout: str, grad: Any) -> None:
    torch.manual_seed(0)
    layers = [linear(D, outputs, LAYOUTS[layout], bias) for outputs, bias in ((8, True), (33, False), (70, True))]
    for size in ROWS:
        x = torch.randn(*size, D)
        with grad():
            found = evaluated_linears(layers, x)
        for layer, result in zip(layers, found, strict=True):
            torch.testing.assert_close(result, layer(x), rtol=1e-5, atol=1e-5)
    assert evaluated_linears([*layers, linear(D + 1, 8, LAYOUTS[layout])], x) is None
