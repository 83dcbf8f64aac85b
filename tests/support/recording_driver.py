"""A driver that records calls instead of a GPU's driver, for the tests of launches.

The device number is one that no machine has, so that nothing compiled here is mistaken for a real GPU's.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import transformer_fast as tfast
from transformer_fast import backends, extension
from transformer_fast.ops import eager
from transformer_fast.triton.launch_cache import launch_cache
from transformer_fast.triton.launcher import Launch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are not launched", allow_module_level=True)

DEVICE, STREAM = 77, 4321
FUNCTIONS = itertools.count(1)
CALLS: list[tuple] = []


@triton.jit(do_not_specialize=["count"])
def kernel(x, y, out, count, step, wide: tl.int64, factor, SIZE: tl.constexpr, DOUBLE: tl.constexpr):
    place = tl.arange(0, SIZE)
    value = tl.load(x + place * step + wide, mask=place < count, other=0.0) * factor
    if y is not None:
        value += tl.load(y + place)
    if DOUBLE:
        value *= 2
    tl.store(out + place, value)


class Launcher:
    """Replacement of Triton's launcher, which starts a compiled kernel."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        CALLS.append(arguments)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Record the driver calls, as the launcher of a compiled kernel gets them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utils = SimpleNamespace(
        load_binary=lambda *binary: ("module", next(FUNCTIONS), 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        unload_module=lambda module: None,
    )
    fake = SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", fake)
    launch_cache.clear()
    CALLS.clear()
    before = extension.module().launch_on_cpu(True)
    with tfast.backend("triton"):
        yield CALLS
    extension.module().launch_on_cpu(before)


def seen(call):
    """Return grid, stream, function, options and arguments of a driver call; tensors as pointers."""
    return (*call[:6], [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in call[9:]])


def arguments_of(kernel, call):
    """Return the arguments of a driver call by name, tensors as in :func:`seen`."""
    return dict(zip([parameter.name for parameter in kernel.params], seen(call)[-1], strict=True))


def outcomes(calls, given):
    """Return driver calls with every pointer named by its input, or by its order of occurrence."""
    names = {t.data_ptr(): name for name, t in given.items()}
    return [
        [names.setdefault(v, f"new {len(names)}") if isinstance(v, int) and v > 2**32 else v for v in seen(call)[-1]]
        for call in calls
    ], [call[:5] for call in calls]


def launch_of(x, y, out, **changes):
    arguments = {"x": x, "y": y, "out": out, "count": 5, "step": 2, "wide": 3, "factor": 0.5, "SIZE": 16}
    return Launch("test", kernel, 7, arguments | {"DOUBLE": False} | changes, num_warps=4, num_stages=1)


def floats(*shape, offset=0):
    return torch.zeros(torch.Size(shape).numel() + 4)[offset:][: torch.Size(shape).numel()].view(shape)


def forget_backends():
    backends._resolved.cache_clear()
    eager._runs_on_triton.cache_clear()


@pytest.fixture
def on_a_gpu(launched, monkeypatch):
    """Let the public functions run the Triton kernels on CPU tensors, with the recording driver."""
    monkeypatch.setattr(backends, "_obstacle", lambda *_: None)
    forget_backends()
    yield launched
    forget_backends()
