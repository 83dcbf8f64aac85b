"""A text that ``accelerate`` knows is a row: a made-up one is added to the table, and ``accelerate`` finds it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from form_arguments import D, x
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import ops
from transformer_fast.swap import forms
from transformer_fast.swap.form import Form, is_linear, is_norm, width_of


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


def test_a_row_is_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    children = {**dict.fromkeys(("left", "right", "out"), is_linear), "norm": is_norm}
    form = Form("Gaze", gaze, lambda m, size: [(size.x(width_of(m.norm)),)], children, attends=True)
    monkeypatch.setitem(forms.FORMS, "Gaze", form)
    plain = Gaze().eval()
    fast, inputs = copy.deepcopy(plain), x()
    report = tfast.accelerate(fast)
    assert report.attention[0].now == "by its structure" and report.rows[0].now == "fused Gaze"
    torch.testing.assert_close(fast(inputs), plain(inputs))
    assert tfast.accelerate(Glance()).rows[0].now is None
