"""Windows in every Triton kernel, against the fp64 oracle with a dense mask of the same shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_attention_grad_bias
import test_attention_packed
import test_attention_weights
import test_triton_attention
import torch
from attention_calls import DEVICE, call_of, inputs, random, reference_call
from helpers import assert_as_exact_as_eager, mask_parts, poisoned_memory

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.reference.attention import attention as reference
from transformer_fast.triton import configs
from transformer_fast.triton.attention import grad_bias
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

B, H, LQ, LK, D = 2, 2, 70, 100, 16
WINDOWS = {
    "from below": (None, -7),
    "causal": (0, -40),
    "both sides": (5, -9),
    "one key a query": (0, 0),
    "ahead": (60, 20),
    "behind, first rows empty": (-12, -45),
    "last rows empty": (None, 60),
    "all rows empty": (3, 100),
    "bounds nothing": (None, -69),
}
DIALECTS = ("dense", "rows", "padding", "lengths", "lengths per query", "all")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, tiles of 32 x 32: several lie before the window, and several past it."""
    if device.type == "cpu":
        for key in configs.ATTENTION:
            monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 32, 4, 1))
        for table in ("TILES", "ROW_TILES"):
            monkeypatch.setattr(grad_bias, table, dict.fromkeys(grad_bias.TILES, (32, 32, 4)))
        monkeypatch.setattr(test_attention_weights.module, "TILES", dict.fromkeys(grad_bias.TILES, (32, 32, 4)))


def window_call(name, mask=None, **more):
    causal, window = WINDOWS[name]
    return call_of({"causal": causal, "window": window} | (mask or {}), D, **more)


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("name", WINDOWS)
def test_alone(name, zero_empty_rows):
    tensors = inputs(B, H, 1, LQ, LK, D, torch.float32)
    test_triton_attention.check(*tensors, window_call(name, zero_empty_rows=zero_empty_rows))


@pytest.mark.parametrize("name", ["causal", "ahead", "behind, first rows empty"])
def test_in_half_precision_with_dropout(name):
    tensors = inputs(B, 4, 2, LQ, LK, D, torch.float16)
    test_triton_attention.check(*tensors, window_call(name, dropout_p=0.3))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_with_every_part_of_a_mask(dialect):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    mask = {"causal": 20} | mask | {"window": -15}
    tensors = inputs(B, H, 1, LQ, LK, D, torch.float32)
    test_triton_attention.check(*tensors, call_of(mask, D, dropout_p=0.2))


@pytest.mark.parametrize("name", ["both sides", "last rows empty"])
@pytest.mark.parametrize("magnitude", [1.0, 60.0])
def test_bias_and_its_gradient(name, magnitude):
    """The large scores take the way on which rows are summed again."""
    q, *rest = inputs(B, H, 1, LQ, LK, D, torch.float32)
    call = window_call(name, {"bias": random(1, H, LQ, LK, seed=9)})
    test_triton_attention.check(q * magnitude, *rest, call)
    test_attention_grad_bias.check(q * magnitude, *rest, call)


@pytest.mark.parametrize("dialect", ["none", "dense"])
@pytest.mark.parametrize("name", ["causal", "ahead", "last rows empty"])
def test_weights(name, dialect):
    mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(1))[dialect]
    tensors = inputs(B, H, 1, LQ, LK, D, torch.float32)[:3]
    test_attention_weights.check(*tensors, window_call(name, mask, dropout_p=0.2))


def test_keys_before_the_window_do_not_leak():
    """NaN in keys that only the first queries see reaches those, and what lies before every window is not read."""
    q, k, v, grad = inputs(1, H, 1, 40, 110, D, torch.float32)
    call = call_of({"causal": 70, "window": 64}, D, zero_empty_rows=True)
    with poisoned_memory():
        out, logsumexp = attention_forward(q, k, v, call)
        clean = out, *attention_backward(grad, q, k, v, out, logsumexp, call)
    for t in (k, v):
        t[:, :, :66] = torch.nan
    with poisoned_memory():
        out, logsumexp = attention_forward(q, k, v, call)
        grads = attention_backward(grad, q, k, v, out, logsumexp, call)
    seeing = torch.arange(40, device=DEVICE) < 2
    for ours, expected in zip((out, grads[0]), clean[:2], strict=True):
        assert ours[:, :, seeing].isnan().all() and torch.equal(ours[:, :, ~seeing], expected[:, :, ~seeing])


LENGTHS_Q, LENGTHS_K = [33, 5, 1, 60, 0, 3], [70, 40, 3, 20, 4, 0]


def sequence_by_sequence(q, k, v, grad, call, dtype):
    """The oracle's output, logsumexp and gradients, of each sequence alone."""
    leaves = [t.detach().cpu().to(dtype).requires_grad_() for t in (q, k, v)]
    outs, logsumexps = [], []
    per_sequence = zip(leaves[0].split(LENGTHS_Q), *(t.split(LENGTHS_K) for t in leaves[1:]), strict=True)
    for tensors in per_sequence:
        one_q, one_k, one_v = (t.transpose(0, 1).unsqueeze(0) for t in tensors)
        options = reference_call(replace(call, packed=None), one_q.shape[2], one_k.shape[2])
        out, _, logsumexp = reference(one_q, one_k, one_v, **options)
        outs.append(out[0].transpose(0, 1))
        logsumexps.append(logsumexp[0])
    out = torch.cat(outs)
    return out.detach(), torch.cat(logsumexps, 1).detach(), *torch.autograd.grad(out, leaves, grad.cpu().to(dtype))


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), [(0, -20), (None, 2), (30, 25), (-3, None), (-10, -50), (0, 200)])
def test_packed(causal, window, zero_empty_rows):
    """Queries without keys in sequences that have some: the mean of those, or zero."""
    packed = PackedBatch(
        test_attention_packed.starts(LENGTHS_Q), test_attention_packed.starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    )
    options = {"causal": causal, "window": window, "zero_empty_rows": zero_empty_rows}
    call = AttentionParams(scale=D**-0.5, packed=packed, **options)
    Tq, Tk = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = [(Tq, 4, D), (Tk, 2, D), (Tk, 2, D), (Tq, 4, D)]
    tensors = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    ours = [t.cpu() for t in test_attention_packed.kernel(*tensors, call)]
    eager, exact = (sequence_by_sequence(*tensors, call, dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal(ours[1] == -torch.inf, exact[1] == -torch.inf)
    for name, *values in zip(("out", "logsumexp", "grad_q", "grad_k", "grad_v"), ours, eager, exact, strict=True):
        rows = 2 * max(LENGTHS_Q) if name in ("grad_k", "grad_v") else 1
        assert_as_exact_as_eager(*values, ulps=4.0 * rows**0.5, what=name)
