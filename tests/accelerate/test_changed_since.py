"""A hand-written module whose attributes or class change after ``accelerate`` computes what the plain module computes.

The attributes are read from the instances: every plain attribute of every module of every form, and one that the code
reads if it is there.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import copies
from changed_children import altered
from form_arguments import D, fresh, results, x
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate import made
from transformer_fast.accelerate.patterns.base import pattern_of

INTERNAL = nn.Module().__dict__.keys()

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
    return [(path, key) for path, part in authors_modules(FORMS[name][0]()) for key in part.__dict__.keys() - INTERNAL]


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


@pytest.mark.cover("values")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", FORMS)
def test_every_attribute(name: str, value: str) -> None:
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


@functools.cache
def flagged(kind: type[nn.Module]) -> type[nn.Module]:
    """Subclass whose result changes once it has a ``flag``."""

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = kind.forward(self, *args, **kwargs)
        return out if getattr(self, "flag", None) is None else altered(out)

    return type(kind.__name__, (kind,), {"forward": forward})


def with_flags(m: nn.Module) -> nn.Module:
    """The module, each hand-written part of which reads its ``flag``."""
    for _, part in authors_modules(m):
        part.__class__ = flagged(type(part))
    return m


SETS: dict[str, Callable[[nn.Module], None]] = {
    **{kind: lambda m, make=make: setattr(m, "flag", make(0)) for kind, make in VALUES.items()},
    "parameter": lambda m: setattr(m, "flag", nn.Parameter(torch.zeros(()))),
    "registered parameter": lambda m: m.register_parameter("flag", nn.Parameter(torch.zeros(()))),
    "buffer": lambda m: m.register_buffer("flag", torch.zeros(())),
    "child": lambda m: setattr(m, "flag", nn.Identity()),
    "registered child": lambda m: m.add_module("flag", nn.Identity()),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("change", SETS)
@pytest.mark.parametrize("name", FORMS)
def test_an_attribute_that_the_code_reads_if_it_is_there(name: str, change: str) -> None:
    fast, plain, args = fast_and_plain(name)
    check(fast, plain, args)
    for path, _ in authors_modules(plain):
        for model in (fast, plain):
            SETS[change](model.get_submodule(path))
        check(fast, plain, args)
        assert pattern_of(fast.get_submodule(path)) is None or not fused(fast)
        for model in (fast, plain):
            delattr(model.get_submodule(path), "flag")
        assert fused(fast)
    check(fast, plain, args)


@pytest.mark.parametrize("name", FORMS)
def test_a_changed_class(name: str) -> None:
    """An attribute of a class, or its forward, is set and removed; both models share the class."""
    fast, plain, args = fast_and_plain(name)
    for kind in dict.fromkeys(type(part) for _, part in authors_modules(plain)):
        kind.flag = 1  # type: ignore[attr-defined]
        check(fast, plain, args)
        del kind.flag  # type: ignore[attr-defined]
        assert fused(fast)
        forward = kind.forward
        kind.forward = _altered(forward)  # type: ignore[method-assign]
        check(fast, plain, args)
        kind.forward = forward  # type: ignore[method-assign]
        assert fused(fast)
    check(fast, plain, args)


def _altered(forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(forward)(lambda *args, **kwargs: altered(forward(*args, **kwargs)))


def fast_and_plain(name: str, path: str = "") -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """An accelerated form whose parts read their ``flag``, the plain one, and arguments."""
    flagged.cache_clear()
    make, arguments = FORMS[name]
    plain = with_flags(make().eval())
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast)
    return fast, plain, arguments()


def fused(m: nn.Module) -> bool:
    """Return True if every module that was swapped by a pattern runs on the fused ops."""
    return all(pattern.fits(part) for part in m.modules() if (pattern := pattern_of(part)) is not None)


def test_a_value_that_is_set_back() -> None:
    fast, plain, args = fast_and_plain("annotated attention")
    assert fused(fast)
    fast.flag, fast.h = 1, 4
    assert not fused(fast)
    fast.h = 2
    assert not fused(fast)
    del fast.flag
    assert fused(fast) and made.CHANGED not in fast.__dict__
    kind = made.author_class(type(fast))
    kind.flag = 1  # type: ignore[attr-defined]
    assert not fused(fast)
    del kind.flag  # type: ignore[attr-defined]
    assert fused(fast)
    check(fast, plain, args)


def test_what_no_call_reads_changes_nothing() -> None:
    fast, _, _ = fast_and_plain("annotated encoder")
    for part in fast.modules():
        part.of_a_trainer, part.layer_idx = object(), 3  # type: ignore[assignment]
    fast.train().eval().half().float().requires_grad_(False)
    copy.deepcopy(fast)
    assert fused(fast)


def test_new_values_of_tensors_are_read() -> None:
    """A parameter, a buffer or a child of the same kind may be exchanged: the fused ops read the current one."""
    for name, key in (("annotated norm", "a_2"), ("embeddings", "lut"), ("positions", "pe")):
        fast, plain, args = fast_and_plain(name)
        for m in (fast, plain):
            new = copy.deepcopy(getattr(plain, key))
            for tensor in [new] if isinstance(new, Tensor) else new.parameters():
                tensor.data += 0.5
            setattr(m, key, new)
        check(fast, plain, args)
    assert fused(fast)


def test_a_tensor_of_a_class() -> None:
    fast, plain, args = fast_and_plain("annotated norm")
    kind = type(plain)
    kind.table = torch.ones(3)  # type: ignore[attr-defined]
    tfast.accelerate(fast)
    assert fused(fast)
    kind.table = torch.ones(3)  # type: ignore[attr-defined]
    assert not fused(fast)
    check(fast, plain, args)


class Options(nn.Module):
    """Norm of the classic code with options in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.bias, self.eps = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D)), 1e-6
        self.options: dict[str, Any] = {"inner": {"offset": 0.0}}
        self.config = type("Config", (), {})()
        self.config.offset, self.unread = 0.0, []

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)
        return (self.alpha + self.options["inner"]["offset"] + self.config.offset) * x + self.bias


