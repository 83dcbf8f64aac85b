"""A hand-written module in which a value changes that its own attributes do not hold by themselves: a tensor, an object
with slots, a container of its class, or an attribute that only a helper reads."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from changed_children import altered
from form_arguments import results
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.patterns.base import pattern_of

D = 8


class Norm(nn.Module):
    """The classic norm, times a factor that is 1."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha, self.bias, self.eps = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D)), 1e-6
        self.scale = scale

    def factor(self) -> Any:
        """Give the factor; subclasses read it."""
        return 1.0

    def read(self) -> Any:
        """Read the factor; no ``forward`` names this method."""
        return self.scale

    @property
    def given(self) -> Any:
        return getattr(self, "scale", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(-1, keepdim=True) + self.eps
        return self.alpha * (x - x.mean(-1, keepdim=True)) / deviation * self.factor() + self.bias


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Descriptor:
    def __get__(self, m: Any, kind: Any = None) -> Any:
        return self if m is None else m.__dict__.get("_scale", 1.0)

    def __set__(self, m: Any, value: float) -> None:
        m.__dict__["_scale"] = value


class Decorated:
    """Decorator that is a class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, m: Any, kind: Any = None) -> Any:
        return functools.partial(self.function, m)


class Helper:
    def __init__(self, m: Norm) -> None:
        self.m = m

    def __call__(self) -> float:
        return self.m.scale

    @staticmethod
    def scale_of(m: Norm) -> float:
        return m.scale


READER, OTHER_GETATTR = operator.attrgetter("scale"), getattr


def helper(m: Norm) -> float:
    return getattr(m, "scale", 1.0)


@functools.lru_cache(maxsize=1)
def cached(m: Norm, time: object) -> float:
    return getattr(m, "scale", 1.0)


def by_pattern(m: Norm) -> float:
    match m:
        case Norm(scale=1.0):
            return 1.0
    return 2.0


FACTORS: dict[str, Callable[[Any], Any]] = {
    "a formatted name": lambda m: getattr(m, f"sc{'ale'!s}"),
    "a joined name": lambda m: getattr(m, "".join(["sca", "le"])),
    "another name of getattr": lambda m: OTHER_GETATTR(m, "SCALE".lower()),
    "an attrgetter": lambda m: READER(m),
    "a static method": lambda m: Helper.scale_of(m),
    "an object": lambda m: Helper(m)(),
    "a class pattern": by_pattern,
}
IF_THERE: dict[str, Callable[[Any], Any]] = {
    "a helper": lambda m: helper(m),
    "a property": lambda m: m.given,
    "a joined name": lambda m: getattr(m, "sca" + "le".lower(), 1.0),
    "a dictionary": lambda m: vars(m).get(f"{'scale'}", 1.0),
    "a wrapped function": lambda m: cached(m, object()),
}
"""Ways to read an attribute that the module has only later."""


def check(m: nn.Module, plain: nn.Module) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(m(x), plain(x), atol=2e-5, rtol=2e-5)


def check_change(plain: nn.Module, change: Callable[[Any], Any]) -> None:
    """Change an accelerated module and the plain one."""
    m = copy.deepcopy(plain)
    assert tfast.accelerate(m).swapped
    check(m, plain)
    change(m), change(plain)
    check(m, plain)


def set_scale(m: Any) -> None:
    m.scale = 2.0


@pytest.mark.parametrize("how", FACTORS)
def test_an_attribute_that_a_helper_reads(how: str) -> None:
    kind = type("Reading", (Norm,), {"factor": FACTORS[how]})
    check_change(kind(), set_scale)


@pytest.mark.parametrize("how", IF_THERE)
def test_an_attribute_that_a_helper_reads_if_it_is_there(how: str) -> None:
    plain = type("Reading", (Norm,), {"factor": IF_THERE[how]})()
    del plain.scale
    check_change(plain, set_scale)


def test_an_attribute_behind_another_descriptor() -> None:
    decorated = type("Decorating", (Norm,), {"factor": Decorated(Norm.read)})
    check_change(decorated(), set_scale)
    stored = type("Stored", (Norm,), {"scale": Descriptor(), "factor": lambda self: self.scale})
    check_change(stored(), set_scale)
    once = functools.cached_property(lambda self: 1.0 * self.size)
    once.__set_name__(Norm, "once")
    cached = type("Cached", (Norm,), {"once": once, "size": 1.0, "factor": lambda self: self.once})
    m, plain = cached(), cached()
    assert tfast.accelerate(m).swapped
    m.size = plain.size = 2.0  # before the first call, which keeps the value
    check(m, plain)


HOLDERS: dict[str, Callable[[Norm], Any]] = {
    "method": lambda m: m.read,
    "partial": lambda m: functools.partial(Norm.read, m),
    "object": Helper,
}


class Calling(Norm):
    """Norm that calls what its attribute holds."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = x.std(-1, keepdim=True) + self.eps
        return self.alpha * (x - x.mean(-1, keepdim=True)) / deviation * self.held["one"]() + self.bias


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_attribute_that_a_held_function_reads(holder: str) -> None:
    plain = Calling()
    plain.held = {"one": HOLDERS[holder](plain)}
    check_change(plain, set_scale)


CONTENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slots": (Slotted, lambda c: c.scale, set_scale),
    "tuple": (lambda: ({"scale": 1.0},), lambda c: c[0]["scale"], lambda c: c[0].update(scale=2.0)),
    "deque": (lambda: collections.deque([1.0]), lambda c: c[0], lambda c: c.append(c.popleft() + 1)),
    "deep": (
        lambda: SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=Slotted()))),
        lambda c: c.a.b.c.scale,
        lambda c: set_scale(c.a.b.c),
    ),
}


