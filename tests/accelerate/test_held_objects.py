"""Attention in an object that a module holds and that is no module: a copy of the object is redirected."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import whose
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import transformer_fast as tfast

X = torch.randn(2, 5, 32)
WAY = "through F.scaled_dot_product_attention"


class Processor:
    """Attention of the module that calls it."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)

    def __call__(self, module: Attention, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        q, k, v = (linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (module.q, module.k, module.v))
        return module.out(self.attend(q, k, v, 0.5 * module.training).transpose(1, 2).flatten(2))


class Direct(Processor):
    """Processor that calls the function in ``__call__``, by its imported name."""

    def __call__(self, module: Attention, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (4, -1)).transpose(1, 2) for linear in (module.q, module.k, module.v))
        return module.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Abstract(abc.ABC):
    @abc.abstractmethod
    def __call__(self, module: Attention, x: Tensor) -> Tensor: ...


class Concrete(Direct, Abstract):
    """Processor with an abstract base class."""


@dataclasses.dataclass(frozen=True)
class Frozen(Direct):
    """Processor whose attributes cannot be set."""

    scale: float = 1.0

    def __init__(self) -> None:
        object.__setattr__(self, "calls", [])


class Attention(nn.Module):
    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.processor = processor

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


def model(processor: Any) -> nn.Module:
    return nn.Sequential(Attention(processor), nn.LayerNorm(32), Attention(processor)).eval()


@pytest.mark.parametrize("kind", [Processor, Direct, Concrete, Frozen])
def test_it_is_redirected_and_taken_back(kind: type[Processor]) -> None:
    held = kind()
    plain, fast = model(held), model(held)
    fast.load_state_dict(plain.state_dict())
    report = tfast.accelerate(fast)
    place = "processor.attend" if kind is Processor else "processor.__call__, processor.attend"
    swapped = [(row.path, row.now) for row in report.swapped if row.was == "Attention"]
    assert swapped == [(path, f"tfast.scaled_dot_product_attention in {place}") for path in ("0", "2")]
    assert [(row.path, row.now) for row in report.attention] == [("0", WAY), ("2", WAY)]
    assert str(report).startswith(f"attention: fused in 2 of 2 modules (Attention, {WAY})")
    torch.testing.assert_close(fast(X), plain(X))
    assert whose(lambda: fast(X)) == {"ours"} and whose(lambda: plain(X)) == {"torch"}
    assert fast[0].processor is fast[2].processor is not held, "one copy for both"
    assert plain[0].processor is held and type(held) is kind, "another model is not changed"
    report.undo()
    assert fast[0].processor is fast[2].processor is held
    assert whose(lambda: fast(X)) == {"torch"}


def test_the_copy_looks_like_the_object_and_shares_its_state() -> None:
    held = Processor()
    fast = model(held)
    tfast.accelerate(fast)
    copied = fast[0].processor
    assert isinstance(copied, Processor) and copied.__class__ is Processor  # as a table of known classes asks
    fast(X)
    assert held.calls == [2, 2]


@pytest.mark.parametrize("duplicate", [
    copy.deepcopy,
    *(functools.partial(lambda protocol, m: pickle.loads(pickle.dumps(m, protocol)), n) for n in (0, 2, 5)),
])  # fmt: skip
def test_a_copy_of_the_model_is_redirected(duplicate: Any) -> None:
    fast = model(Processor())
    tfast.accelerate(fast)
    again = duplicate(fast)
    assert again[0].processor is again[2].processor is not fast[0].processor
    assert type(again[0].processor) is type(fast[0].processor)
    assert torch.equal(again(X), fast(X)) and whose(lambda: again(X)) == {"ours"}


def test_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    fast = model(Direct())
    tfast.accelerate(fast)
    torch.testing.assert_close(torch.compile(fast, fullgraph=True, backend="eager")(X), fast(X))


def test_a_second_time_and_a_new_object() -> None:
    fast = model(Processor())
    first = tfast.accelerate(fast)
    again = tfast.accelerate(fast)
    assert not again.swapped and {row.path for row in again.already} == {"0", "1", "2"}
    fast[0].processor = mine = Processor()
    assert [row.path for row in tfast.accelerate(fast).swapped] == ["0"]
    fast[0].processor = mine
    first.undo()
    assert fast[0].processor is mine, "an object that was set since stays"


class Slots(Direct):
    __slots__ = ("more",)


class Registered(Direct):
    known: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        cls.known.append(cls)


class Hidden(Direct):
    """Processor whose own code goes to the function through ``super()``."""

    def __call__(self, module: Attention, x: Tensor) -> Tensor:
        return super().__call__(module, x) + 0


class Made(Direct):
    def __new__(cls) -> Made:
        return super().__new__(cls)


@pytest.mark.parametrize(("kind", "why"), [
    (Slots, "it has __slots__"),
    (Registered, "its class registers subclasses"),
    (Hidden, "Hidden.__call__ calls it through super(), in Direct.__call__"),
    (Made, "its class cannot have a subclass with other methods"),
])  # fmt: skip
def test_what_cannot_be_redirected_is_named(kind: type[Processor], why: str) -> None:
    held = kind()
    fast = model(held)
    report = tfast.accelerate(fast)
    reason = f"it is called by processor, a {kind.__name__}: {why}"
    assert [(row.path, row.now, row.why) for row in report.attention] == [("0", None, reason), ("2", None, reason)]
    assert str(report).startswith(f"attention: not fused in 2 Attention: {reason}"[:110])
    assert fast[0].processor is held and kind.__dict__.get("known", []) == []
    assert whose(lambda: fast(X)) == {"torch"}


class Method(Processor):
    """Processor that is not called itself."""

    __call__ = None  # type: ignore[assignment]

    def run(self, module: Attention, x: Tensor) -> Tensor:
        return Processor.__call__(self, module, x)


class ByMethod(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.processor.run(self, x)


class Trainer(Processor):
    """Object that a module holds and does not use in its own code."""


def test_a_method_of_an_object_and_an_object_that_is_not_used() -> None:
    fast, trainer = ByMethod(Method()).eval(), Trainer()
    fast.trainer = trainer
    expected = fast(X)
    report = tfast.accelerate(fast)
    assert [row.now for row in report.swapped] == ["tfast.scaled_dot_product_attention in processor.attend"]
    assert fast.trainer is trainer and whose(lambda: fast(X)) == {"ours"}
    torch.testing.assert_close(fast(X), expected)


def test_an_object_that_calls_neither_function_is_left() -> None:
    class Config:
        def __init__(self) -> None:
            self.size = 3

        def double(self) -> int:
            return 2 * self.size

    fast = model(Processor())
    fast[0].config = config = Config()
    tfast.accelerate(fast)
    assert fast[0].config is config