def test_the_content_of_a_container() -> None:
    for copied in (False, True):
        m = Options()
        assert tfast.accelerate(m).swapped
        m = copy.deepcopy(m) if copied else m
        plain, args = copy.deepcopy(Options()), (x(),)
        m.unread.append(1)
        assert fused(m)
        m.options["inner"]["offset"] = plain.options["inner"]["offset"] = 0.5
        assert not fused(m)
        check(m, plain, args)
        m.options["inner"]["offset"], plain.options["inner"]["offset"] = 0.0, 0.0
        assert fused(m)
        m.config.offset = plain.config.offset = 2.0
        check(m, plain, args)


def test_the_log_and_the_report_name_the_change(caplog: pytest.LogCaptureFixture) -> None:
    made.say.cache_clear()
    fast, _, args = fast_and_plain("annotated attention")
    with caplog.at_level(logging.WARNING, "transformer_fast"):
        for _ in range(2):
            fast.flag = 1
            fast(*args)
    (record,) = caplog.records
    assert record.getMessage() == (
        "accelerate: a AnnotatedAttention runs its own code: its attribute flag was set after accelerate"
    )


def test_the_report_names_the_change() -> None:
    m = FORMS["annotated encoder"][0]()
    report = tfast.accelerate(m)
    before = str(report)
    for layer in m.layers:
        layer.self_attn.h = 4
    line = "3 AnnotatedAttention run their own code: its attribute h was set after accelerate"
    first, *rest = before.splitlines()
    assert str(report).splitlines() == [first, line, *rest]
    for layer in m.layers:
        layer.self_attn.h = 2
    assert str(report) == before


def test_copies_of_a_changed_module_and_undo() -> None:
    make, arguments = FORMS["annotated attention"]
    m = make().eval()
    m.extra = None
    plain, args = copy.deepcopy(m), arguments()
    report = tfast.accelerate(m)
    m.h = plain.h = 4
    m.d_k = plain.d_k = 2
    for other in copies(m):
        assert not fused(other)
        check(other, plain, args)
    report.undo()
    assert m.__dict__.keys() == plain.__dict__.keys()
    check(m, plain, args)


def test_a_second_call_proves_a_changed_module_anew() -> None:
    fast, plain, args = fast_and_plain("annotated attention")
    fast.flag = plain.flag = 1
    assert tfast.accelerate(fast).rows[0].now is None and type(fast) is type(plain)
    check(fast, plain, args)
    del fast.flag, plain.flag
    assert tfast.accelerate(fast).rows[0].now and fused(fast)
    check(fast, plain, args)


@pytest.mark.parametrize("name", ["annotated attention", "annotated encoder layer", "d2l encoder"])
def test_a_compiled_call_sees_a_new_value(name: str) -> None:
    """The attribute is one that the code reads, so plain modules compile again too."""
    torch._dynamo.reset()
    fast, plain, args = fast_and_plain(name)
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    for flag in (None, 1, None):
        for part in (part for m in (fast, plain) for _, part in authors_modules(m)):
            part.flag = flag  # type: ignore[assignment]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*map(fresh, args)), plain(*map(fresh, args)), atol=2e-5, rtol=2e-5)
