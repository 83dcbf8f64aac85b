"""Test the CPU kernels under GCC's sanitizers, on Linux.

    python tools/sanitize.py              # memory and undefined behaviour
    python tools/sanitize.py --threads    # races: ThreadSanitizer

The module and two sets of kernels (AVX2, and the best that this machine runs) are built with the sanitizers in a copy
of the sources below build/, so the extension in use stays as it is. A second run builds only what changed. The tests of
the ops, random calls and wrong ones (tests/fuzz) run with each set of kernels.
Any report fails. Before that, planted faults (tools/planted_faults.cpp) must be reported, in the memory of a tensor as
torch gives it to kernels.

Not detected: reads past a part of a buffer that stay inside the same allocation, and accesses by masked AVX-512
instructions, which GCC does not instrument (with AVX2 the same code copies the last few elements of a row).

ThreadSanitizer mistakes the end of a parallel loop of GCC's OpenMP, which is built without it, for a race. LLVM's
OpenMP takes its place; its tool Archer tells ThreadSanitizer about synchronisation.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from cuda_check import ROOT, copy_sources, timed

# One set that is on nearly every x86 machine, where another one is the best.
COMMON_SET = "avx2"
TESTS = (
    "ops/test_norm.py",
    "ops/test_dropout.py",
    "ops/test_embedding.py",
    "ops/test_cross_entropy.py",
    "ops/test_every_op.py",
    "ops/test_op_arguments.py",
    "ops/test_attention*.py",
    "ops/test_packing.py",
    "ops/test_pages.py",
    "generation/test_step_linear.py",
    "generation/test_quantized_linear.py",
    "generation/test_fused.py",
)
WRONG_CALLS = 20
COMPILER = os.environ.get("CXX", "c++").split()
SUMMARY = re.compile(r"(\d+ (?:passed|failed).* in [\d.]+s.*)$", re.MULTILINE)
# A report of UndefinedBehaviorSanitizer: its line, and the stack below it.
UNDEFINED = re.compile(r"^.*: runtime error: .*(?:\n +#\d+ .*)*", re.MULTILINE)
# Memory that AddressSanitizer did not give; torch raises an error then.
REFUSED = re.compile(r"^==\d+==WARNING: AddressSanitizer failed to allocate .*\n", re.MULTILINE)
SUPPORTED = "from transformer_fast import extension; print(*extension.supported_instruction_sets())"
MODULE = """
from pathlib import Path
from transformer_fast import extension
print(Path(extension.module().__file__).parent.parent, extension.build_info()["instruction_set"])
"""
CALL = """
import ctypes, torch
faults = ctypes.CDLL({library!r})
row, result = torch.ones(50_000), torch.zeros(1)
pointer, columns, sum = ctypes.c_void_p(row.data_ptr()), ctypes.c_int64(row.numel()), ctypes.c_void_p(result.data_ptr())
{call}
"""


@dataclasses.dataclass(frozen=True)
class Sanitizer:
    """A sanitizer's build and run settings. ``with_best``: also test the machine's best set of kernels. ``planted``:
    calls of planted_faults.cpp with the words of the expected report; None for no report."""

    folder: Path
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    threads: int
    with_best: bool
    planted: dict[str, str | None]

    @property
    def reports(self) -> Path:
        return self.folder / "reports"


MEMORY = Sanitizer(
    folder=ROOT / "build/sanitize",
    # vptr needs type information of torch that its libraries do not export.
    flags=("-fsanitize=address,undefined", "-fno-sanitize=vptr"),
    libraries=("libasan.so", "libubsan.so"),
    threads=1,
    with_best=True,
    planted={
        "row_sum_past_the_end(pointer, columns)": "heap-buffer-overflow",
        "mask_of_too_many_lanes(34)": "runtime error: shift exponent 32 is too large",
    },
)
THREADS = Sanitizer(
    folder=ROOT / "build/sanitize_threads",
    flags=("-fsanitize=thread",),
    libraries=("libtsan.so",),
    threads=3,
    with_best=False,  # which thread does what is the same with every set
    planted={"sum_by_threads_at_once(pointer, columns, sum)": "data race", "sum_by_threads(pointer, columns)": None},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", action="store_true", help="look for data races instead of memory errors")
    parser.add_argument("--sets", help="instruction sets, such as avx2,avx512 (default: avx2 and this machine's best)")
    parser.add_argument("--count", type=int, default=200, help="random calls of each kind (default: %(default)s)")
    options = parser.parse_args()
    sanitizer = THREADS if options.threads else MEMORY
    environment = sanitized(sanitizer)  # says what is not installed before anything is built
    copy_sources(sanitizer.folder)
    shutil.copytree(ROOT / "tests", sanitizer.folder / "tests", dirs_exist_ok=True)
    check_planted_faults(sanitizer, environment)
    sets = built(sanitizer, environment, options.sets)
    for name in sets:
        check_kernels(sanitizer, {**environment, "TRANSFORMER_FAST_CPU": name}, options.count)
    print(f"sanitize: no report ({', '.join(sets)})")


def built(sanitizer: Sanitizer, environment: dict[str, str], asked: str | None) -> list[str]:
    """The instruction sets whose kernels were built: those asked for, or the common one and perhaps the best."""
    sets = asked.split(",") if asked else [COMMON_SET if os.uname().machine == "x86_64" else "generic"]
    build(sanitizer, sets)
    if sanitizer.with_best and not asked:
        best = run(sanitizer, [sys.executable, "-c", SUPPORTED], environment)[1].split()[0]
        if best not in sets:
            sets.append(best)
            build(sanitizer, sets)
    return sets


def build(sanitizer: Sanitizer, sets: list[str]) -> None:
    variables = {
        **os.environ,
        "TRANSFORMER_FAST_CUDA": "0",
        "TRANSFORMER_FAST_CPU_SETS": ",".join(sets),
        "TRANSFORMER_FAST_CXX_FLAGS": " ".join(flags(sanitizer)),
    }
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    timed(f"built {', '.join(sets)}", command, cwd=sanitizer.folder, env=variables)


def flags(sanitizer: Sanitizer) -> list[str]:
    return ["-O1", "-g1", "-fno-omit-frame-pointer", *sanitizer.flags]


def check_planted_faults(sanitizer: Sanitizer, environment: dict[str, str]) -> None:
    """Exit unless each planted fault is reported and the correct call is not."""
    faults = sanitizer.folder / "planted_faults.so"
    made = faults.with_suffix(".o")
    source = str(ROOT / "tools/planted_faults.cpp")
    # As setup.py does it: compiled with OpenMP, linked without.
    compile_it = [*COMPILER, "-std=c++20", *flags(sanitizer), "-fopenmp", "-fPIC", "-c", source, "-o", str(made)]
    subprocess.run(compile_it, check=True)
    subprocess.run([*COMPILER, *flags(sanitizer), "-shared", str(made), "-o", str(faults)], check=True)
    for call, words in sanitizer.planted.items():
        code = CALL.format(library=str(faults), call=f"faults.{call}")
        output, report = run_and_look(sanitizer, [sys.executable, "-c", code], environment)[1:]
        if words is None and report:
            sys.exit(f"{report}\nsanitize: there is no fault in {call}, but a report")
        if words is not None and words not in report:
            sys.exit(
                f"{output}{report}\nsanitize: the planted fault was not seen: no {words!r} in the report of {call}"
            )
        print(f"sanitize: seen, as planted: {words}" if words else f"sanitize: not reported: {call}", flush=True)


def check_kernels(sanitizer: Sanitizer, environment: dict[str, str], count: int) -> None:
    """Run tests and random calls with the kernels of one instruction set; exit at a report or a failure."""
    name = environment["TRANSFORMER_FAST_CPU"]
    tests = [str(path) for pattern in TESTS for path in sorted((sanitizer.folder / "tests").glob(pattern))]
    module = run(sanitizer, [sys.executable, "-c", MODULE], environment)[1].split()
    if module != [str(sanitizer.folder), name]:
        sys.exit(f"sanitize: not the kernels that were built here for {name}, but {' '.join(module)}")
    # -s: what UndefinedBehaviorSanitizer prints must not stay with pytest.
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-s", *tests]
    random = [*pytest[: -len(tests)], "--hypothesis-seed=0", "tests/fuzz/test_fuzz.py", "-k"]
    for what, command, examples in (
        ("tests", pytest, {}),
        (f"{count} random calls of each kind", [*random, "test_random_calls"], {"EXAMPLES": str(count)}),
        (f"{WRONG_CALLS} wrong forms of each call", [*random, "test_wrong_calls"], {"EXAMPLES": str(WRONG_CALLS)}),
    ):
        start = time.monotonic()
        code, output, report = run_and_look(sanitizer, command, environment | examples, show=True)
        if report:
            sys.exit(f"{report}\nsanitize: the {what} with the {name} kernels made the reports above")
        if code != 0:
            sys.exit(f"sanitize: the {what} with the {name} kernels failed ({code}), without a report")
        summary = SUMMARY.findall(output)
        said = summary[-1] if summary else f"in {time.monotonic() - start:.0f} s"
        print(f"sanitize: {name}: {what}: {said}", flush=True)


def sanitized(sanitizer: Sanitizer) -> dict[str, str]:
    """Environment variables with which a Python without sanitizers loads libraries built with sanitizers."""
    # libstdc++ too, or the first exception finds that the sanitizer, which looked for it early, has none.
    libraries = [library(name) for name in (*sanitizer.libraries, "libstdc++.so.6")]
    reports = f"log_path={sanitizer.reports}/report"
    environment = {
        **os.environ,
        # Python and torch keep memory until they end; a wrong call may ask for more than there is.
        "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:{reports}",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:{reports}",  # torch's own loops
        "OMP_NUM_THREADS": str(sanitizer.threads),
        "TRANSFORMER_FAST_BACKEND": "native",
        "PYTHONPATH": str(sanitizer.folder),
    }
    if sanitizer is THREADS:
        archers = sorted(Path("/usr/lib").glob("llvm-*/lib/libarcher.so"))
        if not archers:
            sys.exit("sanitize --threads needs LLVM's OpenMP with Archer, and finds none: apt-get install libomp-dev")
        environment["OMP_TOOL_LIBRARIES"] = str(archers[-1])
        libraries.append(str(archers[-1].parent / "libomp.so.5"))
    return {**environment, "LD_PRELOAD": " ".join(libraries)}


def library(name: str) -> str:
    """Path of a library of the sanitizers, as the compiler has it."""
    path = subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    if not Path(path.strip()).is_absolute():
        sys.exit(f"sanitize needs GCC's {name}, and {COMPILER[0]} has none")
    return path.strip()


def run_and_look(
    sanitizer: Sanitizer, command: list[str], environment: dict[str, str], show: bool = False
) -> tuple[int, str, str]:
    """Run a command in the copy; return exit code, output, and sanitizer reports."""
    shutil.rmtree(sanitizer.reports, ignore_errors=True)
    sanitizer.reports.mkdir(parents=True)
    code, output = run(sanitizer, command, environment, show)
    return code, output, found_reports(output, sanitizer.reports)


def run(sanitizer: Sanitizer, command: list[str], environment: dict[str, str], show: bool = False) -> tuple[int, str]:
    if sanitizer is THREADS:  # ThreadSanitizer fails with randomised addresses
        command = ["setarch", "-R", *command]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    text = b""
    with subprocess.Popen(command, cwd=sanitizer.folder, env=environment, **output) as process:
        while chunk := os.read(process.stdout.fileno(), 65536):  # not by lines: dots of progress have no end of line
            text += chunk
            if show:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
    return process.returncode, text.decode(errors="replace")


def found_reports(output: str, folder: Path) -> str:
    """Reports of the sanitizers: in files, or, of undefined behaviour, which stops nothing, in the output."""
    undefined = UNDEFINED.findall(output)
    files = (REFUSED.sub("", path.read_text(errors="replace")) for path in sorted(folder.iterdir()))
    return "\n".join([*undefined, *filter(None, files)])


if __name__ == "__main__":
    main()
