"""The faulty kernels of ``make emulate``: recorded, made faulty and judged in processes."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from operator import attrgetter

from emulated_backend import emulated_backend
from emulation_cases import cases
from ptx_emulator import mutants
from tqdm import tqdm

# Mutants of each kind, unless all are asked for; and how many a worker is given at once.
MUTANTS_OF_A_KIND = 40
AT_ONCE = 8


def record_case(name: str, arch: int) -> list[tuple[bytes, list[int]]]:
    """The launches of a case, pickled, each with the numbers of those of its mutants that it executes."""
    with emulated_backend(arch), mutants.recorded() as launches:
        cases()[name].check()
    found = []
    for launch in {launch.ptx: launch for launch in launches}.values():
        executed = set(mutants.Judge(launch).executed_mutants())
        numbers = [number for number, mutant in enumerate(mutants.mutants(launch)) if mutant in executed]
        found.append((pickle.dumps(launch), numbers))
    return found


def judge_mutants(launch: bytes, numbers: list[int]) -> list[mutants.Verdict]:
    """Run some mutants of a recorded launch."""
    judge = mutants.Judge(pickle.loads(launch))
    every = mutants.mutants(judge.launch)
    return [judge.verdict(every[number]) for number in numbers]


def run_mutants(
    executor: ProcessPoolExecutor, names: list[str], archs: list[int], seed: int | None
) -> list[tuple[int, mutants.Verdict]]:
    """Record the launches of cases, and run a sample of their mutants, or all without a seed: (architecture, verdict)
    of each."""
    verdicts = []
    futures = {executor.submit(record_case, name, arch): (name, arch) for arch in archs for name in names}
    launches: dict[tuple[str, int], list[tuple[bytes, list[int]]]] = {}
    for future in tqdm(as_completed(futures), total=len(futures), unit="case", desc="recording"):
        launches[futures[future]] = future.result()
    judged = {}
    for arch in archs:
        recorded = [launch for name in names for launch in launches[name, arch]]
        for launch, numbers in sampled(recorded, seed):
            for first in range(0, len(numbers), AT_ONCE):
                some = numbers[first : first + AT_ONCE]
                judged[executor.submit(judge_mutants, launch, some)] = arch, len(some)
    with tqdm(total=sum(count for _, count in judged.values()), unit="mutant", mininterval=1.0) as bar:
        for future in as_completed(judged):
            arch, count = judged[future]
            verdicts += [(arch, verdict) for verdict in future.result()]
            bar.update(count)
            bar.set_postfix(seen=sum(v.seen for _, v in verdicts), refresh=False)
    return verdicts


def sampled(recorded: list[tuple[bytes, list[int]]], seed: int | None) -> list[tuple[bytes, list[int]]]:
    """As many mutants of each kind as the sample takes, by launch; all of them without a seed."""
    if seed is None:
        return recorded
    by_kind: dict[str, list[tuple[int, int]]] = {kind: [] for kind in mutants.KINDS}
    for place, (launch, numbers) in enumerate(recorded):
        every = mutants.mutants(pickle.loads(launch))
        for number in numbers:
            by_kind[every[number].kind].append((place, number))
    chance = random.Random(seed)
    chosen = [pick for own in by_kind.values() for pick in chance.sample(own, min(len(own), MUTANTS_OF_A_KIND))]
    return [(launch, sorted(n for p, n in chosen if p == place)) for place, (launch, _) in enumerate(recorded)]


def seen_share(verdicts: list[mutants.Verdict]) -> float:
    """Of those that were neither shown to change nothing nor noted."""
    rest = [v for v in verdicts if not v.changes_nothing and not v.noted]
    return sum(v.seen for v in rest) / max(len(rest), 1)


def mutant_summary(verdicts: list[tuple[int, mutants.Verdict]], seconds: float) -> str:
    """The share seen by kind, and each that was missed, with what can be said of it."""
    lines = []
    for arch in sorted({arch for arch, _ in verdicts}):
        own = [v for a, v in verdicts if a == arch]
        lines.append(
            f"sm_{arch}: {'kind':24} {'mutants':>8} {'seen':>6} {'of all':>7} {'no effect':>10} {'noted':>6} "
            f"{'of the rest':>12}"
        )
        for kind in (*mutants.KINDS, "all"):
            some = [v for v in own if kind in (v.kind, "all")]
            if some:
                seen, idle, noted = (sum(map(attrgetter(name), some)) for name in ("seen", "changes_nothing", "noted"))
                shares = f"{seen / len(some):7.0%} {idle:10} {noted:6} {seen_share(some):12.0%}"
                lines.append(f"       {kind:24} {len(some):8} {seen:6} {shares}")
    missed = Counter((a, v.kind, v.how, v.kernel, v.line, v.instruction) for a, v in verdicts if not v.seen)
    lines += [
        f"missed: sm_{arch} {kernel} line {line}, {kind}: {instruction}\n    {how}"
        for arch, kind, how, kernel, line, instruction in sorted(missed)
    ]
    found = sum(v.seen for _, v in verdicts)
    return "\n".join([*lines, f"{found} of {len(verdicts)} mutants seen, {seconds / 60:.1f} minutes"])
