"""The CUDA kernels of csrc/cuda on CPU tensors: compiled by nvcc, executed by tools/lab/ptx_emulator.

The host code is that of csrc/cuda as well: the library that tests/support/cuda_sources.py builds for the CPU.
The launches of that library go to the emulator. Every tensor made inside is known to it, with its bounds.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.ptx_emulator import Argument, Report
from lab.ptx_emulator import launch as run_launch
from tests.support import cuda_sources

EXECUTOR = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint * 3), ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t),
)  # fmt: skip


@contextmanager
def emulated_cuda(arch: int = 80, **options: Any) -> Iterator[tuple[SimpleNamespace, Report, set[str]]]:
    """Operators of csrc/cuda whose kernels are compiled by nvcc for a compute capability and run in the emulator.

    The operators' tensors must be made inside. Grids are cut to three blocks, so that kernels walk their loops.

    Args:
        arch: 80 or 90.
        options: options of ``ptx_emulator.launch``.

    Yields:
        The operators, what the emulator found, and the names of the kernels that were launched.

    Raises:
        Exception: at the end, the first that a launch raised; the launches after it were left out.
    """
    library = ctypes.CDLL(str(cuda_sources.build_for_cpu()))
    torch.ops.load_library(library._name)
    names, kernels = _names_by_address(library), _kernels(arch)
    report, launched, failures = Report(), set[str](), list[Exception]()

    def execute(kernel: int, grid: int, block: Any, count: int, places: Any, sizes: Any) -> None:
        if failures:
            return
        try:
            name = names[kernel]
            launched.add(short_name(name))
            ptx, entry = kernels[name]
            structs = [ctypes.string_at(places[i], sizes[i]) for i in range(count)]
            arguments = [Argument(f"argument {i}", "struct", struct) for i, struct in enumerate(structs)]
            memory = _memory_of(library, structs)
            run_launch(
                ptx, (grid, 1, 1), tuple(block.contents), 0, arguments, entry=entry, report=report, memory=memory,
                **options,
            )  # fmt: skip
        except Exception as error:  # would be lost on its way through C++
            failures.append(error)

    executor = EXECUTOR(execute)
    library.record_memory(True)
    library.set_executor(executor)
    try:
        yield getattr(torch.ops, cuda_sources.LIBRARY), report, launched
    finally:
        library.set_executor(EXECUTOR(0))
        library.record_memory(False)
    if failures:
        raise failures[0]


def all_kernels() -> set[str]:
    """Return the kernels of csrc/cuda without their types: "csrc/cuda encode_kernel"."""
    return {short_name(name) for name in _kernels(80)}


def short_name(name: str) -> str:
    found = re.search(r"(\w+_kernel)\b", name)
    assert found is not None, name
    return f"csrc/cuda {found.group(1)}"


def _memory_of(library: ctypes.CDLL, structs: list[bytes]) -> list[tuple[str, Tensor]]:
    """Memory blocks that pointers inside some structs refer to."""
    start, size = ctypes.c_size_t(), ctypes.c_size_t()
    blocks = {}
    for number, struct in enumerate(structs):
        for place in range(0, len(struct) - 7, 8):
            word = ctypes.c_size_t(int.from_bytes(struct[place : place + 8], "little"))
            library.find_memory(word, ctypes.byref(start), ctypes.byref(size))
            if size.value and start.value not in blocks:
                memory = (ctypes.c_uint8 * size.value).from_address(start.value)
                blocks[start.value] = f"argument {number} + {place}", torch.frombuffer(memory, dtype=torch.uint8)
    return list(blocks.values())


@functools.cache
def _kernels(arch: int) -> dict[str, tuple[str, str]]:
    """(PTX text, name of the entry) by the kernel's name in C++."""
    entries = [
        (ptx, entry) for ptx in cuda_sources.ptx(f"sm_{arch}") for entry in re.findall(r"\.entry\s+([\w$]+)", ptx)
    ]
    names = cuda_sources.run(["c++filt", *(entry for _, entry in entries)]).splitlines()
    return dict(zip(names, entries, strict=True))


def _names_by_address(library: ctypes.CDLL) -> dict[int, str]:
    """The kernels' names in C++ by their addresses in the library for the CPU."""
    symbols = subprocess.run(["nm", "-C", "--defined-only", library._name], capture_output=True, text=True, check=True)
    found = {name: int(address, 16) for address, name in re.findall(r"^(\w+) [tTW] (.*)$", symbols.stdout, re.M)}
    here = ctypes.cast(library.set_executor, ctypes.c_void_p).value
    assert here is not None
    base = here - found["set_executor"]
    return {base + address: name for name, address in found.items() if "_kernel" in name}
