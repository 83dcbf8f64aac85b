"""Run all checks and benchmarks of a GPU machine; ``make gpu`` runs this.

The steps, most valuable first: the build, the parity table, measured times beside predicted ones, the tests on CUDA,
the benchmarks and their report. A step that fails, takes too long or lacks a package is reported, and the next one
runs. Logs, records and summary.json are written to one folder as soon as they are known. A table of the steps is
printed last.

    python benchmarks/gpu.py --out results
    python benchmarks/gpu.py --out results --minutes 9             as much as fits; then, until nothing is left:
    python benchmarks/gpu.py --out results --minutes 9 --resume
    python benchmarks/gpu.py --out results --only measured report

Without a GPU the command stops with a message; ``--rehearse`` runs the steps even then, to test them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
GRACE = 20
"""Seconds between a step's interrupt at its limit, when it writes what it has, and its end."""


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        name: of the step and of its log.
        limit: seconds.
        command: what runs, in the repository.
        needs: packages without which the step is skipped, as they are imported.
        environment: variables of its own.
        resumes: a second run goes on where the first was stopped.
    """

    name: str
    limit: float
    command: list[str]
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    resumes: bool = False

    def is_done(self, outcome: dict[str, Any] | None) -> bool:
        """Return True if an earlier run's outcome has nothing to add, as where less than the limit stopped it."""
        if outcome is None:
            return False
        return not outcome["stopped"] or (outcome["limit"] >= self.limit and not self.resumes)


PACKAGES = {"pytest_benchmark": "pytest-benchmark", "xdist": "pytest-xdist"}
"""On the index, where they have another name than imported."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def steps(out: Path, resume: bool = False) -> list[Step]:
    """Return all steps, most valuable first."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    record = str(out / "benchmarks.json")
    # Proved on CPU, or without a GPU by design: training, the command line, compilation ahead of time, emulation.
    left_out = ("translation", "project", "ops/test_plots.py", "ops/test_triton_compile.py")
    ignored = [f"--ignore=tests/{name}" for name in left_out]
    # Eight processes share the GPU: each has a context, and the tensors of one small test.
    tests = [*pytest, "-n", "8", "--continue-on-collection-errors", "tests", *ignored]
    measured = [python, "-m", "benchmarks.predict.measured", "--out", str(out), *["--resume"] * resume]
    return [
        Step("build", 500, [python, "setup.py", "-q", "build_ext", "--inplace"], ("torch", "ninja")),
        Step("info", 60, [python, "-m", "transformer_fast", "info"], ("torch",)),
        Step("verify", 240, [python, "-m", "transformer_fast", "verify"], ("torch", "triton")),
        Step("measured", 400, measured, ("torch", "triton"), resumes=True),
        Step("tests", 300, [*tests, "-k", "cuda"], ("pytest", "xdist"), ONE_THREAD),
        Step(
            "benchmarks",
            500,
            [*pytest, "benchmarks", "--seconds", "0.15", "--benchmark-json", record],
            ("pytest", "pytest_benchmark"),
        ),
        Step("report", 60, [python, "benchmarks/report.py", record, "--out", str(out)], ("matplotlib",)),
        Step("host_cost", 90, [python, "benchmarks/host_cost.py"], ("torch", "triton")),
        Step("other_tests", 420, [*tests, "-k", "not cuda"], ("pytest", "xdist"), ONE_THREAD),
    ]


def run(step: Step, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run one step, keep its output in a log, and say how it ended."""
    start, log = time.monotonic(), out / f"{step.name}.log"
    missing = [PACKAGES.get(name, name) for name in step.needs if importlib.util.find_spec(name) is None]
    if missing:
        ended = "skipped: not installed"
        log.write_text(f"pip install {' '.join(missing)}\n")
    else:
        with log.open("w") as stream:
            ended = _ended(step, stream, environment | step.environment)
    lines = log.read_text(errors="replace").strip().splitlines()
    return {
        "step": step.name,
        "ended": ended,
        "limit": step.limit,
        "stopped": ended.startswith("stopped"),
        "seconds": round(time.monotonic() - start, 1),
        "last_line": lines[-1][:200] if lines else "",
    }


def _ended(step: Step, stream: TextIO, environment: dict[str, str]) -> str:
    """Run a step and return its outcome as text.

    At its time limit the step is interrupted, as by Ctrl-C, so that pytest still writes its record. Then its whole
    process group is killed, so that no worker stays on the GPU.
    """
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(step.limit)
        return "passed" if code == 0 else f"failed (exit status {code})"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return f"stopped after its limit of {step.limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(todo: list[Step], out: Path, outcomes: dict[str, dict], minutes: float | None = None) -> list[str]:
    """Run steps in order, and write summary.json after each.

    Args:
        todo: what is to be run.
        out: folder of logs and records.
        outcomes: of earlier steps, by name; those of these steps are added.
        minutes: in which all of it must end; None for as long as the limits of the steps allow.

    Returns:
        The names of the steps that there was no time for.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the steps would ignore their interrupt too
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    end = time.monotonic() + (float("inf") if minutes is None else 60 * minutes)
    for index, step in enumerate(todo):
        left = end - time.monotonic() - GRACE
        if left < GRACE:
            return [late.name for late in todo[index:]]
        print(f"{step.name} ...", flush=True)
        outcomes[step.name] = run(replace(step, limit=min(step.limit, left)), out, environment)
        (out / "summary.json").write_text(json.dumps(list(outcomes.values()), indent=1) + "\n")
    return []


def gpu_obstacle() -> str | None:
    """Reason why the steps would run without a GPU; None if torch sees one. Asked in another process, because a
    process that has used a GPU keeps it."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return f"torch cannot be imported ({(asked.stderr.strip().splitlines() or ['no reason given'])[-1]})"
    version, count = asked.stdout.split()[-2:]
    return None if int(count) else f"torch {version} sees no GPU on this machine"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: results)")
    names = [step.name for step in steps(Path())]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STEP", help=f"run these steps only; of: {', '.join(names)}"
    )
    parser.add_argument("--resume", action="store_true", help="skip finished steps and measured cases")
    parser.add_argument("--minutes", type=float, help="time limit; steps that do not fit are skipped")
    parser.add_argument("--rehearse", action="store_true", help="run the steps even without a GPU")
    options = parser.parse_args(given)
    if obstacle := gpu_obstacle():
        if not options.rehearse:
            raise SystemExit(
                f"{obstacle}: nothing was run. To try the steps without one: --rehearse (make gpu REHEARSE=1)"
            )
        print(f"{obstacle}: a rehearsal, whose times and tests are not those of a GPU", flush=True)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary = out / "summary.json"
    outcomes: dict[str, dict] = {}
    if summary.exists() and (options.only or options.resume):
        outcomes = {outcome["step"]: outcome for outcome in json.loads(summary.read_text())}
    todo = [step for step in steps(out, options.resume) if step.name in (options.only or names)]
    if options.resume:
        todo = [step for step in todo if not step.is_done(outcomes.get(step.name))]
    left = run_all(todo, out, outcomes, options.minutes)
    for outcome in sorted(outcomes.values(), key=lambda outcome: names.index(outcome["step"])):
        print("{step:<12} {seconds:>6} s  {ended}: {last_line}".format(**outcome))
    if left:
        print(f"no time for: {', '.join(left)}; the same command with --resume goes on")


if __name__ == "__main__":
    main()
