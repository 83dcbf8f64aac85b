"""Inputs of hand-written modules, for the forms that the tests of ``accelerate`` run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import transformer_fast as tfast

B, L, S, D = 2, 7, 5, 8

Arguments = Callable[[], tuple[Any, ...]]
Forms = dict[str, tuple[Callable[[], nn.Module], Arguments]]
"""A module and its arguments, by name."""


def keep(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = True
    return mask


def x(length: int = L) -> Tensor:
    return torch.randn(B, length, D, requires_grad=True)


def ids() -> Tensor:
    return torch.randint(0, 11, (B, L))


def blocked(*shape: int) -> Tensor:
    """Return a mask of floats in which 1 is blocked."""
    return 1.0 - keep(*shape).float()


def fresh(value: Any) -> Any:
    """Return the tensors in new lists, because a decoder changes its state."""
    return [fresh(inner) for inner in value] if isinstance(value, list) else value


def called_once(m: nn.Module, *args: Any) -> nn.Module:
    with torch.no_grad():
        m(*args)
    return m


def results(m: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    out = m(*map(fresh, args))
    outs = list(out) if isinstance(out, tuple) else [out]
    trained = [t for t in (*args, *m.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad((outs[0] * torch.linspace(-1, 1, outs[0].numel()).view_as(outs[0])).sum(), trained)
    return [*outs, *grads]


AHEAD = tfast.layers.subsequentmask(L)
ONE, TWO, TEXT = (lambda: (x(),)), (lambda: (x(), torch.tanh)), (lambda: (ids(),))
OWN, ATTEND = (lambda: (x(), keep(B, 1, L))), (lambda: (x(), x(S), x(S), keep(B, 1, S)))
LAYER = lambda: (x(), x(S), keep(B, 1, S), AHEAD)  # noqa: E731
