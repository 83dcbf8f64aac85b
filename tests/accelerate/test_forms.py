"""accelerate on hand-written modules, form by form: known by structure, and only where the numbers prove it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from handwritten_forms import FORMS, B, L, fresh, results
from helpers import assert_as_exact_as_eager
from torch import Tensor, nn

import transformer_fast as tfast


@pytest.mark.parametrize("name", FORMS)
def test_same_numbers(name: str) -> None:
    make, arguments = FORMS[name]
    m = make().eval()
    args = arguments()
    expected, keys = results(m, args), list(m.state_dict())
    before = [(type(m), m.__dict__.keys()) for m in m.modules()]
    report = tfast.accelerate(m)
    assert report.rows[0].path == "" and report.rows[0].now, report
    assert isinstance(m, type(make())) and list(m.state_dict()) == keys
    torch.testing.assert_close(results(m, args), expected, atol=2e-5, rtol=2e-5)

    twin = copy.deepcopy(m)  # weights that were left are not copied: they are the last call's
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        assert type(other) is type(m)
        torch.testing.assert_close(results(other, args), expected, atol=2e-5, rtol=2e-5)
    report.undo()
    assert [(type(m), m.__dict__.keys()) for m in m.modules()] == before
    torch.testing.assert_close(results(m, args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_dropout_is_where_it_was(name: str) -> None:
    make, arguments = FORMS[name]
    m = make()
    dropouts = [child for child in m.modules() if isinstance(child, nn.Dropout)]
    args = arguments()
    fast = copy.deepcopy(m)
    tfast.accelerate(fast)
    for dropout in dropouts:
        dropout.p = 1.0
    for child in fast.modules():
        if isinstance(child, nn.Dropout):
            child.p = 1.0
    torch.testing.assert_close(fast(*map(fresh, args)), m(*map(fresh, args)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_training_draws_the_reference_s_mask(name: str) -> None:
    """Exact with the shared mask: outputs and gradients of a step with dropout, fused and eager."""
    make, arguments = FORMS[name]
    m, args = make(), arguments()
    tfast.accelerate(m)
    found = []
    for backend in ("auto", "reference"):
        torch.manual_seed(4)
        with tfast.backend(backend):
            found.append(results(m, args))
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.cover(10)
@pytest.mark.parametrize("name", FORMS)
def test_bf16_by_the_gate(name: str) -> None:
    """In bfloat16 no further from fp64 than the module itself is."""
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
    runs = [results(model, cast(list(args), dtype)) for model, dtype in (
        (fast, torch.bfloat16), (m, torch.bfloat16), (exact, torch.float64))]  # fmt: skip
    for ours, theirs, true in zip(*runs, strict=True):
        if isinstance(true, Tensor) and true.abs().max() < 1e-10:  # the bias of keys cancels: rounding alone is left
            assert ours.abs().max() < 0.05
        elif isinstance(true, Tensor):
            assert_as_exact_as_eager(ours, theirs, true, ulps=4.0 * (B * L) ** 0.5)
