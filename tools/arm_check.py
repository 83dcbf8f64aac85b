"""Compile the CPU kernels (of the set ``generic``) for aarch64, and run them in qemu, on any machine.

    python tools/arm_check.py

A cross compiler compiles every file of csrc/cpu, and csrc/instruction_set.cpp, which detects the processor, with the
flags of setup.py. The headers are those of the installed torch; they are equal for all processors. The objects are
linked into a library, without libtorch. If qemu is installed, two programs compare functions and kernels with plain
loops: tests/ops/portable_helpers.cpp and tests/ops/portable_kernels.cpp.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/arm_check"
TRIPLE = "aarch64-linux-gnu"
QEMU = "qemu-aarch64-static"
ELSEWHERE = ROOT / "csrc/instruction_set.cpp"
# Fails to compile unless a vector is a pair of 16-byte NEON registers.
VECTORS = '#include "cpu/simd/vec.h"\nstatic_assert(transformer_fast::kVectorBytes == 32);\n'


def main() -> None:
    compiler = shutil.which(f"{TRIPLE}-g++")
    if compiler is None:
        sys.exit(f"arm-check needs a cross compiler, and there is none: apt-get install g++-{TRIPLE}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "kernels_config.h").write_text('#pragma once\n#define TRANSFORMER_FAST_KERNELS "arm-check"\n')
    command = [compiler, *kernel_flags((ROOT / "setup.py").read_text()), *includes()]

    sources = [*sorted((ROOT / "csrc/cpu").rglob("*.cpp")), ELSEWHERE]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        objects = list(pool.map(lambda source: compiled(command, source), sources))
    library = FOLDER / "libtransformer_fast_cpu_generic.so"
    kernels = [str(file) for source, file in zip(sources, objects, strict=True) if source != ELSEWHERE]
    run([compiler, "-shared", "-fopenmp", "-Wl,--as-needed,--no-undefined", *kernels, "-o", str(library)])
    run([*command, "-fsyntax-only", "-x", "c++", "-"], input=VECTORS)
    size = library.stat().st_size / 1e6
    say(f"{len(kernels)} files linked: {library.relative_to(ROOT)}, {size:.1f} MB, vectors of 32 bytes")

    qemu = shutil.which(QEMU)
    if qemu is None:
        say(f"not run: there is no {QEMU} (apt-get install qemu-user-static)")
        return
    for name, linked in (("portable_helpers", []), ("portable_kernels", kernels)):
        program = FOLDER / name
        # Static, because qemu would search the host's folders for aarch64 libraries.
        inputs = [f"{ROOT}/tests/ops/{name}.cpp", *linked]
        run([*command, "-static", "-Wl,--no-warnings", *inputs, "-o", str(program)])
        start = time.monotonic()
        said = run([qemu, "-E", "OMP_NUM_THREADS=3", str(program)]).strip()
        say(f"in qemu: {said} ({time.monotonic() - start:.0f} s)")


def kernel_flags(setup: str) -> list[str]:
    """Flags with which this text of setup.py compiles the kernels on Linux."""
    flags = next(
        ast.literal_eval(node.value)
        for node in ast.parse(setup).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CXX_FLAGS"
    )
    return [*flags, "-fopenmp", "-ffp-contract=off", "-Wno-maybe-uninitialized", "-fPIC", "-Werror"]


def includes() -> list[str]:
    """Include folders; warnings in torch's headers are suppressed."""
    torch = [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    return [f"-I{ROOT}/csrc", f"-I{FOLDER}", *torch]


def compiled(command: list[str], source: Path) -> Path:
    start = time.monotonic()
    target = FOLDER / f"{source.stem}.o"
    run([*command, "-c", str(source), "-o", str(target)])
    say(f"compiled {source.relative_to(ROOT)} ({time.monotonic() - start:.0f} s)")
    return target


def run(command: list[str], **options: str) -> str:
    """Return the standard output of a command; if it fails, exit with its output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\narm-check: failed ({done.returncode}): {' '.join(command)}")
    return done.stdout


def say(message: str) -> None:
    print(f"arm-check: {message}", flush=True)


if __name__ == "__main__":
    main()
