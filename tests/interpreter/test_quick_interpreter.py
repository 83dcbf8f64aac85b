"""The shorter way to replace the functions of triton.language replaces what Triton's own does, and no more."""

import inspect
import os

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
