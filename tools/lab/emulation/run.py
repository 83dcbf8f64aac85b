"""Run the compiled Triton and CUDA kernels in an emulator on the CPU and compare them with the reference.

    python -m lab.emulation [--arch 80 90] [--only PATTERN] [--order lockstep reverse] [--random 30] [--json FILE]
                            [--continue FILE]
    python -m lab.emulation --mutants [--all]

Each case of cases.py is a call of a public function. Triton compiles its kernels as for a GPU, or
nvcc where it is installed. The PTX of the kernels runs in tools/lab/ptx_emulator, and every result must pass the gate.
Warps run in each given order. The results of all orders must agree bit for bit, except atomic sums. A
finding of the emulator fails the case, as a wrong result does.

With ``--continue FILE``, cases that passed before are skipped. FILE records passed cases and is valid while kernels,
reference, cases, emulator and versions are unchanged. All cases take hours.

With ``--mutants``, faults are planted in the kernels one at a time, and the share of detected faults is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from lab.ptx_emulator import Report, judge
from tests.fuzz import fuzz_gate
from tests.support.cuda_sources import nvcc
from transformer_fast.cli import verification
from transformer_fast.testing import gate

from .cases import MUTATED, EmulationCase, cases
from .emulated_backend import all_kernels as triton_kernels
from .emulated_backend import emulated_backend, launched_kernels
from .emulated_cuda import all_kernels as cuda_kernels
from .emulated_cuda import emulated_cuda
from .mutant_runs import mutant_summary, run_mutants, seen_share
from .record import PassedBefore

ORDERS = ("lockstep", "reverse")


@dataclasses.dataclass
class Outcome:
    """Outcome of a case on one architecture.

    Args:
        seconds: total time, compilation included.
        launches, instructions: number of kernel launches, and of warp instructions.
        findings: findings of the emulator, as text.
        error: any other error, or None.
        worst: largest error, as a share of the allowed error.
        results: number of tensors that the gate checked.
        kernels: launched kernels.
    """

    name: str
    arch: int
    seconds: float = 0.0
    launches: int = 0
    instructions: int = 0
    findings: list[str] = dataclasses.field(default_factory=list)
    error: str | None = None
    worst: float = 0.0
    results: int = 0
    kernels: list[str] = dataclasses.field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.error is None and not self.findings


class Gate:
    """Replacement of ``testing.gate.errors`` that records the largest share of the tolerance, and the bits of the
    results."""

    def __init__(self, errors: Callable[..., tuple[float, float, float]]) -> None:
        self.errors, self.worst = errors, 0.0
        self.bits: list[bytes] = []

    def __call__(self, actual: Tensor, *others: Any) -> tuple[float, float, float]:
        error, allowed, eager = self.errors(actual, *others)
        if allowed > 0.0:
            self.worst = max(self.worst, error / allowed)
        self.bits.append(actual.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return error, allowed, eager


@contextmanager
def watched_gate() -> Iterator[Gate]:
    """Record the gate's checks inside the block. Checks do not repeat their call, because the next order of warps
    does."""
    recorder = Gate(gate.errors)
    with (
        mock.patch.object(gate, "errors", recorder),
        mock.patch.object(verification, "errors", recorder),
        mock.patch.object(fuzz_gate, "errors", recorder),
        mock.patch.object(fuzz_gate, "RUN_AGAIN", 2**62),
    ):
        yield recorder


def run_case(name: str, arch: int, orders: Iterable[str] = ORDERS, seed: int = 0, random_calls: int = 0) -> Outcome:
    """Run a case once per order of warps; errors are recorded, not raised."""
    case, outcome, started = cases(seed, random_calls)[name], Outcome(name, arch), time.perf_counter()
    bits: list[bytes] | None = None
    problems = []
    for order in orders:
        torch.manual_seed(seed)
        with watched_gate() as watched, emulated(case, arch, order) as (check, report, kernels):
            try:
                check()
            except Exception as error:
                problems.append(f"{order}: {type(error).__name__}: {error}")
            else:
                if case.same_bits and bits is not None and watched.bits != bits:
                    problems.append(f"{order}: other bits than in the first order of warps")
                bits = watched.bits
        if report.launches == 0 and not case.may_be_empty:
            problems.append(f"{order}: no kernel was launched")
        outcome.worst, outcome.results = max(outcome.worst, watched.worst), max(outcome.results, len(watched.bits))
        outcome.kernels = sorted({*outcome.kernels, *kernels})
        outcome.launches += report.launches
        outcome.instructions += sum(report.instructions.values())
        outcome.findings += [f"{order}: {finding}" for finding in report.findings]
    outcome.error = "\n".join(problems) or None
    outcome.seconds = time.perf_counter() - started
    return outcome


@contextmanager
def emulated(case: EmulationCase, arch: int, order: str) -> Iterator[tuple[Callable[[], None], Report, set[str]]]:
    """Return the check of a case, with the report and the set of kernels that it will fill."""
    if case.cuda:
        with emulated_cuda(arch, order=order) as (operators, report, kernels):
            yield functools.partial(case.check, operators), report, kernels
    else:
        with emulated_backend(arch, order=order) as report, launched_kernels() as kernels:
            yield case.check, report, kernels


def start_worker() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process with its parent: workers of a killed parent would otherwise wait forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Pool of single-threaded processes."""
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as executor,
    ):
        try:
            yield executor
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def run_cases(jobs: list[tuple[str, int]], arguments: argparse.Namespace) -> list[Outcome]:
    """Run cases in processes, and print failures. Outcomes of earlier runs come first."""
    outcomes, record = [], None
    if arguments.passed_before is not None:
        record = PassedBefore(arguments.passed_before, {"seed": arguments.seed, "orders": arguments.order})
        before = {(outcome.name, outcome.arch): outcome for outcome in (Outcome(**kept) for kept in record)}
        outcomes = [before[job] for job in jobs if job in before]
        jobs = [job for job in jobs if job not in before]
        print(f"{len(outcomes)} cases have passed before ({record.path}), {len(jobs)} are to be run", flush=True)
    with pool(arguments.workers) as executor:
        futures: dict[Future[Outcome], tuple[str, int]] = {
            executor.submit(run_case, name, arch, arguments.order, arguments.seed, arguments.random): (name, arch)
            for name, arch in jobs
        }
        bar = tqdm(as_completed(futures), total=len(futures), unit="case", mininterval=1.0)
        for future in bar:
            try:
                outcome = future.result()
            except Exception as error:  # the process ended
                outcome = Outcome(*futures[future], error=f"{type(error).__name__}: {error}")
            outcomes.append(outcome)
            if not outcome.passed:
                tqdm.write(described(outcome))
            elif record is not None:
                record.add(dataclasses.asdict(outcome))
            bar.set_postfix(wrong=sum(not o.passed for o in outcomes), refresh=False)
    return outcomes


