"""Run the checks and measurements of a GPU machine that is there for minutes; ``make gpu`` runs this.

The steps come in order of worth: parity, headline times beside peers, whole training steps, tiles, the rest of
the parity table, profiles, tests on CUDA, benchmarks. If nothing works in the smoke, the run ends after it.
A step that fails, takes too long or lacks a package is reported, and the next one runs. What steps print is shown at
once and kept in logs; records are written result by result, and a table of the steps is printed last.

    python benchmarks/gpu.py --out results
    python benchmarks/gpu.py --out results --budget 330            as much as fits; then, until nothing is left:
    python benchmarks/gpu.py --out results --budget 420 --resume
    python benchmarks/gpu.py --out results --only smoke headline

``--cache`` brings what ``make gpu-prepare`` compiled on a machine without a GPU, and ``--archive`` keeps one file with
all results up to date. Without a GPU the command stops with a message; ``--rehearse`` runs the steps even then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quick.record import CACHE, CUT, MOST_COMPILED

ROOT = Path(__file__).resolve().parent.parent
GRACE = 12
"""Seconds between a step's interrupt at its limit, when it writes what it has, and its end."""
SHORTEST = 15
"""Seconds for which a step is worth to be started, beside its grace."""
ARCHIVED_EVERY = 10


@dataclass(frozen=True)
class Step:
    """One command.

    Args:
        name: of the step and of its log.
        limit: seconds.
        command: what runs, in the repository; "{seconds}" in it becomes the time that the step has.
        needs: packages without which the step is skipped, as they are imported, and programs, as "bin/ncu".
        environment: variables of its own.
        resumes: a second run goes on where the first was stopped.
        decides: if the step fails, the run ends.
        after: text in the smoke's log without which the step is not needed.
    """

    name: str
    limit: float
    command: list[str]
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    resumes: bool = False
    decides: bool = False
    after: str = ""

    def is_done(self, outcome: dict[str, Any] | None) -> bool:
        """Return True if an earlier run's outcome has nothing to add, as where less than the limit stopped it."""
        if outcome is None:
            return False
        return not outcome["stopped"] or (outcome["limit"] >= self.limit and not self.resumes)

    def missing(self) -> list[str]:
        """Name what the step needs and this machine lacks, as pip or a user would install it."""
        programs = [name.removeprefix("bin/") for name in self.needs if name.startswith("bin/")]
        packages = [name for name in self.needs if not name.startswith("bin/")]
        lacking = [PACKAGES.get(name, name) for name in packages if importlib.util.find_spec(name) is None]
        return lacking + [name for name in programs if shutil.which(name) is None]


PACKAGES = {"pytest_benchmark": "pytest-benchmark", "xdist": "pytest-xdist"}
"""On the index, where they have another name than imported."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def steps(out: Path, rehearse: bool = False) -> list[Step]:
    """Return all steps, most valuable first."""
    python = sys.executable
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    record = str(out / "benchmarks.json")
    # Proved on CPU, or without a GPU by design: training, the command line, compilation ahead of time.
    left_out = ("translation", "project", "ops/test_plots.py", "ops/test_triton_compile.py")
    ignored = [f"--ignore=tests/{name}" for name in left_out]
    # Twelve processes share the GPU: each has a context, and the tensors of one small test.
    tests = [*pytest, "-n", "12", "--continue-on-collection-errors", "tests/ops", "tests/layers", *ignored]
    kernels = ("torch", "triton")

    def quick(name: str, *options: str) -> list[str]:
        device = ["--device", "cpu"] * rehearse
        timed = ["--out", str(out), "--seconds", "{seconds}", *device]
        return [python, "-m", f"benchmarks.quick.{name}", *timed, *options]

    return [
        Step("build", 200, [python, "-m", "benchmarks.quick.build"], ("torch", "ninja")),
        Step("smoke", 40, quick("parity", "--smoke"), kernels, decides=True),
        Step("compile", 60, [python, "-m", "tools.stand_in_gpu", "--processes", "16"], kernels, after=MOST_COMPILED),
        Step("parity", 75, quick("parity"), kernels, resumes=True),
        Step("headline", 160, quick("headline"), kernels, resumes=True),
        Step("step", 270, quick("step"), (*kernels, "transformers"), resumes=True),
        Step("tiles", 70, quick("tiles"), kernels, resumes=True),
        Step("profile", 110, quick("profile"), (*kernels, "bin/ncu")),
        Step("tests", 150, [*tests, "-k", "cuda or OnAGpu"], ("pytest", "xdist"), ONE_THREAD),
        Step(
            "benchmarks",
            500,
            [*pytest, "benchmarks", "--seconds", "0.15", "--benchmark-json", record],
            ("pytest", "pytest_benchmark"),
        ),
        Step("report", 60, [python, "benchmarks/report.py", record, "--out", str(out)], ("matplotlib",)),
        Step("host_cost", 90, [python, "benchmarks/host_cost.py"], kernels),
    ]


def run(step: Step, out: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run one step, show its output and keep it in a log, and say how it ended."""
    start, log = time.monotonic(), out / f"{step.name}.log"
    if missing := step.missing():
        ended = "skipped: not installed"
        log.write_text(f"pip install {' '.join(missing)}\n")
    else:
        ended = _ended(step, log, environment | step.environment)
    lines = log.read_text(errors="replace").strip().splitlines()
    return {
        "step": step.name,
        "ended": ended,
        "limit": step.limit,
        "stopped": ended.startswith("stopped"),
        "seconds": round(time.monotonic() - start, 1),
        "last_line": lines[-1][:200] if lines else "",
    }


