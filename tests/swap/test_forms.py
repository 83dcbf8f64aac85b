"""accelerate on hand-written modules of every form: recognised by structure, and swapped only if the numbers agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerated import assert_copied_and_undone, from_one_seed, pair, state, surroundings
from form_arguments import B, D, L, fresh, results, x
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import ops
from transformer_fast.swap import forms
from transformer_fast.swap.form import Form, is_linear, is_norm, width_of
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str) -> None:
    """Compare numbers, copies, dropout, side effects on the program, and undo."""
    make, arguments = FORMS[name]
    m, args, close = make().eval(), arguments(), {"atol": 2e-5, "rtol": 2e-5}
    plain, expected = copy.deepcopy(m), results(m, args)
    before, around = state(m), surroundings()
    report = tfast.accelerate(m)
    assert surroundings() == around
    assert report.rows[0].path == "" and report.rows[0].now, report
    assert isinstance(m, type(plain)) and list(m.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(results(m, args), expected, **close)

    m.train()  # with the shared mask: outputs and gradients of a step with dropout, fused and eager
    ours = from_one_seed(lambda: results(m, args))
    with tfast.backend("reference"):
        torch.testing.assert_close(ours, from_one_seed(lambda: results(m, args)), **close)

    other = copy.deepcopy(m)
    assert_copied_and_undone(m.eval(), report, before, lambda m: results(m, args))
    torch.testing.assert_close(results(m, args), expected, rtol=0, atol=0)

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


class Gaze(nn.Module):
    """Attention of one head with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.out((self.left(y) @ self.right(y).mT * D**-0.5).softmax(-1) @ y)


class Glance(Gaze):
    """The same names, and another scale."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.out((self.left(y) @ self.right(y).mT).softmax(-1) @ y)


def gaze(m: Any, x: Tensor) -> Tensor:
    """``out(softmax(left(y) right(y)^T / sqrt(d)) y)`` of ``y = norm(x)``."""
    y = m.norm(x)
    return m.out(ops.attention(*(t.unsqueeze(1) for t in (m.left(y), m.right(y), y))).squeeze(1))


def test_a_new_row_is_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {**dict.fromkeys(("left", "right", "out"), is_linear), "norm": is_norm}
    form = Form("Gaze", gaze, lambda m, size: [(size.x(width_of(m.norm)),)], children, attends=True)
    monkeypatch.setitem(forms.FORMS, "Gaze", form)
    (plain, fast, report), inputs = pair(Gaze().eval()), x()
    assert report.attention[0].now == "by its structure" and report.rows[0].now == "fused Gaze"
    torch.testing.assert_close(fast(inputs), plain(inputs))
    assert tfast.accelerate(Glance()).rows[0].now is None
