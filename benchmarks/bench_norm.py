"""Norms, alone and with residual and dropout, against eager, ``F.layer_norm``, ``F.rms_norm`` and torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast

try:  # a peer on a GPU, where it is installed
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as LigerLayerNorm
except ImportError:
    LigerLayerNorm = None

SMALL_CASE = "test_norm[cpu-cpu-1x64-std-forward]"
# 16,400 x 512 are over 32 MiB, which glibc asks the system for at every call.
SHAPES = {
    "cpu": [(1, 64), (1024, 512), (2048, 512), (4096, 256), (16_400, 512)],
    "cuda": [(1, 512), (4096, 512), (16_384, 512), (16_384, 1024), (16_384, 4096), (4096, 16_384), (1024, 65_536)],
}
# Widths that 4 does not divide, and wide rows; all matrices have about the same number of elements.
WIDTHS = {"cpu": [33, 129, 1000, 4097, 65_536], "cuda": [129, 257, 513, 1000, 2050, 8192, 20_000, 65_536]}
ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
CASES = [(device, shape) for device, shapes in SHAPES.items() for shape in shapes]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
P = 0.1
WHAT = ["std", "layer", "residual+layer", "residual+dropout+layer", "rms", "residual+rms", "residual+dropout+rms"]


def std_norm(x, weight, bias, eps=1e-6):
    """Compute Norm as the classic texts do."""
    return weight * (x - x.mean(dim=-1, keepdim=True)) / (x.std(dim=-1, keepdim=True) + eps) + bias


def add_norm(p):
    def function(x, residual, weight, bias):
        summed = residual + F.dropout(x, p) if p else residual + x
        return F.layer_norm(summed, summed.shape[-1:], weight, bias), summed

    return function


def add_rms_norm(p):
    def function(x, residual, weight, bias):
        summed = residual + F.dropout(x, p) if p else residual + x
        return F.rms_norm(summed, summed.shape[-1:], weight, 1e-6), summed

    return function


def ways(what):
    """Return (ours, peers by name): functions of (x, residual, weight, bias)."""
    if what == "std":
        compiled = torch.compile(std_norm)
        return lambda x, r, w, b: tfast.layer_norm(x, w, b, 1e-6, kind="std"), {
            "eager": lambda x, r, w, b: std_norm(x, w, b),
            "compiled": lambda x, r, w, b: compiled(x, w, b),
        }
    if what == "layer":
        plain = torch.compile(F.layer_norm)
        peers = {
            "F.layer_norm": lambda x, r, w, b: F.layer_norm(x, x.shape[-1:], w, b),
            "compiled": lambda x, r, w, b: plain(x, x.shape[-1:], w, b),
        }
        if LigerLayerNorm is not None and torch.cuda.is_available():  # (x, weight, bias, eps), as of August 2026
            peers["Liger"] = lambda x, r, w, b: LigerLayerNorm.apply(x, w, b, 1e-5)
        return lambda x, r, w, b: tfast.layer_norm(x, w, b), peers
    if what == "rms":
        rms = torch.compile(F.rms_norm)
        return lambda x, r, w, b: tfast.layer_norm(x, w, None, 1e-6, kind="rms"), {
            "F.rms_norm": lambda x, r, w, b: F.rms_norm(x, x.shape[-1:], w, 1e-6),
            "compiled": lambda x, r, w, b: rms(x, x.shape[-1:], w, 1e-6),
        }
    p = P if "dropout" in what else 0.0
    if "rms" in what:
        return lambda x, r, w, b: tfast.layer_norm(x, w, None, 1e-6, kind="rms", residual=r, dropout_p=p), {
            "eager": add_rms_norm(p),
            "compiled": torch.compile(add_rms_norm(p)),
        }
    return lambda x, r, w, b: tfast.layer_norm(x, w, b, residual=r, dropout_p=p), {
        "eager": add_norm(p),
        "compiled": torch.compile(add_norm(p)),
    }


def bytes_moved(what, rows, d, size, backward):
    """Each matrix read or written once; the weights do not count."""
    forward, back = (4, 5) if "dropout" in what else (4, 4) if "residual" in what else (2, 3)
    return (forward + (back if backward else 0)) * rows * d * size


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(("on", "shape"), CASES, ids=[f"{device}-{shape[0]}x{shape[1]}" for device, shape in CASES])
def test_norm(versus, device, on, shape, what, backward):
    if on != device:
        pytest.skip(f"a shape for {on}")
    run(versus, device, shape, what, backward)


@pytest.mark.parametrize(("on", "d"), [(device, d) for device, widths in WIDTHS.items() for d in widths])
def test_norm_of_width(versus, device, on, d):
    """Residual + dropout + norm, forward and backward, over the widths."""
    if on != device:
        pytest.skip(f"a width for {on}")
    run(versus, device, (ELEMENTS[device] // d, d), "residual+dropout+layer", True)


def run(versus, device, shape, what, backward):
    rows, d = shape
    dtype = DTYPES[device]

    def make_inputs():
        x, residual, *grads = (torch.randn(rows, d, device=device, dtype=dtype) for _ in range(4))
        weight, bias = torch.randn(2, d, device=device, dtype=dtype).unbind()
        leaves = [t.detach().clone().requires_grad_(backward) for t in (x, residual, weight, bias)]
        return leaves, grads

    def call(function):
        def timed(inputs):
            leaves, grads = inputs
            outputs = function(*leaves)
            if not backward:
                return outputs
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            used = leaves if len(outputs) == 2 else [leaves[0], *leaves[2:]]
            used = used[:-1] if "rms" in what else used  # which has no bias
            return torch.autograd.grad(outputs, used, grads[: len(outputs)])

        return timed

    ours, peers = ways(what)

    def check(inputs):
        if "dropout" in what:  # masks differ by design: torch draws its own
            return
        peer = next(iter(peers.values()))
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(ours(*inputs[0]), peer(*inputs[0]), atol=tolerance, rtol=tolerance)

    calls = {"ours": call(ours)} | {name: call(peer) for name, peer in peers.items()}
    moved = bytes_moved(what, rows, d, dtype.itemsize, backward)
    versus(make_inputs, calls, check=check, bytes_moved=moved)
