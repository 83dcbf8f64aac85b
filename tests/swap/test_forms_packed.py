"""Hand-written layers and stacks with ``packed=True`` whose attention was replaced since: they keep the padding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from form_arguments import B, D, L
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.swap.form import form_of

LENGTHS = torch.tensor([L, 3])
KEEP = torch.arange(L) < LENGTHS[:, None]
INPUTS: dict[str, Any] = {
    "annotated encoder": lambda: (torch.randn(B, L, D), KEEP[:, None]),
    "bert block": lambda: (torch.randn(B, L, D), KEEP[:, None, None]),
    "classic encoder layer": lambda: (torch.randn(B, L, D), KEEP[:, None]),
    "classic encoder": lambda: (torch.randint(0, 11, (B, L)), KEEP[:, None]),
    "tensorflow encoder": lambda: (torch.randint(0, 11, (B, L)), (~KEEP[:, None, None]).float()),
    "d2l encoder": lambda: (torch.randint(0, 11, (B, L)), LENGTHS),
}
"""Arguments with padding."""


class Around(nn.Module):
    """Module around attention, as adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.base(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


@torch.no_grad()
def tokens(m: nn.Module, args: tuple[Any, ...]) -> Tensor:
    return m(*args)[KEEP]


@pytest.mark.parametrize("name", INPUTS)
def test_attention_that_is_replaced_afterwards(name: str) -> None:
    plain, args = FORMS[name][0]().eval(), INPUTS[name]()
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    torch.testing.assert_close(tokens(fast, args), tokens(plain, args), atol=2e-5, rtol=2e-5)
    assert not report.padded_calls.reasons
    paths = [path for path, m in fast.named_modules() if path and (form := form_of(m)) is not None and form.attends]
    assert paths
    for path in paths:
        changed = [copy.deepcopy(m) for m in (plain, fast)]
        for m in changed:
            parent, _, own = path.rpartition(".")
            around = Around(m.get_submodule(path)).eval()
            m.get_submodule(parent)._modules[own] = around
        try:
            expected = tokens(changed[0], args)
        except AttributeError:  # a text that reads an attribute of this child
            continue
        torch.testing.assert_close(tokens(changed[1], args), expected, atol=2e-5, rtol=2e-5)
