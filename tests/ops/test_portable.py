"""Building blocks of the CPU kernels, compiled for a CPU without a known vector unit, and for each vector unit of
this x86 CPU.

``python tools/arm_check.py`` builds the same program, and whole kernels, for aarch64 and runs them in qemu.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from transformer_fast import extension

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
UNITS = {"none": ((), 32), "avx2": (("-march=x86-64-v3",), 32), "avx512": (("-march=x86-64-v4",), 64)}
"""Compiler flags and bytes per vector, by name."""


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler")
@pytest.mark.cover(1)
@pytest.mark.parametrize("unit", UNITS)
def test_functions_of_the_kernels(tmp_path: Path, unit: str) -> None:
    flags, vector_bytes = UNITS[unit]
    if flags and unit not in extension.supported_instruction_sets():
        pytest.skip(f"no {unit} here")
    folders = [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    program = tmp_path / "helpers"
    sources = [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/ops/portable_helpers.cpp")]
    subprocess.run([*COMPILER, *FLAGS, *flags, *folders, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout == f"right with vectors of {vector_bytes} bytes\n"
