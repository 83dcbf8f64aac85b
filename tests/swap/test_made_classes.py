"""Made classes: pickles and copies by the author's own ``__reduce__``, and calls that the author redefines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import copies
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.swap.swapped import author_class

D = 8


class Norm(nn.Module):
    """Norm of the classic code, swapped by a pattern."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.alpha, self.bias, self.eps = nn.Parameter(torch.rand(width)), nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class Dropping(nn.Module):
    """Module that calls ``F.dropout``, swapped by ``functional=True``."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training) + self.act(x, 0.0)


def by_function(kind: type[nn.Module]) -> type[nn.Module]:
    """Class whose ``__reduce__`` makes a new object and loads the parameters, as serialisers of configurations do."""

    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return _loaded, (name, {key: value.detach() for key, value in self.state_dict().items()})

    name = f"{kind.__name__}ByFunction"
    return _defined(name, kind, {"__reduce__": reduce})


def by_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Class whose ``__reduce__`` names its own class, and gives a state."""

    def reduce(self: nn.Module) -> tuple[Any, ...]:
        return type(self), (D,), self.__dict__

    return _defined(f"{kind.__name__}ByClass", kind, {"__reduce__": reduce})


def by_protocol(kind: type[nn.Module]) -> type[nn.Module]:
    """Class with a ``__reduce_ex__`` and a ``__setstate__``."""

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return self.__class__.__new__, (self.__class__,), {"all": self.__dict__}

    def setstate(self: nn.Module, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state["all"])

    return _defined(f"{kind.__name__}ByProtocol", kind, {"__reduce_ex__": reduce_ex, "__setstate__": setstate})


def _defined(name: str, kind: type[nn.Module], attributes: dict[str, Any]) -> type[nn.Module]:
    made = type(name, (kind,), {"__module__": __name__, "__qualname__": name, **attributes})
    return globals().setdefault(name, made)


def _loaded(name: str, state: dict[str, Tensor]) -> nn.Module:
    module = globals()[name]()
    module.load_state_dict(state)
    return module


KINDS = [make(kind) for kind in (Norm, Dropping) for make in (by_function, by_class, by_protocol)]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_by_the_author_s_reduce(kind: type[nn.Module]) -> None:
    plain = kind().eval()
    fast = copy.deepcopy(plain)
    assert tfast.accelerate(fast, functional=True).rows[0].now
    x = torch.randn(3, D)
    for other in copies(fast):
        assert type(other) is type(fast) and author_class(type(other)) is kind
        torch.testing.assert_close(other.eval()(x), plain(x))
        other.train()(x)
    for other in copies(nn.Sequential(fast, kind())):
        torch.testing.assert_close(other.eval()[0](x), plain(x))


def test_a_class_whose_reduce_gives_a_name() -> None:
    """Then pickle looks the object up by its name."""
    kind = _defined("Named", Norm, {"__reduce__": lambda self: "NAMED"})
    globals()["NAMED"] = fast = kind()
    assert tfast.accelerate(fast).swapped
    assert copies(fast)[1] is fast
