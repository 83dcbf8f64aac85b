"""The fast interpreter replaces the same functions of triton.language as Triton's interpreter, and no others."""

import inspect
import os

import numpy as np
import pytest
import quick_interpreter
import torch
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

from transformer_fast.attention_params import AttentionParams
from transformer_fast.triton.attention.forward import attention_forward

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


def test_a_launch_replaces_all_of_the_language_and_what_it_calls_nothing():
    scope = quick_interpreter.patch_lang(None)
    try:
        assert not any(map(is_builtin, (tl.load, tl.core.load, tl.math.exp, tl.tensor.__add__)))
        assert not quick_interpreter.patch_lang(None)._changes
    finally:
        scope.restore()
    assert all(map(is_builtin, (tl.load, tl.core.load, tl.math.exp, tl.tensor.__add__)))


SCALARS = [tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64]


@pytest.mark.parametrize("element", [*SCALARS, tl.pointer_type(tl.float16)], ids=str)
@pytest.mark.parametrize("shape", [[], [16], [1, 32], [4, 2, 8]], ids=str)
def test_types_and_tensors_are_those_of_triton(element, shape):
    """Test the first tensor of a type, which fills the cache, and later ones."""
    for _ in range(2):
        kind = element
        if shape:
            kind, expected = tl.block_type(element, shape), object.__new__(tl.block_type)
            quick_interpreter.NEW_BLOCK_TYPE(expected, element, shape)
            assert kind == expected and vars(kind).keys() == vars(expected).keys()
            assert tuple(kind.shape) == tuple(expected.shape) and str(kind) == str(expected)
        assert quick_interpreter.numpy_dtype(kind) == quick_interpreter.GET_NP_DTYPE(kind)
        handle, expected = object(), object.__new__(tl.tensor)
        quick_interpreter.NEW_TENSOR(expected, handle, kind)
        found = tl.tensor(handle, kind)
        assert vars(found).keys() == vars(expected).keys() and str(found) == str(expected)
        assert (found.handle, found.type, found.dtype) == (handle, kind, element)
        assert found.numel.value == expected.numel.value and len(found.shape) == len(shape)


def test_a_kernel_gives_the_same_bits_by_the_longer_ways(monkeypatch):
    q, k, v = (torch.randn(1, 1, length, 16) for length in (5, 40, 40))
    call = AttentionParams(scale=0.25, causal=30, dropout_p=0.3, seed=torch.tensor([2**40 + 7]))
    quick = attention_forward(q, k, v, call)[:2]
    assert len(quick_interpreter.REPLACED) == 6
    for owner, name, longer in quick_interpreter.REPLACED:
        monkeypatch.setattr(owner, name, longer)
    assert all(map(torch.equal, quick, attention_forward(q, k, v, call)[:2]))


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
    """Products of 15 and of 64 rows are equal for sums of 4,096 terms, which NumPy rounds in several orders."""
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