@pytest.mark.parametrize("place", ["module", "class"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_content_of_an_object(content: str, place: str) -> None:
    make, read, change = CONTENTS[content]
    kind = type("Configured", (Norm,), {"factor": lambda self: read(self.config)})
    plain = kind()
    (plain if place == "module" else kind).config = make()  # type: ignore[attr-defined]
    m = copy.deepcopy(plain)
    assert tfast.accelerate(m).swapped
    assert pattern_of(m).fits(m)  # type: ignore[union-attr]
    for config in {id(part.config): part.config for part in (m, plain)}.values():
        change(config)
    check(m, plain)


class Reading(Norm):
    """Norm that reads its factor."""

    factor = Norm.read


class Scaled(Reading):
    """Norm whose factor is a tensor."""

    def __init__(self, scale: float = 1.0, buffer: bool = True) -> None:
        super().__init__()
        del self.scale
        if buffer:
            self.register_buffer("scale", torch.tensor(scale))
        else:
            self.scale = torch.tensor(scale)


@pytest.mark.parametrize("buffer", [True, False])
def test_a_tensor_that_the_fused_op_does_not_read(buffer: bool) -> None:
    for scales in ((1.0, 3.0), (1.0, 1.0)):
        plain = nn.Sequential(*(Scaled(scale, buffer) for scale in scales))
        m = copy.deepcopy(plain)
        tfast.accelerate(m)
        check(m, plain)
        for model in (m, plain):
            model[-1].scale.fill_(2.0)  # the last: a norm undoes the factor of the one before
        check(m, plain)


def test_two_modules_with_other_flags() -> None:
    kind = type("Flagged", (Norm,), {"factor": lambda self: 1.0 + self.flag})
    plain = nn.Sequential(kind(), kind())
    for part, flag in zip(plain, (False, True)):
        part.register_buffer("flag", torch.tensor(flag))
    m = copy.deepcopy(plain)
    assert len(tfast.accelerate(m).swapped) == 1
    check(m, plain)


def by_function(kind: type[Norm], scale: float) -> Norm:
    return kind(scale)


def test_a_module_that_no_proof_saw() -> None:
    """An object of a made class: by its constructor, or by the author's own way to copy."""
    ways: dict[str, Callable[[Any], Any]] = {
        "__deepcopy__": lambda self, memo: type(self)(self.scale),
        "__reduce__": lambda self: (by_function, (Reading, self.scale)),
        "__getstate__": lambda self: {k: v for k, v in self.__dict__.items() if not k.startswith("_transformer_fast")},
    }
    for name, way in {"": None, **ways}.items():
        kind = type("Copied", (Reading,), {name: way} if way else {})
        m = kind()
        assert tfast.accelerate(m).swapped
        for new in [copy.deepcopy(m)] if name else [type(m)(1.0)]:
            new.scale = 2.0
            check(new, Reading(2.0))
        if not name:
            check(type(m)(2.0), Reading(2.0))


def test_a_pickle_of_a_module_that_changes() -> None:
    m = Reading()
    tfast.accelerate(m)
    new = pickle.loads(pickle.dumps(m))
    set_scale(new)
    check(new, Reading(2.0))


@pytest.mark.parametrize("name", FORMS)
def test_a_method_set_on_the_class_of_a_part(name: str) -> None:
    """``type(part).forward = ...`` is the class of this package, which a fused parent must then call."""
    make, arguments = FORMS[name]
    plain, args = make().eval(), arguments()
    m = copy.deepcopy(plain)
    tfast.accelerate(m)
    for path, part in m.named_modules():
        if not path or pattern_of(part) is None:
            continue
        kind = type(part)
        forward = kind.forward
        kind.forward = functools.partialmethod(_altered, forward)  # type: ignore[assignment]
        others = [plain.get_submodule(p) for p, other in m.named_modules() if type(other) is kind]
        for other in others:
            other.forward = functools.partial(_altered, other, type(other).forward)  # type: ignore[method-assign]
        torch.testing.assert_close(results(m, args), results(plain, args), atol=5e-5, rtol=5e-5)
        kind.forward = forward  # type: ignore[method-assign]
        for other in others:
            del other.forward  # type: ignore[attr-defined]


def _altered(m: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return altered(forward(m, *args, **kwargs))
