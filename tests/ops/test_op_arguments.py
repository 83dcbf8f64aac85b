"""Each operator of the library, with one argument changed: an error that names an argument, or the right result."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from op_arguments import Recorded, Wrong, in_bands, on_meta, operators, outcome, recorded, wrong_calls
from torch import Tensor

from transformer_fast import extension
from transformer_fast.ops import _plain

pytestmark = pytest.mark.skipif(not extension.load(), reason="the operators are in the extension")
VALUES = re.compile(r"must (rise|lie|name|keep|have sequences)|vocabulary has|are not all in the table")
"""Words of the errors about values of tensors, which are read where the operator runs."""
NO_MEMORY = re.compile("allocate memory|bad_alloc")
OPERATORS = operators() if extension.load() else {}


def test_every_operator_of_the_library_is_recorded() -> None:
    assert set(recorded()) == set(OPERATORS)


def has_meta(call: Recorded) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"transformer_fast::{call.name}", "Meta")


def poison(results: list[Tensor], fill: int) -> None:
    """Leave memory of the results' sizes behind, freed, that holds ``fill``."""
    sizes = [t.untyped_storage().nbytes() for t in results]
    [torch.full((size,), fill, dtype=torch.uint8) for size in sizes if 0 < size < 1 << 20]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def layout(t: Tensor) -> tuple[Any, ...]:
    """Return the size, dtype and those strides of a tensor that say where an element is."""
    steps = [stride if size > 1 else None for size, stride in zip(t.shape, t.stride())] if t.numel() else []
    return t.shape, steps, t.dtype


def assert_plain(call: Recorded, results: list[Tensor]) -> None:
    """Compare the first result with PyTorch's own operators, where they compute the call."""
    arguments = call.arguments
    function = _plain._PLAIN.get(call.name)
    if function is None or any(arguments.get(name) for name in ("dropout_p", "p")):
        return
    if call.name == "linear_cross_entropy":
        arguments = arguments | {"gradients": [False] * 3}
    expected = function(**arguments)
    expected = expected if isinstance(expected, Tensor) else expected[0]
    torch.testing.assert_close(results[0].double(), expected.double(), rtol=2e-2, atol=2e-2, equal_nan=True)


def check(wrong: Wrong) -> str:
    """Return what is wrong with the outcome of a call, or ""."""
    call = wrong.call
    meta, meta_error = outcome(on_meta(call).run) if has_meta(call) else (None, "no meta")
    poison(meta or [], 0)
    results, error = outcome(in_bands(call, 0).run)
    poison(meta or [], 255)
    others, other_error = outcome(in_bands(call, 1).run)
    if error != other_error:
        return f"depends on memory outside of its arguments: {error or 'a result'} or {other_error or 'a result'}"
    if results is None or others is None:
        if NO_MEMORY.search(error):
            return ""
        if not any(re.search(rf"\b{name}\b", error) for name in call.arguments):
            return f"an error that names no argument: {error}"
        return "" if meta_error or VALUES.search(error) else f"no error while a graph is made: {error}"
    if not all(map(same, results, others)):
        return "results depend on memory outside of the arguments"
    if has_meta(call):
        if meta is None:
            return f"an error only without values: {meta_error}"
        promised, kept = ([layout(t) for t in found] for found in (meta, results))
        if promised != kept:
            return f"promised {promised}, kept {kept}"
    try:
        assert_plain(call, results)
    except Exception as unequal:  # any reason why the plain operators disagree
        if not NO_MEMORY.search(str(unequal)):
            return f"not the result of plain operators: {type(unequal).__name__}: {unequal}"
    return ""


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_argument_is_named_or_harmless(name: str) -> None:
    found = {}
    for n, call in enumerate(recorded()[name]):
        assert not outcome(call.run)[1]
        for wrong in wrong_calls(call):
            if problem := check(wrong):
                found[f"call {n}, {wrong.argument}: {wrong.what}"] = problem
    assert not found, f"{len(found)}:\n" + "\n".join(f"{where}: {why}" for where, why in found.items())
