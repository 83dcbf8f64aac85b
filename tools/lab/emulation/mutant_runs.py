"""The faulty kernels of ``nox -s lab``: recorded, made faulty and judged in processes."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from tqdm import tqdm

from lab.ptx_emulator import judge, mutants

from .cases import cases
from .emulated_backend import emulated_backend

# Number of mutants per kind in a sample; and number of mutants per job of a worker.
MUTANTS_OF_A_KIND = 40
AT_ONCE = 8
NOT_EXECUTED = "not executed"


@dataclass
class Recorded:
    """A launch of a case, and those of its mutants that change its result.

    Args:
        launch: a RecordedLaunch, pickled.
        mutants: their numbers among ``mutants.mutants(launch)``.
        left_out: number of mutants without an effect, by (kind, reason).
    """

    launch: bytes
    mutants: list[int]
    left_out: Counter[tuple[str, str]]


def record_case(name: str, arch: int) -> list[Recorded]:
    """Record the launches of a case, one per kernel."""
    with emulated_backend(arch), mutants.recorded() as launches:
        cases()[name].check()
    return [recorded(launch) for launch in {launch.ptx: launch for launch in launches}.values()]


def recorded(launch: mutants.RecordedLaunch) -> Recorded:
    own = judge.Judge(launch)
    executed, idle = set(own.executed_mutants()), own.idle_mutants()
    numbers, left_out = [], Counter[tuple[str, str]]()
    for number, mutant in enumerate(mutants.mutants(launch)):
        if mutant in idle:
            left_out[mutant.kind, idle[mutant]] += 1
        elif mutant in executed:
            numbers.append(number)
        else:
            left_out[mutant.kind, NOT_EXECUTED] += 1
    return Recorded(pickle.dumps(launch), numbers, left_out)


def judge_mutants(launch: bytes, numbers: list[int]) -> list[judge.Verdict]:
    """Run some mutants of a recorded launch."""
    own = judge.Judge(pickle.loads(launch))
    every = mutants.mutants(own.launch)
    return [own.verdict(every[number]) for number in numbers]


@dataclass
class Outcome:
    """Outcome of the mutants on one architecture.

    Args:
        made: number of mutants of all launches, by kind.
        left_out: number of mutants without an effect, by (kind, reason).
        verdicts: verdicts on the mutants that were run.
    """

    made: Counter[str]
    left_out: Counter[tuple[str, str]]
    verdicts: list[judge.Verdict]


def run_mutants(
    executor: ProcessPoolExecutor, names: list[str], archs: list[int], seed: int | None
) -> dict[int, Outcome]:
    """Record the launches of cases, and run a sample of their mutants, or all without a seed; by architecture."""
    futures = {executor.submit(record_case, name, arch): (name, arch) for arch in archs for name in names}
    launches: dict[tuple[str, int], list[Recorded]] = {}
    for future in tqdm(as_completed(futures), total=len(futures), unit="case", desc="recording"):
        launches[futures[future]] = future.result()
    outcomes, judged = {}, {}
    for arch in archs:
        of_arch = [launch for name in names for launch in launches[name, arch]]
        outcomes[arch] = outcome = Outcome(Counter(), Counter(), [])
        for launch, numbers in zip(of_arch, sampled(of_arch, seed), strict=True):
            outcome.made.update(mutant.kind for mutant in mutants.mutants(pickle.loads(launch.launch)))
            outcome.left_out.update(launch.left_out)
            for first in range(0, len(numbers), AT_ONCE):
                some = numbers[first : first + AT_ONCE]
                judged[executor.submit(judge_mutants, launch.launch, some)] = arch, len(some)
    with tqdm(total=sum(count for _, count in judged.values()), unit="mutant", mininterval=1.0) as bar:
        for future in as_completed(judged):
            arch, count = judged[future]
            outcomes[arch].verdicts += future.result()
            bar.update(count)
            bar.set_postfix(seen=sum(v.seen for o in outcomes.values() for v in o.verdicts), refresh=False)
    return outcomes


def sampled(launches: list[Recorded], seed: int | None) -> list[list[int]]:
    """Numbers of the sampled mutants per launch: a fixed count per kind; all mutants without a seed."""
    if seed is None:
        return [launch.mutants for launch in launches]
    by_kind: dict[str, list[tuple[int, int]]] = {kind: [] for kind in mutants.KINDS}
    for place, launch in enumerate(launches):
        every = mutants.mutants(pickle.loads(launch.launch))
        for number in launch.mutants:
            by_kind[every[number].kind].append((place, number))
    chance = random.Random(seed)
    chosen = [pick for own in by_kind.values() for pick in chance.sample(own, min(len(own), MUTANTS_OF_A_KIND))]
    return [sorted(number for p, number in chosen if p == place) for place in range(len(launches))]


def seen_share(verdicts: list[judge.Verdict]) -> float:
    return sum(verdict.seen for verdict in verdicts) / max(len(verdicts), 1)


def mutant_summary(outcomes: dict[int, Outcome], seconds: float) -> str:
    """Summary by kind: mutants run and seen, those left out and why, and each one that was missed."""
    lines = []
    for arch, outcome in outcomes.items():
        lines.append(
            f"sm_{arch}: {'kind':24} {'made':>6} {'executed':>9} {'of effect':>10} {'run':>5} {'seen':>5} {'share':>6} "
            f"{'noted':>6}"
        )
        for kind in (*mutants.KINDS, "all"):
            made = outcome.made.total() if kind == "all" else outcome.made[kind]
            some = [v for v in outcome.verdicts if kind in (v.kind, "all")]
            if made:
                left_out = {key: n for key, n in outcome.left_out.items() if kind in (key[0], "all")}
                executed = made - sum(n for (_, reason), n in left_out.items() if reason == NOT_EXECUTED)
                lines.append(
                    f"       {kind:24} {made:6} {executed:9} {made - sum(left_out.values()):10} {len(some):5} "
                    f"{sum(v.seen for v in some):5} {seen_share(some):6.0%} {sum(v.noted for v in some):6}"
                )
        lines += [
            f"no effect: sm_{arch} {count} x {kind}: {reason}"
            for (kind, reason), count in sorted(outcome.left_out.items())
            if reason != NOT_EXECUTED
        ]
    verdicts = [(arch, verdict) for arch, outcome in outcomes.items() for verdict in outcome.verdicts]
    missed = Counter((arch, v.kind, v.how, v.kernel, v.line, v.instruction) for arch, v in verdicts if not v.seen)
    lines += [
        f"missed: sm_{arch} {kernel} line {line}, {kind}: {instruction}\n    {how}"
        for arch, kind, how, kernel, line, instruction in sorted(missed)
    ]
    found = sum(verdict.seen for _, verdict in verdicts)
    return "\n".join([*lines, f"{found} of {len(verdicts)} mutants seen, {seconds / 60:.1f} minutes"])
