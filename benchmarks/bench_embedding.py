"""The embedding: gather, scale, positional encoding and dropout in one pass, against eager and torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.ops.embedding import add_positional

SMALL_CASE = "test_embed[cpu-cpu-1x1x64x1000-0.0-forward-zipf]"
# (batch, length, d, vocabulary)
SHAPES = {
    "cpu": [(1, 1, 64, 1_000), (1, 1, 512, 32_000), (8, 16, 128, 8_000), (32, 64, 512, 32_000)],
    "cuda": [(1, 1, 512, 32_000), (64, 64, 512, 32_000), (64, 256, 768, 30_000), (64, 256, 1024, 50_000)],
}
CASES = [(device, shape) for device, shapes in SHAPES.items() for shape in shapes]
IDS = [f"{device}-{'x'.join(map(str, shape))}" for device, shape in CASES]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def eager(ids, weight, table, scale, p):
    return F.dropout(F.embedding(ids, weight) * scale + table[: ids.shape[-1]], p)


def skip_unless(on, device):
    if on != device:
        pytest.skip(f"a shape for {on}")


def make_ids(kind, batch, length, vocabulary, device):
    """Frequencies as in text (Zipf), or the worst case: one id everywhere."""
    if kind == "hot":
        return torch.full((batch, length), 7, device=device)
    return (vocabulary ** torch.rand(batch, length, device=device) - 1).long()


@pytest.mark.parametrize("kind", ["zipf", "hot"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=IDS)
def test_embed(versus, device, on, shape, p, backward, kind):
    skip_unless(on, device)
    if kind == "hot" and not (backward and p > 0.0):
        pytest.skip("a frequent id only matters to the gradient; once is enough")
    batch, length, d, vocabulary = shape
    dtype, scale = DTYPES[device], math.sqrt(d)
    table = tfast.positional_table(length, d).to(device)

    def make_inputs():
        weight = torch.randn(vocabulary, d, device=device, dtype=dtype, requires_grad=backward)
        grad = torch.randn(batch, length, d, device=device, dtype=dtype)
        return make_ids(kind, batch, length, vocabulary, device), weight, table.to(dtype), grad

    def call(function):
        def run(inputs):
            ids, weight, encoding, grad = inputs
            out = function(ids, weight, encoding, scale, p)
            return torch.autograd.grad(out, weight, grad) if backward else out

        return run

    def ours(ids, weight, encoding, scale, p):
        return tfast.embed(ids, weight, encoding, scale=scale, dropout_p=p)

    def check(inputs):
        ids, weight, encoding, grad = inputs
        # In fp32: eager's own sum of thousands of rows in bf16 is too coarse to check against.
        leaf, wide = (weight.detach().to(t).requires_grad_() for t in (dtype, torch.float32))
        expected = eager(ids, wide, encoding.float(), scale, 0.0)
        actual = ours(ids, leaf, encoding, scale, 0.0)
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.25}
        torch.testing.assert_close(actual.float(), expected, **tolerance)
        found = torch.autograd.grad(actual, leaf, grad)[0].float()
        exact = torch.autograd.grad(expected, wide, grad.float())[0]
        torch.testing.assert_close(found, exact, rtol=tolerance["rtol"], atol=1e-2 * scale)

    tokens = batch * length
    moved = 2 * tokens * d * dtype.itemsize  # each row of the weight read, each row of the output written
    if backward:
        moved += (tokens + vocabulary) * d * dtype.itemsize
    peers = {"eager": call(eager), "compiled": call(torch.compile(eager))}
    versus(make_inputs, {"ours": call(ours)} | peers, check=check, bytes_moved=moved)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=IDS)
def test_add_positional(versus, device, on, shape, p):
    skip_unless(on, device)
    batch, length, d, _ = shape
    dtype = DTYPES[device]
    table = tfast.positional_table(length, d).to(device, dtype)

    def make_inputs():
        return torch.randn(batch, length, d, device=device, dtype=dtype)

    def plain(x):
        return F.dropout(x + table[: x.shape[-2]], p)

    calls = {"ours": lambda x: add_positional(x, table, 0, p), "eager": plain, "compiled": torch.compile(plain)}
    versus(make_inputs, calls, bytes_moved=2 * batch * length * d * dtype.itemsize)


@pytest.mark.parametrize("d", [64, 512])
def test_positional_table(versus, device, d):
    def check(_):
        torch.testing.assert_close(tfast.positional_table(5000, d), reference.embedding.positional_table(5000, d))

    calls = {
        "ours": lambda _: tfast.positional_table(5000, d),
        "eager": lambda _: reference.embedding.positional_table(5000, d),
    }
    versus(lambda: None, calls, check=check, bytes_moved=5000 * d * 4)


@pytest.mark.parametrize("kind", ["zipf", "hot"])
@pytest.mark.parametrize(("on", "shape"), CASES, ids=IDS)
def test_gradient_sorted_or_atomic(versus, device, on, shape, kind):
    """Cost of determinism on a GPU."""
    skip_unless(on, device)
    if device == "cpu":
        pytest.skip("the CPU has one gradient, and it is deterministic")
    batch, length, d, vocabulary = shape

    def make_inputs():
        grad = torch.randn(batch, length, d, device=device, dtype=DTYPES[device])
        return make_ids(kind, batch, length, vocabulary, device), grad

    def call(deterministic):
        def run(inputs):
            ids, grad = inputs
            backward = torch.ops.transformer_fast.embed_backward
            return backward(grad, ids, vocabulary, 1.0, None, 0.0, None, deterministic)

        return run

    def eager_gradient(inputs):
        ids, grad = inputs
        return torch.ops.aten.embedding_dense_backward(grad, ids, vocabulary, -1, False)

    versus(make_inputs, {"ours": call(True), "atomic": call(False), "eager": eager_gradient})
