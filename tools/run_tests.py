"""``make test``: every part, also after a red one, and one verdict at the end.

A part is a command of its own. Its output is shown as it comes; the verdict repeats the last line of pytest's.
With `--minutes` every part has its share of that time, and what an earlier one has left over (tests/breadth_first.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What runs the CPU kernels by themselves: first of all, and on every instruction set with kernels, not the best alone.
KERNEL_TESTS = (
    "test_attention*.py",
    "test_cross_entropy.py",
    "test_eager.py",
    "test_dropout.py",
    "test_embedding*.py",
    "test_generation_fused.py",
    "test_generation_quantized.py",
    "test_norm.py",
    "test_packing.py",
    "test_pages.py",
    "test_quantized_linear.py",
    "test_step_linear.py",
)
SETS = "from transformer_fast import extension; print(*extension.usable_instruction_sets())"
WHEEL_TEST = "tests/project/test_packaging.py::test_a_stranger_can_use_the_wheel"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(r"=+ (.* in [\d.]+s.*?) =+")


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    share: float = 0.0  # of the minutes; 0: it takes what it takes


def parts(workers: str, wheel: str) -> list[Part]:
    """What `make test` consists of."""
    colour = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
    serial = [sys.executable, "-m", "pytest", colour]
    pytest = [*serial, "-n", workers, "--maxschedchunk=2", "--durations=30"]
    interpreted = {"TRITON_INTERPRET": "1"}
    kernel_tests = sorted(str(path) for name in KERNEL_TESTS for path in (ROOT / "tests").glob(name))
    todo = [
        Part("lint", ["make", "--no-print-directory", "lint"]),
        Part("kernels", [*pytest, *kernel_tests], share=3),
        *(Part(name, [*pytest, *kernel_tests], {"TRANSFORMER_FAST_CPU": name}, 2) for name in other_instruction_sets()),
        Part(
            "others",
            [*pytest, "tests", "--ignore=tests/interpreter", *(f"--ignore={path}" for path in kernel_tests)],
            share=6,
        ),
        Part("interpreter", [*pytest, "tests/interpreter"], interpreted, 4),
    ]
    if wheel:
        todo.append(Part("wheel", [*serial, WHEEL_TEST], {"TRANSFORMER_FAST_TEST_WHEEL": wheel}))
    return todo


def other_instruction_sets() -> list[str]:
    """Those with kernels that this machine runs besides the one that the suite runs on."""
    variables = {name: value for name, value in os.environ.items() if name != "TRANSFORMER_FAST_CPU"}
    names = subprocess.run([sys.executable, "-c", SETS], cwd=ROOT, env=variables, capture_output=True, text=True).stdout
    return [name for name in names.split()[1:] if "TRANSFORMER_FAST_CPU" not in os.environ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist (default: %(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", help="for the tests; default: what all of them take")
    parser.add_argument("--wheel", choices=("baseline", "all"), help="also a wheel, with kernels for these")
    options = parser.parse_args()
    return run_all(parts(options.workers, options.wheel), options.minutes)


def run_all(todo: list[Part], minutes: float | None = None) -> int:
    """Run each and print the verdict; 1 if one failed."""
    verdict, failed = [], []
    for index, part in enumerate(todo):
        start = time.monotonic()
        limited = minutes is not None and part.share > 0
        if limited:
            given = minutes * part.share / sum(later.share for later in todo[index:])
            part = dataclasses.replace(part, command=[*part.command, f"--minutes={given:.2f}"])
        print(f"\n== {part.name}: {shortened(part.command)}", flush=True)
        code, summary = run(part)
        if limited:
            minutes = max(0.0, minutes - (time.monotonic() - start) / 60)
        if code != 0:
            failed.append(part.name)
        outcome = "passed" if code == 0 else f"FAILED ({code})"
        verdict.append(f"   {part.name:12} {outcome:12} {time.monotonic() - start:5.0f} s   {summary}".rstrip())
    verdict.append(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    print("\n== verdict", *verdict, sep="\n", flush=True)
    return 1 if failed else 0


def shortened(command: list[str]) -> str:
    return f"{' '.join(command[:12])} ..." if len(command) > 12 else " ".join(command)


def run(part: Part) -> tuple[int, str]:
    """The exit code of a part, and the summary that pytest printed last, if it did."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **part.environment}
    with subprocess.Popen(
        part.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        text = b""
        while chunk := os.read(process.stdout.fileno(), 65536):  # not by lines: dots of progress have no end of line
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            text = text[-65536:] + chunk
    found = SUMMARY.findall(COLOURS.sub("", text.decode(errors="replace")))
    return process.returncode, found[-1] if found else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
