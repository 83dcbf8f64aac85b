"""Ways in which code reads an attribute of a module: each is seen when the attribute is set after ``accelerate``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.patterns.base import pattern_of
from transformer_fast.accelerate.read_names import names_read

D = 8


class Decorated:
    """Decorator that is an object."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, kind: type) -> Any:
        return functools.partial(self, module)

    def __call__(self, module: Any, x: Tensor) -> Tensor:
        out = self.function(module, x)
        return out if module.__dict__.get("scale") is None else out * module.scale


def helper(module: Any, x: Tensor) -> Tensor:
    return x if getattr(module, "scale", None) is None else x * module.scale


class _Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(D)), 1e-6

    def normed(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    @property
    def factor(self) -> Any:
        return getattr(self, "scale", None)


class ByHelper(_Rms):
    def forward(self, x: Tensor) -> Tensor:
        return helper(self, self.normed(x))


class ByProperty(_Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) if self.factor is None else self.normed(x) * self.factor


class ByNameOfAName(_Rms):
    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self, "sca" + "le".lower(), None)
        return self.normed(x) if scale is None else self.normed(x) * scale


class ByDictionary(_Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * vars(self).get(f"{'scale'}", 1.0)


class ByObject(_Rms):
    @Decorated
    def inner(self, x: Tensor) -> Tensor:
        return self.normed(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class ByWrapped(_Rms):
    @functools.lru_cache(maxsize=1)  # noqa: B019
    def read(self, time: object) -> Any:
        return getattr(self, "scale", None)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.read(object())
        return self.normed(x) if scale is None else self.normed(x) * scale


@pytest.mark.parametrize("kind", [ByHelper, ByProperty, ByNameOfAName, ByDictionary, ByObject, ByWrapped])
def test_ways_to_read_an_attribute(kind: type[_Rms]) -> None:
    plain = kind()
    fast = copy.deepcopy(plain)
    assert tfast.accelerate(fast).swapped
    plain.scale = fast.scale = 3.0  # type: ignore[assignment]
    rows = torch.randn(3, D)
    torch.testing.assert_close(fast(rows), plain(rows))
    assert not pattern_of(fast).fits(fast)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [ByNameOfAName, ByDictionary, ByObject])
def test_code_that_may_read_anything(kind: type[_Rms]) -> None:
    assert names_read(kind) is None


def test_names_of_other_methods_are_left_out() -> None:
    class Own(ByHelper):
        def extra_repr(self) -> str:
            return self.of_the_text

    names = names_read(Own)
    assert names is not None and {"scale", "weight", "eps", "normed"} <= names and "of_the_text" not in names
