"""``make test`` and ``make test-all``: run all parts, even after a failure, and print one verdict at the end.

``make test`` runs the short list (tests/support/short_list.py): the same cases on every machine. ``make test-all`` runs
every case, and the tests of the tools. Each part is a command, whose output is shown while it runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Tests of the CPU kernels, repeated for each other instruction set of this machine.
KERNEL_TESTS = (
    "tests/ops/test_attention*.py",
    "tests/ops/test_cross_entropy.py",
    "tests/ops/test_dropout.py",
    "tests/ops/test_eager.py",
    "tests/ops/test_embedding.py",
    "tests/ops/test_every_op.py",
    "tests/ops/test_norm.py",
    "tests/ops/test_packing.py",
    "tests/ops/test_pages.py",
    "tests/generation/test_fused.py",
    "tests/generation/test_quantized*.py",
    "tests/generation/test_step_linear.py",
)
SETS = "from transformer_fast import extension; print(*extension.usable_instruction_sets())"
WHEEL_TEST = "tests/project/test_packaging.py::test_a_stranger_can_use_the_wheel"


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    counted: bool = False  # it is pytest, and writes its counts


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a part.

    Attributes:
        code: the exit status of its command.
        seconds: duration.
        counts: what tests/support/short_list.py writes; None for a part that is not counted.
    """

    code: int
    seconds: float
    counts: dict[str, Any] | None

    @property
    def passed(self) -> bool:
        return self.code == 0 and not self.lost

    @property
    def lost(self) -> int:
        """Number of collected cases without a result, because the part ended early."""
        if self.counts is None:
            return 0
        ended = sum(self.counts[name] for name in ("passed", "failed", "skipped", "error"))
        return max(0, self.counts["collected"] - ended)


def parts(workers: str, wheel: str | None, everything: bool) -> list[Part]:
    """The parts of ``make test``, or of ``make test-all``."""
    colour = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
    serial = [sys.executable, "-m", "pytest", colour]
    pytest = [*serial, "-n", workers, "--dist=worksteal", "--durations=30", *(["--all"] if everything else [])]
    kernel_tests = sorted(str(path.relative_to(ROOT)) for name in KERNEL_TESTS for path in ROOT.glob(name))
    few = [] if everything else ["--cover=values"]
    todo = [
        Part("lint", ["make", "--no-print-directory", "lint"]),
        Part("Triton", [sys.executable, "tools/triton_front_end.py"]),
        Part("tests", [*pytest, "tests", "--ignore=tests/interpreter"], counted=True),
        *(
            Part(f"on {name}", [*pytest, *few, *kernel_tests], {"TRANSFORMER_FAST_CPU": name}, counted=True)
            for name in other_instruction_sets()
        ),
        Part("interpreter", [*pytest, "tests/interpreter"], {"TRITON_INTERPRET": "1"}, counted=True),
    ]
    if everything:
        todo.append(Part("tools", [*pytest, "tools/tests"], counted=True))
    if wheel:
        todo.append(Part("wheel", [*serial, WHEEL_TEST], {"TRANSFORMER_FAST_TEST_WHEEL": wheel}, counted=True))
    return todo


def other_instruction_sets() -> list[str]:
    """Instruction sets with kernels that this machine runs, without the one of the main suite."""
    variables = {name: value for name, value in os.environ.items() if name != "TRANSFORMER_FAST_CPU"}
    names = subprocess.run([sys.executable, "-c", SETS], cwd=ROOT, env=variables, capture_output=True, text=True).stdout
    return [name for name in names.split()[1:] if "TRANSFORMER_FAST_CPU" not in os.environ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workers", default="auto", help="number of processes of pytest-xdist (default: as many as cores)"
    )
    parser.add_argument("--all", action="store_true", help="run every case, and the tests of the tools")
    parser.add_argument(
        "--wheel", choices=("baseline", "all"), help="also test a wheel with kernels for these instruction sets"
    )
    options = parser.parse_args()
    return run_all(parts(options.workers, options.wheel, options.all))


def run_all(todo: list[Part]) -> int:
    """Run each part and print the verdict; return 1 if one failed."""
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # the tests start hundreds of programs, which would all compile anew
    outcomes = {}
    for part in todo:
        print(f"\n== {part.name}: {shortened(part.command)}", flush=True)
        outcomes[part.name] = run(part)
    print("\n== verdict", *verdict(outcomes), sep="\n", flush=True)
    return int(any(not outcome.passed for outcome in outcomes.values()))


def verdict(outcomes: dict[str, Outcome]) -> list[str]:
    """One line per part, one per reason for which tests were skipped, the number of cases left out, and the result."""
    lines, reasons, only_all = [], Counter(), 0
    for name, outcome in outcomes.items():
        line = f"   {name:12} {'passed' if outcome.passed else f'FAILED ({outcome.code})':12} {outcome.seconds:5.0f} s"
        if outcome.counts is not None:
            counted = ("passed", "failed", "error", "skipped")
            line += "   " + ", ".join(f"{outcome.counts[n]} {n}" for n in counted if outcome.counts[n] or n == "passed")
            reasons.update(outcome.counts["reasons"])
            only_all += outcome.counts["only_all"]
        lines.append(line + (f"; {outcome.lost} ended without a result" if outcome.lost else ""))
    if reasons:
        lines.append("skipped, because this machine lacks what they need:")
        lines += [f"   {count:5}  {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
    if only_all:
        lines.append(f"{only_all} more cases run in `make test-all`")
    failed = [name for name, outcome in outcomes.items() if not outcome.passed]
    return [*lines, f"FAILED: {', '.join(failed)}" if failed else "all passed"]


def shortened(command: list[str]) -> str:
    return f"{' '.join(command[:12])} ..." if len(command) > 12 else " ".join(command)


def run(part: Part) -> Outcome:
    """Run a part. A counted part that wrote no counts has lost at least one case."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        command = [*part.command, f"--verdict={counts}"] if part.counted else part.command
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **part.environment}).returncode
        found = None
        if part.counted:
            found = json.loads(counts.read_text()) if counts.exists() else {**NOTHING, "collected": 1}
    return Outcome(code, time.monotonic() - start, found)


NOTHING = {"passed": 0, "failed": 0, "error": 0, "skipped": 0, "only_all": 0, "reasons": {}}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
