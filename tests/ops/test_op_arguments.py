"""Each operator of the library: torch's checks; and with one argument changed, an error that names it, or the right
result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.op_arguments import has_kernel, operators, outcome, problem_of, recorded, wrong_calls
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


@pytest.mark.parametrize("name", [name for name in OPERATORS if has_kernel(name) and not name.startswith("pack")])
def test_opcheck(name: str, device: torch.device) -> None:
    """Schema, meta function, and, of an operator with a gradient, its registration and its graphs."""
    trained = not name.endswith(("backward", "decode")) and "_grad_" not in name
    for call in recorded()[name] if has_kernel(name, device.type.upper()) else []:
        given = {
            key: value.to(device).clone() if isinstance(value, Tensor) else value
            for key, value in call.arguments.items()
        }
        for t in given.values():
            if trained and isinstance(t, Tensor) and t.is_floating_point():
                t.requires_grad_()
        torch.library.opcheck(call.op, (), given)
