"""accelerate on hand-written modules of every form: recognised by structure, and swapped only if the numbers agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerated import copies, from_one_seed, surroundings
from form_arguments import B, L, fresh, results
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str) -> None:
    """Compare numbers, copies, dropout, side effects on the program, and undo."""
    make, arguments = FORMS[name]
    m, args, close = make().eval(), arguments(), {"atol": 2e-5, "rtol": 2e-5}
    plain, expected, keys = copy.deepcopy(m), results(m, args), list(m.state_dict())
    before, around = [(type(part), part.__dict__.keys()) for part in m.modules()], surroundings()
    report = tfast.accelerate(m)
    assert surroundings() == around
    assert report.rows[0].path == "" and report.rows[0].now, report
    assert isinstance(m, type(plain)) and list(m.state_dict()) == keys
    torch.testing.assert_close(results(m, args), expected, **close)

    for other in copies(m):  # weights that were left are not copied: they are the last call's
        assert type(other) is type(m)
        torch.testing.assert_close(results(other, args), expected, **close)

    m.train()  # with the shared mask: outputs and gradients of a step with dropout, fused and eager
    ours = from_one_seed(lambda: results(m, args))
    with tfast.backend("reference"):
        torch.testing.assert_close(ours, from_one_seed(lambda: results(m, args)), **close)

    report.undo()
    assert [(type(part), part.__dict__.keys()) for part in m.modules()] == before
    torch.testing.assert_close(results(m.eval(), args), expected, rtol=0, atol=0)

    both = other, plain  # the dropped elements show the place of the dropout
    for part in (part for model in both for part in model.train().modules() if isinstance(part, nn.Dropout)):
        part.p = 1.0
    for name in getattr(type(other), "probabilities", ()):
        for model in both:
            setattr(model, name, 1.0)
    torch.testing.assert_close(*(model(*map(fresh, args)) for model in both), **close)


@pytest.mark.cover(10)
@pytest.mark.parametrize("name", FORMS)
def test_bf16_by_the_gate(name: str) -> None:
    """In bfloat16 the swapped module passes the gate against the module itself."""
    make, arguments = FORMS[name]
    m, args = make().eval(), arguments()

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list):
            return [cast(inner, dtype) for inner in value]
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return value.detach().bfloat16().to(dtype).requires_grad_(value.requires_grad)

    def typed(m: nn.Module, dtype: torch.dtype) -> nn.Module:
        for child in m.to(dtype).modules():
            if isinstance(getattr(child, "P", None), Tensor):  # no buffer: .to leaves it behind
                child.P = child.P.to(dtype)
        return m

    for part in m.modules():  # a ReLU at its kink falls either way, and takes a gradient along
        for first in ("linear_1", "w_1", "dense1", "0"):
            if isinstance(getattr(part, first, None), nn.Linear):
                nn.init.constant_(getattr(part, first).bias, 4.0)
    m = typed(m, torch.bfloat16)
    exact, fast = typed(copy.deepcopy(m), torch.float64), copy.deepcopy(m)
    assert tfast.accelerate(fast).rows[0].now
    models = (fast, torch.bfloat16), (m, torch.bfloat16), (exact, torch.float64)
    runs = [results(model, cast(list(args), dtype)) for model, dtype in models]
    for ours, theirs, true in zip(*runs, strict=True):
        if isinstance(true, Tensor) and true.abs().max() < 1e-10:  # the bias of keys cancels, up to rounding
            assert ours.abs().max() < 0.05
        elif isinstance(true, Tensor):
            assert_as_exact_as_eager(ours, theirs, true, ulps=4.0 * (B * L) ** 0.5)
