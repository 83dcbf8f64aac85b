"""A hand-written module reads its attributes and children at each call, and runs its author's ``forward`` where a class
has got another one."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from accelerated import copies
from changed_children import altered
from form_arguments import D, fresh, results, x
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers.hooks import has_its_forward
from transformer_fast.swap.form import form_of
from transformer_fast.swap.swapped import author_class

INTERNAL = nn.Module().__dict__.keys() | {"norm_type"}  # read by torch.nn.Embedding alone
VALUES: dict[str, Callable[[Any], Any]] = {
    "number": lambda old: old + 1 if isinstance(old, int | float) else 2,
    "bool": lambda old: not old if isinstance(old, bool) else True,
    "container": lambda old: {},
    "callable": lambda old: F.gelu,
}


def authors_modules(m: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of a form that are not torch's, by path."""
    for path, part in m.named_modules():
        if not type(part).__module__.startswith("torch."):
            yield path, part


@functools.cache
def attributes(name: str) -> list[tuple[str, str]]:
    """Pairs (path, attribute) of the plain attributes in a form."""
    parts = authors_modules(FORMS[name][0]())
    return [(path, key) for path, part in parts for key in part.__dict__.keys() - INTERNAL]


def outcome(m: nn.Module, args: tuple[Any, ...]) -> Any:
    """Results and gradients of a call, or the kind of error."""
    try:
        return results(m, args)
    except Exception as error:
        return type(error)


def check(m: nn.Module, plain: nn.Module, args: tuple[Any, ...]) -> None:
    ours, theirs = outcome(m, args), outcome(plain, args)
    if isinstance(theirs, type) or isinstance(ours, type):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def fast_and_plain(name: str) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """An accelerated form, the plain one, and arguments."""
    make, arguments = FORMS[name]
    plain = make().eval()
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast)
    return fast, plain, arguments()


@pytest.mark.cover("values")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", FORMS)
def test_every_attribute(name: str, value: str) -> None:
    """An attribute of the text is set before ``accelerate``, or after it."""
    make, arguments = FORMS[name]
    m, args = make().eval(), arguments()
    for path, key in attributes(name):
        plain, before, after = (copy.deepcopy(m) for _ in range(3))
        tfast.accelerate(after)
        for model in (plain, before, after):
            part = model.get_submodule(path)
            setattr(part, key, VALUES[value](part.__dict__.get(key)))
        tfast.accelerate(before)
        check(before, plain, args)
        check(after, plain, args)


@pytest.mark.parametrize("name", FORMS)
def test_a_replaced_forward(name: str) -> None:
    """A class gets another ``forward``, and its own again; both models share the class."""
    fast, plain, args = fast_and_plain(name)
    for kind in dict.fromkeys(type(part) for _, part in authors_modules(plain)):
        forward = kind.forward
        kind.forward = wrapped(forward)  # type: ignore[method-assign]
        check(fast, plain, args)
        kind.forward = forward  # type: ignore[method-assign]
        assert all(has_its_forward(type(part)) for part in fast.modules())
    check(fast, plain, args)


def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(forward)(lambda *args, **kwargs: altered(forward(*args, **kwargs)))


@pytest.mark.parametrize("name", FORMS)
def test_a_forward_set_on_the_class_of_a_part(name: str) -> None:
    """``type(part).forward = ...`` is the class of this package, which a parent must then call."""
    fast, plain, args = fast_and_plain(name)
    for path, part in fast.named_modules():
        if not path or form_of(part) is None:
            continue
        kind = type(part)
        forward = kind.forward
        kind.forward = functools.partialmethod(other, forward)  # type: ignore[assignment]
        others = [plain.get_submodule(p) for p, m in fast.named_modules() if type(m) is kind]
        for m in others:
            m.forward = functools.partial(other, m, type(m).forward)  # type: ignore[method-assign]
        torch.testing.assert_close(results(fast, args), results(plain, args), atol=5e-5, rtol=5e-5)
        kind.forward = forward  # type: ignore[method-assign]
        for m in others:
            del m.forward  # type: ignore[attr-defined]


def other(m: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return altered(forward(m, *args, **kwargs))


def test_a_class_that_is_changed_between_two_calls() -> None:
    class Norm(hw.AnnotatedNorm):
        pass

    first = Norm(D)
    tfast.accelerate(first)
    Norm.forward = lambda self, x: 2 * hw.AnnotatedNorm.forward(self, x)  # type: ignore[method-assign]
    second, rows = Norm(D), x()
    assert tfast.accelerate(second).rows[0].now is None
    for m in (first, second):
        plain = Norm(D)
        plain.load_state_dict(m.state_dict())
        torch.testing.assert_close(m(rows), plain(rows))


def test_new_values_are_read() -> None:
    """A parameter, a buffer or a child of the same kind may be exchanged."""
    for name, key in (("annotated norm", "a_2"), ("embeddings", "lut"), ("positions", "pe")):
        fast, plain, args = fast_and_plain(name)
        for m in (fast, plain):
            new = copy.deepcopy(getattr(plain, key))
            for tensor in [new] if isinstance(new, Tensor) else new.parameters():
                tensor.data += 0.5
            setattr(m, key, new)
        check(fast, plain, args)


def test_copies_of_a_changed_module_and_undo() -> None:
    make, arguments = FORMS["annotated attention"]
    m = make().eval()
    plain, args = copy.deepcopy(m), arguments()
    report = tfast.accelerate(m)
    m.h = plain.h = 4
    m.d_k = plain.d_k = 2
    for other_m in copies(m):
        check(other_m, plain, args)
    report.undo()
    assert m.__dict__.keys() == plain.__dict__.keys()
    check(m, plain, args)


def test_a_new_module_of_a_swapped_class() -> None:
    """The numbers are those of the author's class."""
    fast, plain, args = fast_and_plain("annotated norm")
    new = type(fast)(D)
    new.load_state_dict(plain.state_dict())
    check(new, plain, args)
    assert author_class(type(new)) is type(plain)
    check(pickle.loads(pickle.dumps(new)), plain, args)


@pytest.mark.parametrize("name", ["annotated attention", "annotated encoder layer", "d2l encoder"])
def test_a_compiled_call_sees_a_new_value(name: str) -> None:
    torch._dynamo.reset()
    fast, plain, args = fast_and_plain(name)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    for h in (2, 4, 2):
        for part in (part for m in (fast, plain) for _, part in authors_modules(m)):
            for key in ("h", "num_heads"):
                if key in part.__dict__:
                    setattr(part, key, h)
            if "d_k" in part.__dict__:
                part.d_k = D // h  # type: ignore[assignment]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*map(fresh, args)), plain(*map(fresh, args)), atol=2e-5, rtol=2e-5)
