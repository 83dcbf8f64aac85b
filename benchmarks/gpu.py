"""Everything worth knowing about a GPU machine, in one go: what ``make gpu`` runs after the build.

The test suite on CUDA, the parity table, the benchmarks and their report. A step that fails or takes too long is
reported and the next one runs, so that one visit to a machine always brings back all it can. Logs and JSON land in one
folder; a short table is printed last.

    python benchmarks/gpu.py --out results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Step:
    """One command, its time limit in seconds, and what it is for."""

    name: str
    limit: int
    command: list[str]


def steps(out: Path) -> list[Step]:
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    record = str(out / "benchmarks.json")
    # Training and the command line are proved on CPU; ahead-of-time compiles need no GPU either.
    trained = ("training", "checkpoint", "averaging", "recipes", "train_multi30k", "translation_data")
    left_out = ("triton_compile", "cli", "plots", *trained)
    ignored = [f"--ignore=tests/test_{name}.py" for name in left_out]
    return [
        Step("info", 60, [python, "-m", "transformer_fast", "info"]),
        Step("verify", 90, [python, "-m", "transformer_fast", "verify"]),
        Step("tests", 200, [*pytest, "-n", "8", "tests", *ignored]),
        Step("host_cost", 40, [python, "benchmarks/host_cost.py"]),
        Step("benchmarks", 220, [*pytest, "benchmarks", "--seconds", "0.15", "--benchmark-json", record]),
        Step("report", 60, [python, "benchmarks/report.py", record, "--out", str(out)]),
    ]


def run(step: Step, out: Path, environment: dict[str, str]) -> dict[str, object]:
    """Run one step, keep its output in a log, and say how it ended."""
    start = time.monotonic()
    log = out / f"{step.name}.log"
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                step.command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, timeout=step.limit
            ).returncode
            ended = "passed" if code == 0 else f"failed (exit status {code})"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its limit of {step.limit} s"
    lines = log.read_text(errors="replace").strip().splitlines()
    return {
        "step": step.name,
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
        "last_line": lines[-1] if lines else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    outcomes = []
    for step in steps(out):
        print(f"{step.name} ...", flush=True)
        outcomes.append(run(step, out, environment))
    (out / "summary.json").write_text(json.dumps(outcomes, indent=2) + "\n")
    table = out / "benchmarks.md"
    if table.exists():
        print(table.read_text())
    print((out / "host_cost.log").read_text())
    for outcome in outcomes:
        print("{step:<11} {seconds:>6} s  {ended}: {last_line}".format(**outcome))


if __name__ == "__main__":
    main()
