"""``make sanitize``: the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer (GCC on Linux).

Module and kernels, those for AVX2 and the best that this machine runs, are built with the sanitizers in a copy of the
sources under build/sanitize, so that the extension in use is left alone; a second run builds only what changed. With
each set of kernels run the tests of the ops, and random calls (tests/fuzz.py). Any report fails. Before that, two
planted faults (tools/planted_faults.cpp) must be reported, in the memory of a tensor as torch gives it to kernels.

What it cannot see: elements written past a part of a buffer that lies inside the same allocation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cuda_check import ROOT, copy_sources, timed

FOLDER = ROOT / "build/sanitize"
REPORTS = FOLDER / "reports"
# vptr needs type information of torch that its libraries do not export.
SANITIZERS = ["-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize=vptr"]
# One set that is on nearly every x86 machine, where another one is the best.
COMMON_SET = "avx2"
TESTS = (
    "test_norm.py",
    "test_dropout.py",
    "test_embedding.py",
    "test_embedding_inputs.py",
    "test_cross_entropy.py",
    "test_attention*.py",
    "test_step_linear.py",
    "test_generation_fused.py",
    "test_packing.py",
    "test_pages.py",
)
SUMMARY = re.compile(r"(\d+ (?:passed|failed).* in [\d.]+s.*)$", re.MULTILINE)
# A report of UndefinedBehaviorSanitizer: its line, and the stack below it.
UNDEFINED = re.compile(r"^.*: runtime error: .*(?:\n +#\d+ .*)*", re.MULTILINE)
SUPPORTED = "import torch; from transformer_fast import _C; print(*_C.supported_instruction_sets())"
# What is planted, and what its report says.
PLANTED = {
    "row = torch.ones(64); faults.row_sum_past_the_end(ctypes.c_void_p(row.data_ptr()), ctypes.c_int64(64))": (
        "heap-buffer-overflow",
        "in row_sum_past_the_end",
    ),
    "faults.mask_of_too_many_lanes(34)": ("runtime error: shift exponent 32 is too large", "planted_faults.cpp"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", help="instruction sets, as in avx2,avx512 (default: avx2 and this machine's best)")
    parser.add_argument("--count", type=int, default=600, help="random calls with each set (default: %(default)s)")
    options = parser.parse_args()
    copy_sources(FOLDER)
    shutil.copytree(ROOT / "tests", FOLDER / "tests", dirs_exist_ok=True)
    check_planted_faults()

    sets = options.sets.split(",") if options.sets else ["host"]
    if sets == ["host"] and os.uname().machine == "x86_64":
        build([COMMON_SET])
        best = run([sys.executable, "-c", SUPPORTED], sanitized())[1].split()[0]
        sets = list(dict.fromkeys([COMMON_SET, best]))
    build(sets)
    for name in sets:
        check_kernels(name, options)
    print(f"sanitize: no report ({', '.join(sets)})")


def build(sets: list[str]) -> None:
    variables = {
        **os.environ,
        "TRANSFORMER_FAST_CUDA": "0",
        "TRANSFORMER_FAST_CPU_SETS": ",".join(sets),
        "TRANSFORMER_FAST_CXX_FLAGS": " ".join(SANITIZERS),
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    timed(f"built {', '.join(sets)}", command, cwd=FOLDER, env=variables)


def check_planted_faults() -> None:
    """Stop unless each planted fault is reported."""
    library = FOLDER / "planted_faults.so"
    source = ROOT / "tools/planted_faults.cpp"
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, *SANITIZERS, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    for call, words in PLANTED.items():
        code = f"import ctypes, torch; faults = ctypes.CDLL({str(library)!r}); {call}"
        report = reports(run([sys.executable, "-c", code], sanitized())[1])
        if missing := [word for word in words if word not in report]:
            sys.exit(f"{report}\nsanitize: the planted fault was not seen: no {missing[0]!r} in the report of {call}")
        print(f"sanitize: seen, as planted: {words[0]}", flush=True)


def check_kernels(name: str, options: argparse.Namespace) -> None:
    """The tests and random calls with the kernels of one instruction set; stop at a report or a failure."""
    tests = [str(path) for pattern in TESTS for path in sorted((FOLDER / "tests").glob(pattern))]
    environment = {**sanitized(), "TRANSFORMER_FAST_CPU": name, "PYTHONPATH": str(FOLDER)}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", *tests]
    fuzz = [sys.executable, "tests/fuzz.py", "--backend", "native", "--count", str(options.count)]
    for what, command in (("tests", pytest), (f"{options.count} random calls", fuzz)):
        start = time.monotonic()
        code, output = run(command, environment)
        if report := reports(output):
            sys.exit(f"{report}\nsanitize: the {what} with the {name} kernels made the reports above")
        if code != 0:
            sys.exit(f"{output}\nsanitize: the {what} with the {name} kernels failed ({code}), without a report")
        summary = SUMMARY.findall(output)
        said = summary[-1] if summary else f"in {time.monotonic() - start:.0f} s"
        print(f"sanitize: {name}: {what}: {said}", flush=True)


def sanitized() -> dict[str, str]:
    """The environment in which Python, which is not built with them, runs what is; empties the folder of reports."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    return {
        **os.environ,
        # libstdc++ too, or the first exception finds that the sanitizer, which looked for it early, has none.
        "LD_PRELOAD": " ".join(library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")),
        # Python and torch keep memory until they end.
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={REPORTS}/report",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "TRANSFORMER_FAST_BACKEND": "native",
    }


def library(name: str) -> str:
    """Where the compiler has a library of the sanitizers."""
    compiler = os.environ.get("CXX", "c++").split()
    path = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    if not Path(path.strip()).is_absolute():
        sys.exit(f"sanitize needs GCC's {name}, and {compiler[0]} has none")
    return path.strip()


def run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command in the copy, and what it said."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=FOLDER, env=environment, **output)
    return done.returncode, done.stdout


def reports(output: str) -> str:
    """What the sanitizers reported: AddressSanitizer in files, the other one, which stops nothing, in the output."""
    undefined = UNDEFINED.findall(output)
    return "\n".join([*undefined, *(path.read_text(errors="replace") for path in sorted(REPORTS.iterdir()))])


if __name__ == "__main__":
    main()