def _ended(step: Step, log: Path, environment: dict[str, str]) -> str:
    """Run a step and return its outcome as text.

    At its time limit the step is interrupted, as by Ctrl-C, so that pytest still writes its record. Then its whole
    process group is killed, so that no worker stays on the GPU.
    """
    command = [part.replace("{seconds}", f"{max(1, step.limit - 3):.0f}") for part in step.command]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )

    def show() -> None:
        with log.open("wb") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                sys.stdout.write("   " + line.decode(errors="replace"))
                sys.stdout.flush()

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        code = process.wait(step.limit)
        if code == CUT:
            return "stopped before its last case"
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
        shown.join(5)


def run_all(todo: list[Step], out: Path, outcomes: dict[str, dict], budget: float | None = None) -> list[str]:
    """Run steps in order, and write summary.json after each.

    Args:
        todo: what is to be run.
        out: folder of logs and records.
        outcomes: of earlier steps, by name; those of these steps are added.
        budget: seconds in which all of it must end; None for as long as the limits of the steps allow.

    Returns:
        The names of the steps that there was no time for, or no reason.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or the steps would ignore their interrupt too
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(CACHE)}
    environment["PYTHONWARNINGS"] = "ignore"  # peers warn at each call that they refuse; the record has their reasons
    for name in ("TRITON_INTERPRET", "TRITON_PTXAS_PATH"):
        environment.pop(name, None)
    end = time.monotonic() + (float("inf") if budget is None else budget)
    for index, step in enumerate(todo):
        smoke = out / "smoke.log"
        if step.after and not (smoke.exists() and step.after in smoke.read_text()):
            continue
        left = end - time.monotonic() - GRACE
        if left < SHORTEST:
            return [late.name for late in todo[index:] if not late.after]
        print(f"{step.name} ...", flush=True)
        outcome = outcomes[step.name] = run(replace(step, limit=min(step.limit, left)), out, environment)
        (out / "summary.json").write_text(json.dumps(list(outcomes.values()), indent=1) + "\n")
        if step.decides and outcome["ended"] != "passed":
            print(f"{step.name} {outcome['ended']}: nothing works here, and the run ends", flush=True)
            return [late.name for late in todo[index + 1 :] if not late.after]
    return []


@contextmanager
def archived(out: Path, archive: Path | None) -> Iterator[None]:
    """Context in which a folder is archived every few seconds, and once more at the end."""
    stop = threading.Event()

    def save() -> None:
        partly = archive.with_name(f"{archive.name}.part")
        with tarfile.open(partly, "w:gz") as tar:
            tar.add(out, "results")
        partly.replace(archive)

    def keep() -> None:
        while not stop.wait(ARCHIVED_EVERY):
            with suppress(OSError):  # a file that changes while it is read; the next one is whole
                save()

    keeper = threading.Thread(target=keep, daemon=True)
    if archive is not None:
        archive.parent.mkdir(parents=True, exist_ok=True)
        keeper.start()
    try:
        yield
    finally:
        if archive is not None:
            stop.set()
            keeper.join()
            save()


def gpu_obstacle() -> str | None:
    """Reason why the steps would run without a GPU; None if torch sees one. Asked in another process, because a
    process that has used a GPU keeps it."""
    code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        return f"torch cannot be imported ({(asked.stderr.strip().splitlines() or ['no reason given'])[-1]})"
    version, count = asked.stdout.split()[-2:]
    return None if int(count) else f"torch {version} sees no GPU on this machine"


def main(given: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the results (default: results)")
    names = [step.name for step in steps(Path())]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STEP", help=f"run these steps only; of: {', '.join(names)}"
    )
    parser.add_argument("--resume", action="store_true", help="skip finished steps and measured cases")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="time for all; what does not fit is skipped")
    parser.add_argument("--cache", type=Path, metavar="FILE", help="Triton's cache, as `make gpu-prepare` made it")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="keep an archive of the results, a .tgz")
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
    if options.cache is not None and not CACHE.exists():
        with tarfile.open(options.cache) as tar:
            tar.extractall(CACHE.parent, filter="data")
    summary = out / "summary.json"
    outcomes: dict[str, dict] = {}
    if summary.exists() and (options.only or options.resume):
        outcomes = {outcome["step"]: outcome for outcome in json.loads(summary.read_text())}
    todo = [step for step in steps(out, bool(obstacle)) if step.name in (options.only or names)]
    if options.resume:
        todo = [step for step in todo if not step.is_done(outcomes.get(step.name))]
    budget = None if options.budget is None else options.budget - (time.monotonic() - started)
    with archived(out, options.archive):
        left = run_all(todo, out, outcomes, budget)
    for outcome in sorted(outcomes.values(), key=lambda outcome: names.index(outcome["step"])):
        print("{step:<12} {seconds:>6} s  {ended}: {last_line}".format(**outcome))
    if left:
        print(f"no time for: {', '.join(left)}; the same command with --resume goes on")
    return int(outcomes.get("smoke", {}).get("ended", "passed").startswith("failed"))


if __name__ == "__main__":
    sys.exit(main())
