"""What every CPU kernel is made of, as it is compiled for a CPU that has none of the vector units we know.

``make arm-check`` builds the same program, and whole kernels, for aarch64 and runs them in qemu.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")


@pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="no C++ compiler")
def test_functions_of_the_kernels_without_a_vector_unit(tmp_path: Path) -> None:
    folders = [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    program = tmp_path / "helpers"
    sources = [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/portable_helpers.cpp")]
    subprocess.run([*COMPILER, *FLAGS, *folders, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "right with vectors of 32 bytes\n"