def described(outcome: Outcome) -> str:
    lines = [f"sm_{outcome.arch} {outcome.name}", *([outcome.error] if outcome.error else []), *outcome.findings]
    again = f"python -m lab.emulation --arch {outcome.arch} --only {outcome.name!r}"
    if outcome.name.startswith("random "):
        _, seed, number = outcome.name.split()
        again += f" --seed {seed} --random {int(number) + 1}"
    return "\n  ".join([*lines, f"again: {again}"])


def all_kernels() -> set[str]:
    """The Triton kernels, and the kernels of csrc/cuda if nvcc is installed."""
    return {*triton_kernels(), *(cuda_kernels() if nvcc() else ())}


def never_launched(outcomes: list[Outcome]) -> set[str]:
    """Kernels of the package that no case launched."""
    return all_kernels() - {name for outcome in outcomes for name in outcome.kernels}


def summary(outcomes: list[Outcome], seconds: float) -> str:
    worst = max(outcomes, key=lambda o: o.worst, default=None)
    lines = [
        f"{len(outcomes)} cases, {sum(o.results for o in outcomes)} results, {sum(o.launches for o in outcomes)} "
        f"launches, {sum(o.instructions for o in outcomes) / 1e6:.1f} million warp instructions, "
        f"{seconds / 60:.1f} minutes",
    ]
    for arch in sorted({o.arch for o in outcomes}):
        own = [o for o in outcomes if o.arch == arch]
        findings = sum(len(o.findings) for o in own)
        lines.append(f"sm_{arch}: {len(own)} cases, {findings} findings, {sum(not o.passed for o in own)} failed")
        lines.append(f"       {len(all_kernels() - never_launched(own))} of {len(all_kernels())} kernels")
    if worst is not None:
        lines.append(f"largest error: {worst.worst:.2f} of what the gate allows (sm_{worst.arch} {worst.name})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.emulation", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=(80, 90), help="compute capabilities")
    parser.add_argument(
        "--only", metavar="PATTERN", default="*", help="run the cases whose name matches this shell pattern"
    )
    parser.add_argument(
        "--order", nargs="+", default=list(ORDERS), choices=judge.ORDERS, help="orders in which warps run"
    )
    parser.add_argument(
        "--random", type=int, default=20, help="number of random attention calls (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random calls, and of the sample of mutants")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument(
        "--mutants", action="store_true", help="run faulty kernels instead, and report which faults are found"
    )
    parser.add_argument("--all", action="store_true", help="run every mutant, not a sample")
    parser.add_argument(
        "--least", type=float, default=0.8, help="smallest share of mutants to find (default: %(default)s)"
    )
    parser.add_argument(
        "--continue",
        type=Path,
        metavar="FILE",
        dest="passed_before",
        help="record of passed cases: they are skipped, and new ones are added",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the outcomes to a file")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: nothing would be compiled")
    start = time.monotonic()
    found = [name for name in cases(arguments.seed, arguments.random) if fnmatch.fnmatchcase(name, arguments.only)]
    if arguments.mutants:
        found = [name for name in found if name in MUTATED]
    if not found:
        parser.error(f"no case is called {arguments.only!r}")
    if arguments.mutants:
        with pool(arguments.workers) as executor:
            of_archs = run_mutants(executor, found, arguments.arch, None if arguments.all else arguments.seed)
        print(mutant_summary(of_archs, time.monotonic() - start))
        written: list[dict[str, Any]] = [
            {"arch": arch, **dataclasses.asdict(v)} for arch, outcome in of_archs.items() for v in outcome.verdicts
        ]
        failed = any(seen_share(outcome.verdicts) < arguments.least for outcome in of_archs.values())
    else:
        outcomes = run_cases([(name, arch) for arch in arguments.arch for name in found], arguments)
        print(summary(outcomes, time.monotonic() - start))
        written = [dataclasses.asdict(o) for o in outcomes]
        failed = not all(o.passed for o in outcomes)
        for arch in arguments.arch if arguments.only == "*" else ():
            if missing := never_launched([o for o in outcomes if o.arch == arch]):
                print(f"no case on sm_{arch} launched {', '.join(sorted(missing))}")
                failed = True
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(failed)
