"""Each operator of the library, with one argument changed: an error that names an argument, or the right result."""

from __future__ import annotations

import pytest

from tests.support.op_arguments import operators, outcome, problem_of, recorded, wrong_calls
from transformer_fast import extension

pytestmark = pytest.mark.skipif(not extension.load(), reason="the operators are in the extension")
OPERATORS = operators() if extension.load() else {}


def test_every_operator_of_the_library_is_recorded() -> None:
    assert set(recorded()) == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_argument_is_named_or_harmless(name: str) -> None:
    found = {}
    for n, call in enumerate(recorded()[name]):
        assert not outcome(call.run)[1]
        for wrong in wrong_calls(call):
            if problem := problem_of(wrong.call):
                found[f"call {n}, {wrong.argument}: {wrong.what}"] = problem
    assert not found, f"{len(found)}:\n" + "\n".join(f"{where}: {why}" for where, why in found.items())
