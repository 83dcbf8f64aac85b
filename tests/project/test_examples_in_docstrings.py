"""Every public function and class has an example in its docstring, and the examples print what they show."""

from __future__ import annotations

import doctest
import inspect
import types
from collections.abc import Iterator

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask

MOST_LINES = 6


def documented() -> Iterator[tuple[str, object]]:
    """Yield (name, object) of everything that must have an example."""
    for name in tfast.__all__:
        value = getattr(tfast, name)
        if callable(value):
            yield name, value
    for name, value in vars(AttentionMask).items():
        if isinstance(value, classmethod):
            yield f"AttentionMask.{name}", getattr(AttentionMask, name)


def section(docstring: str) -> str:
    """Return the text below ``Example:`` at the end of a docstring; "" if there is no such section."""
    return inspect.cleandoc(docstring).partition("\nExample:\n")[2]


@pytest.mark.parametrize(("name", "value"), [pytest.param(*row, id=row[0]) for row in documented()])
def test_the_example_of_a_public_name_runs(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # names that a user has imported
    text = section(value.__doc__ or "")
    names = {"torch": torch, "tfast": tfast}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples, f'{name}: end the docstring with a section "Example:"'
    assert len(text.splitlines()) <= MOST_LINES
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(example, out=shown.append)
    assert not runner.failures, "".join(shown)


def test_names_are_found() -> None:
    found = dict(documented())
    functions = {name for name in tfast.__all__ if isinstance(getattr(tfast, name), types.FunctionType | type)}
    assert functions <= set(found) and "accelerate" in found
    assert {f"AttentionMask.{name}" for name in ("keep", "blocked", "lengths", "causal", "window")} <= set(found)
