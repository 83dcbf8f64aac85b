"""Methods that somebody holds after ``undo``, as wrappers of ``forward`` do, and methods that somebody replaces: the
model computes what the plain model computes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from form_arguments import results
from handwritten_forms import FORMS
from torch import nn

import transformer_fast as tfast

D = 8
SIZES: dict[str, Any] = {"d_model": D, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


def x() -> torch.Tensor:
    return torch.randn(2, 5, D)


TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(D), lambda: (x(),)),
    "RMSNorm": (lambda: nn.RMSNorm(D), lambda: (x(),)),
    "Linear": (lambda: nn.Linear(D, D), lambda: (x(),)),
    "Dropout": (lambda: nn.Dropout(0.0), lambda: (x().requires_grad_(),)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(D, 2, batch_first=True), lambda: (x(), x(), x())),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2), lambda: (x(),)),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**SIZES), 2), lambda: (x(), x())),
}


@pytest.mark.parametrize("name", [*TORCH, *FORMS])
def test_a_wrapped_forward_after_undo(name: str) -> None:
    make, arguments = {**FORMS, **TORCH}[name]
    plain, args = make().train(name in TORCH), arguments()
    m = copy.deepcopy(plain)
    report = tfast.accelerate(m)
    for part in m.modules():
        part.forward = functools.partial(_call, part.forward)  # type: ignore[method-assign]
    report.undo()
    torch.testing.assert_close(results(m, args), results(plain, args), atol=2e-5, rtol=2e-5)


BLOCKS = [(kind, block) for kind in ("encoder", "decoder") for block in ("_sa_block", "_ff_block")]


@pytest.mark.parametrize(("kind", "block"), [*BLOCKS, ("decoder", "_mha_block")])
def test_a_block_of_a_layer_that_somebody_replaced(kind: str, block: str) -> None:
    """Before ``accelerate`` and after; the masks are those that torch's own method gets."""
    make, arguments = TORCH[kind]
    plain, args, masks = (
        make(),
        arguments(),
        {"mask" if kind == "encoder" else "tgt_mask": torch.ones(5, 5).triu(1) > 0},
    )
    for before in (True, False):
        m, own = copy.deepcopy(plain), copy.deepcopy(plain)
        if not before:
            tfast.accelerate(m)
        for model in (m, own):
            layer = model.layers[0]
            setattr(layer, block, functools.partial(_doubled, getattr(type(layer), block), layer))
        if before:
            tfast.accelerate(m)
        torch.testing.assert_close(m(*args, **masks), own(*args, **masks), atol=2e-5, rtol=2e-5)
        padding = {
            f"{'src' if kind == 'encoder' else 'tgt'}_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3]])
        }
        with torch.no_grad():  # the encoder of torch makes nested tensors
            theirs, ours = own.eval()(*args, **padding), m.eval()(*args, **padding)
        torch.testing.assert_close(ours[0], theirs[0], atol=2e-5, rtol=2e-5)


def _doubled(method: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return 2 * method(layer, *args, **kwargs)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
