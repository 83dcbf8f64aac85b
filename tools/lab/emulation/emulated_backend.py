"""The Triton kernels of transformer_fast on CPU tensors: compiled for a GPU, executed by tools/lab/ptx_emulator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from triton.runtime import JITFunction

import transformer_fast as tfast
from lab.ptx_emulator import Report, triton_driver
from tools.triton_kernels import jit_functions
from transformer_fast import backends, extension
from transformer_fast import triton as triton_package
from transformer_fast.ops import eager as _eager
from transformer_fast.triton import launcher
from transformer_fast.triton.configs import architecture
from transformer_fast.triton.launch_cache import launch_cache

PREFIX = triton_package.__name__


@contextmanager
def emulated_backend(arch: int = 80, mutate: Callable[[str], str] | None = None, **options: object) -> Iterator[Report]:
    """Run the public functions inside on the Triton kernels, compiled for compute capability ``arch`` and emulated.

    Every launch goes through Triton itself: none is repeated from an earlier call.

    Args:
        arch: compute capability, 80 or 90; tile sizes are those of its architecture class.
        mutate: changes the PTX of a launch.
        options: options of ``ptx_emulator.launch``.

    Yields:
        What the emulator found.
    """
    name = architecture((arch // 10, arch % 10))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(backends, "_obstacle", lambda *_: None))
        for module in _modules_with("architecture_of"):
            stack.enter_context(mock.patch.object(module, "architecture_of", lambda tensor: name))
        stack.callback(setattr, launch_cache, "enabled", launch_cache.enabled)
        launch_cache.enabled = False
        stack.callback(extension.module().launch_on_cpu, extension.module().launch_on_cpu(True))
        stack.callback(_forget_backends)
        _forget_backends()
        stack.enter_context(tfast.backend("triton"))
        yield stack.enter_context(triton_driver.emulated(arch, mutate, **options))


@contextmanager
def launched_kernels() -> Iterator[set[str]]:
    """The kernels launched inside, by module and name: "attention.tile_map._pack_kernel"."""
    found: set[str] = set()
    by_triton = launcher.launch_by_triton

    def launch(asked: launcher.Launch) -> object:
        found.add(name_of(asked.kernel))
        return by_triton(asked)

    with mock.patch.object(launcher, "launch_by_triton", launch):
        yield found


@functools.cache
def all_kernels() -> frozenset[str]:
    """Names of all kernels that the package launches."""
    return frozenset(name_of(kernel) for kernel in jit_functions() if kernel.__name__.endswith("kernel"))


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.__module__.removeprefix(f'{PREFIX}.')}.{kernel.__name__}"


def _modules_with(name: str) -> list[object]:
    """The modules of the Triton kernels that have imported a function, and the one that defines it."""
    all_kernels()
    return [m for key, m in list(sys.modules.items()) if key.startswith(PREFIX) and hasattr(m, name)]


def _forget_backends() -> None:
    backends._resolved.cache_clear()
    _eager._runs_on_triton.cache_clear()
