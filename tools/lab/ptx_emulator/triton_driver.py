"""A stand-in for Triton's driver: inside `emulated()`, launches of Triton kernels on CPU tensors run in the emulator.

with emulated() as report:
    kernel[grid](x, y, out, BLOCK=128)
assert not report.findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .launch import Argument, launch
from .report import Report

FIRST_DEVICE = 1000
"""Device numbers begin here, one an architecture: Triton keeps compiled kernels by device."""

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory a CTA may have, by compute capability (CUDA programming guide, table of limits)."""


@dataclass
class Emulation:
    """Settings of an `emulated()` block."""

    report: Report
    mutate: Callable[[str], str] | None
    options: dict[str, Any]


_innermost: list[Emulation] = []
_kernels: dict[int, CompiledKernel] = {}


class Launcher:
    """Launcher of a compiled kernel. Triton keeps it longer than one `emulated()` block."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.names, self.signature, self.metadata = list(source.fn.arg_names), source.signature, metadata

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        values = rest[4:]  # after the packed metadata, the launch's metadata and two hooks
        arguments = [
            Argument(name, self.signature[name], value)
            for name, value in zip(self.names, values, strict=True)
            if self.signature[name] != "constexpr"
        ]
        if not _innermost:
            raise RuntimeError("this kernel was compiled for the emulator: launch it inside emulated()")
        emulation = _innermost[-1]
        ptx = _kernels[function].asm["ptx"]
        if emulation.mutate is not None:
            ptx = emulation.mutate(ptx)
        threads = 32 * self.metadata.num_warps
        launch(
            ptx, (x, y, z), threads, self.metadata.shared, arguments, report=emulation.report, **emulation.options
        )  # fmt: skip


def _load_binary(name: str, kernel: CompiledKernel, shared: int, device: int) -> tuple[object, int, int, int, int]:
    """Registers a kernel under a handle: module, function, registers, spills, threads a CTA may have."""
    _kernels[id(kernel)] = kernel
    return kernel, id(kernel), 32, 0, 1024


def _driver(arch: int) -> SimpleNamespace:
    properties = {"max_shared_mem": SHARED_LIMIT.get(arch, 163 * 1024), "multiprocessor_count": 2, "warpSize": 32}
    utils = SimpleNamespace(
        load_binary=_load_binary,
        get_device_properties=lambda device: properties,
        unload_module=lambda module: None,
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=Launcher,
        get_current_device=lambda: FIRST_DEVICE + arch,
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 1,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
    )


@contextmanager
def emulated(arch: int = 80, mutate: Callable[[str], str] | None = None, **options: Any) -> Iterator[Report]:
    """Runs Triton's launches in the emulator; its report is what the context manager yields.

    Args:
        arch: compute capability that Triton compiles for, times 10.
        mutate: makes another PTX text of the compiled one before it runs.
        options: of `launch`: sanitize, order, report.
    """
    report: Report | None = options.pop("report", None)
    emulation = Emulation(Report() if report is None else report, mutate, options)
    construct = CompiledKernel.__init__

    def constructed(self: CompiledKernel, *arguments: Any, **keywords: Any) -> None:
        construct(self, *arguments, **keywords)
        self.kernel = self  # _load_binary gets this instead of the machine code

    patches = (
        mock.patch.object(CompiledKernel, "__init__", constructed),
        mock.patch.object(driver, "_active", _driver(arch)),
    )
    with patches[0], patches[1]:
        _innermost.append(emulation)
        try:
            yield emulation.report
        finally:
            _innermost.pop()
