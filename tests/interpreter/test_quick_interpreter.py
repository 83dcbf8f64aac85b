"""The shorter way to replace the functions of triton.language replaces what Triton's own does, and no more."""

import inspect
import os

import numpy as np
import pytest
import quick_interpreter
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled kernels replace nothing")


@pytest.mark.parametrize("package", (tl, tl.tensor, tl.math, tl.core.tensor_descriptor_base), ids=lambda p: p.__name__)
def test_every_builtin_is_replaced_and_comes_back(package):
    before = {name: member for name, member in inspect.getmembers(package) if is_builtin(member)}
    assert before
    scope = interpreter._LangPatchScope()
    quick_interpreter.replace_builtins(package, interpreter.interpreter_builder, scope)
    try:
        assert not [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        quick_interpreter.replace_builtins(package, interpreter.interpreter_builder, scope)
        assert len(scope._changes) == len(before), "what is replaced already is left alone"
    finally:
        scope.restore()
    assert {name: getattr(package, name) for name in before} == before


@pytest.mark.parametrize(
    ("triton", "numpy", "runs"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.10.1", False),
        ("3.6.0+git1", "2.5.0rc1", False),
        ("3.7.1", "2.4.6", True),
        ("3.10.0", "2.5.0", True),
    ],
)
def test_versions_whose_interpreter_runs(triton, numpy, runs):
    reason = quick_interpreter.obstacle(triton, numpy)
    assert (reason == "") is runs and (runs or f"Triton {triton} does not run with NumPy {numpy}" in reason)


def test_products_do_not_depend_on_the_tile():
    """Those of 15 and of 64 rows, from sums of 4,096 terms that NumPy rounds in several orders."""
    handle = interpreter.TensorHandle
    a, b = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((64, 4096), (4096, 33)))

    def product(rows, columns):
        added = handle(np.ones((rows, columns), np.float32), tl.float32)
        return quick_interpreter.dot(None, handle(a[:rows], tl.float32), handle(b[:, :columns], tl.float32), added).data

    whole = product(64, 33)
    assert whole.dtype == np.float32
    assert np.abs(whole - (a.astype(np.float64) @ b + 1)).max() < 2e-5
    for rows, columns in ((1, 33), (15, 7), (64, 1)):
        assert np.array_equal(product(rows, columns), whole[:rows, :columns])
