"""Made classes: pickles and copies by the author's own ``__reduce__``."""

from __future__ import annotations

from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from accelerated import copies, pair
from torch import Tensor, nn

from transformer_fast.swap.swapped import author_class

D = 8


class Norm(hw.AnnotatedNorm):
    """Norm that is swapped by its form."""

    def __init__(self, width: int = D) -> None:
        super().__init__(width)


class Dropping(nn.Module):
    """Module that calls ``F.dropout``, swapped by ``functional=True``."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(width, width), F.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training) + self.act(x, 0.0)


def loaded(name: str, state: dict[str, Tensor]) -> nn.Module:
    module = globals()[name]()
    module.load_state_dict(state)
    return module


WAYS: dict[str, dict[str, Any]] = {
    "ByFunction": {  # a new object that loads the parameters, as serialisers of configurations do
        "__reduce__": lambda self: (
            loaded, (type(self).__qualname__, {key: value.detach() for key, value in self.state_dict().items()})
        ),
    },
    "ByClass": {"__reduce__": lambda self: (type(self), (D,), self.__dict__)},
    "ByProtocol": {
        "__reduce_ex__": lambda self, protocol: (self.__class__.__new__, (self.__class__,), {"all": self.__dict__}),
        "__setstate__": lambda self, state: nn.Module.__setstate__(self, state["all"]),
    },
    "ByName": {"__reduce__": lambda self: "NAMED"},  # then pickle looks the object up
}  # fmt: skip


def defined(base: type[nn.Module], way: str) -> type[nn.Module]:
    name = f"{base.__name__}{way}"
    return globals().setdefault(name, type(name, (base,), {"__module__": __name__, "__qualname__": name, **WAYS[way]}))


KINDS = [defined(base, way) for base in (Norm, Dropping) for way in WAYS if way != "ByName"]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_by_the_author_s_reduce(kind: type[nn.Module]) -> None:
    plain, fast, report = pair(lambda: kind().eval(), functional=True)
    assert report.rows[0].now
    x = torch.randn(3, D)
    for other in copies(fast):
        assert type(other) is type(fast) and author_class(type(other)) is kind
        torch.testing.assert_close(other.eval()(x), plain(x))
        other.train()(x)
    for other in copies(nn.Sequential(fast, kind())):
        torch.testing.assert_close(other.eval()[0](x), plain(x))


def test_a_class_whose_reduce_gives_a_name() -> None:
    globals()["NAMED"] = plain = defined(Norm, "ByName")()
    _, fast, report = pair(lambda: plain)
    assert report.swapped and copies(plain)[1] is fast is plain
