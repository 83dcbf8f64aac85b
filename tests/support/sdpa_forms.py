"""Forms of calls of torch's attention in modules, which accelerate must find and redirect."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sdpa_models import Base, causal_helper
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

SCALE = 1.0
this = sys.modules[__name__]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@plain
def decorated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attribute(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout_p)


class Imported(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class InAFunction(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_helper(q, k, v)


class Decorated(Base):
    @torch.enable_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decorated(q, k, v)


class Static(Base):
    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, attend: Any = scaled_dot_product_attention) -> Tensor:
        return attend(q, k, v, is_causal=True)


class Held(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = F.scaled_dot_product_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.chosen(q, k, v, is_causal=True)


def chosen() -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


class HeldFunction(Base):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = chosen()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.chosen(q, k, v)


partly = functools.partial(F.scaled_dot_product_attention, is_causal=True)


class Partial(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return partly(q, k, v)


class Closure(Base):
    """Module whose backward runs the inner function again, from outside of the module."""

    dropout_p = 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = F.scaled_dot_product_attention

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return chosen(q, k, v, is_causal=True, dropout_p=self.dropout_p)

        return checkpoint(run, q, k, v, use_reentrant=False)


class Inherited(Attribute):
    pass


def from_a_factory() -> type[nn.Module]:
    """Return a class made in a function that imports for it."""
    import torch.nn.functional as functional

    class FromAFactory(Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def run() -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            return functional.relu(run())

    return FromAFactory


class Lambda(Base):
    attend = lambda self, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731


class InAComprehension(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([F.scaled_dot_product_attention(q, k, v, is_causal=i > 0) for i in range(2)]).mean(0)


class NoGrad(Base):
    @torch.no_grad()
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=torch.is_tensor(q))


class ByClass(Base):
    @classmethod
    def attend(cls, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=issubclass(cls, ByClass))


class Property(Base):
    @property
    def attend(self) -> Callable[..., Tensor]:
        return functools.partial(F.scaled_dot_product_attention, is_causal=True)


class KeywordDefault(Base):
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, call: Any = scaled_dot_product_attention, causal: bool = True
    ) -> Tensor:
        return call(q, k, v, is_causal=causal)


class OfAModule(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return this.causal_helper(q, k, v)


class OtherName(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        library = torch.nn
        return library.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Super(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        super().train(self.training)
        return F.scaled_dot_product_attention(q, k, v, is_causal=__class__ is Super)


class Global(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * SCALE


FORMS = (
    Attribute, Imported, InAFunction, Decorated, Static, Partial, Held, HeldFunction, Closure, Inherited, Lambda,
    from_a_factory(), InAComprehension, NoGrad, ByClass, Property, KeywordDefault, OfAModule, OtherName, Super, Global,
)  # fmt: skip
