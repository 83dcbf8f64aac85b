"""Swapped modules under torch.func transforms and forward-mode differentiation give the results of torch.nn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from form_arguments import fresh
from handwritten_forms import FORMS
from swapped_modules import KINDS, assert_as_torch, every_kind, inputs, make, outcome, swapped
from torch import Tensor, nn
from torch.autograd import forward_ad

import transformer_fast as tfast

TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "vmap": lambda f, args: torch.func.vmap(f, randomness="different")(*args),
    "vmap over one": lambda f, args: torch.func.vmap(f, (0, *[None] * (len(args) - 1)), randomness="same")(
        args[0].unsqueeze(0).expand(2, *args[0].shape), *args[1:]
    ),
    "grad": lambda f, args: torch.func.grad(lambda *a: f(*a).square().sum())(*args),
    "jvp": lambda f, args: torch.func.jvp(f, tuple(args), tuple(torch.ones_like(t) for t in args)),
    "vjp": lambda f, args: (pair := torch.func.vjp(f, *args))[1](torch.ones_like(pair[0])),
    "jacrev": lambda f, args: torch.func.jacrev(f)(*args),
    "jacfwd": lambda f, args: torch.func.jacfwd(f, randomness="same")(*args),
    "functionalize": lambda f, args: torch.func.functionalize(f)(*args),
    "gradients of each sample": lambda f, args: torch.func.vmap(
        torch.func.grad(lambda *a: f(*(t.unsqueeze(0) for t in a)).square().sum()), randomness="different"
    )(*args),
}


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TRANSFORMS)
@every_kind
def test_transforms_of_torch_func(kind: type[nn.Module], name: str, training: bool) -> None:
    module, args = make(kind, p=0.3).train(training), inputs(kind)
    assert_as_torch(module, lambda m: TRANSFORMS[name](lambda *a: first(m(*a)), args))


@pytest.mark.parametrize("name", ["grad", "jvp", "gradients of each sample"])
@pytest.mark.parametrize("kind", [k for k in KINDS.values() if k is not nn.Dropout])
def test_transforms_over_the_parameters(kind: type[nn.Module], name: str) -> None:
    module, args = make(kind), inputs(kind)
    names = list(dict(module.named_parameters()))
    alone = name == "gradients of each sample"  # the transform adds a dimension to every tensor
    values = [p.detach().unsqueeze(0) if alone else p.detach() for p in module.parameters()]

    def call(m: nn.Module) -> Any:
        def of_parameters(*values: Tensor) -> Tensor:
            given = dict(zip(names, (v[0] for v in values) if alone else values))
            return first(torch.func.functional_call(m, given, tuple(args)))

        return TRANSFORMS[name](of_parameters, values)

    assert isinstance(outcome(lambda: call(module))[0], tuple) or name == "jvp"
    assert_as_torch(module, call)


@every_kind
def test_functional_call_with_other_parameters(kind: type[nn.Module]) -> None:
    module, args = make(kind), tuple(inputs(kind))
    others = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    ours, theirs = (first(torch.func.functional_call(m, others, args)) for m in (swapped(module), module))
    torch.testing.assert_close(ours, theirs)


@every_kind
def test_forward_mode_differentiation(kind: type[nn.Module]) -> None:
    module, args = make(kind), inputs(kind)

    def tangent(m: nn.Module) -> Any:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, torch.ones_like(t)) if t.is_floating_point() else t for t in args]
            return tuple(forward_ad.unpack_dual(first(m(*duals))))

    assert_as_torch(module, tangent)


@pytest.mark.cover(3)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
@pytest.mark.parametrize("kind", [k for k in KINDS.values() if "Transformer" not in k.__name__])
def test_transforms_inside_compiled_code(kind: type[nn.Module], transform: str) -> None:
    torch._dynamo.reset()
    module, args = make(kind).eval(), inputs(kind)

    def call(m: nn.Module) -> Any:
        return torch.compile(lambda *a: TRANSFORMS[transform](lambda *b: first(m(*b)), list(a)), backend="aot_eager")(
            *args
        )

    assert_as_torch(module, call, exactly=False)


@pytest.mark.cover(16)
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("form", FORMS)
def test_modules_written_by_hand(form: str, transform: str) -> None:
    build, arguments = FORMS[form]
    module, args = build().eval(), arguments()
    (place, rows), *_ = [(n, t) for n, t in enumerate(args) if isinstance(t, Tensor)]
    many = torch.stack((rows.detach(), rows.detach()))
    fast = copy.deepcopy(module)
    assert tfast.accelerate(fast).rows[0].now

    def call(m: nn.Module) -> Any:
        def of_rows(x: Tensor) -> Tensor:
            return first(m(*(x if n == place else fresh(t) for n, t in enumerate(args))))

        return TRANSFORMS[transform](of_rows, [many if transform == "vmap" else many[0]])

    assert_as_torch(module, call, fast=fast)
