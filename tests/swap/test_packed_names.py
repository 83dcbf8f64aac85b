"""``accelerate(model, packed=True)`` inspects every submodule that may read several positions, whatever its name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference.layers import EncoderLayer
from transformer_fast.swap import forms

D = 16


class Renamed(EncoderLayer):
    """Classic layer whose feed-forward network has another name."""

    @property
    def ff(self) -> nn.Module:
        return self.mlp


class Neighbours(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


@pytest.mark.parametrize("reads", ["one position", "several positions"])
def test_padding_is_left_out_only_where_each_position_is_computed_by_itself(
    reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    classic = forms.FORMS["EncoderLayer"]
    children = {"mlp" if name == "ff" else name: test for name, test in classic.children.items()}
    renamed = dataclasses.replace(classic, name="RenamedLayer", children=children)
    monkeypatch.setitem(forms.FORMS, "RenamedLayer", renamed)
    model, x = Renamed(D, 2, dropout=0.0).eval(), torch.randn(4, 9, D)
    keep = torch.arange(9) < torch.tensor([[9], [2], [6], [4]])
    model._modules["mlp"] = model._modules.pop("ff")
    if reads == "several positions":
        model.mlp = Neighbours(D, D, 3, padding=1)
    expected = model(x, keep[:, None])
    report = tfast.accelerate(model, packed=True)
    torch.testing.assert_close(model(x, keep[:, None])[keep], expected[keep], rtol=1e-4, atol=2e-5)
    kept = ["its Neighbours may read several positions"] if reads == "several positions" else []
    assert list(report.padded_calls.reasons) == kept
