"""Where a decoding step's time goes, against the bytes of weights that it must read and the products it must do.

    python benchmarks/profile_generation.py --size base --batch 16 --search greedy beam --out results

For every case of bench_generation.py: the time of a whole call and of its encoder with the first step, the time of a
step (the rest over the steps), the least a step can take on this machine in fp32, and the share of each kind of op, for
ours and for Hugging Face's Marian. The least is the greater of two: the bytes of weights, keys and values over the
measured bandwidth of a read, and the operations over the measured rate of a big matrix product, both from this run.
The shares are of a run under the profiler, which makes Python's larger than it is.

Printed as Markdown, and written to OUT/profile_generation.{md,json} where it is given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_generation import BEAM, SIZES, VOCAB, Case, sources, ways

from transformer_fast.ops import linear

KINDS = {
    "layers in one call": ("decoder_step",),
    "products": ("linear", "addmm", "aten::mm", "matmul", "aten::mv", "addmv", "aten::bmm"),
    "weights rearranged": ("pack_step_weight", "_reorder_linear_weight"),
    "attention": ("attention",),
    "choice of tokens": (
        *("best_tokens", "log_normalizer", "logsumexp", "softmax", "topk", "aten::max", "amax", "exp_", "sort"),
        *("argmax", "aten::sub"),
    ),
    "rows moved": ("copy_", "index", "cat", "gather", "scatter", "clone"),
    "norms": ("norm",),
}
"""A kind of work and what names of ops have in them; the first that fits counts, so rearranging is asked first. Layers
in one call are products, attention and norms of all layers together (generation/fused.py)."""


@dataclass
class Floor:
    """What a step must do at least, and the seconds that takes on this machine."""

    weight_bytes: int
    cache_bytes: int
    operations: int
    bandwidth: float
    rate: float

    @property
    def seconds(self) -> float:
        return max((self.weight_bytes + self.cache_bytes) / self.bandwidth, self.operations / self.rate)


def least(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of some calls; on one thread those of the process, which wait for nobody."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times = []
    for _ in range(rounds):
        started = clock()
        call()
        times.append(clock() - started)
    return min(times)


def ceilings(rounds: int = 5) -> tuple[float, float]:
    """Bytes a second of reading, operations a second of a 1024 x 2048 x 2048 product, both fp32 on the CPU."""
    far = torch.randn(64 * 2**20)
    x, weight = torch.randn(1024, 2048), torch.randn(2048, 2048)
    bandwidth = far.numel() * 4 / least(far.sum, rounds)
    return bandwidth, 2 * 1024 * 2048 * 2048 / least(lambda: linear(x, weight), rounds)


def floor(case: Case, bandwidth: float, rate: float) -> Floor:
    """Of a step in the middle of the answer: half of its length is in the cache."""
    size, rows = SIZES[case.size], case.batch * (1 if case.search == "greedy" else BEAM)
    d = size.d_model
    weights = size.layers * (6 * d * d + 2 * d * size.d_ff) + VOCAB * d
    own, source = rows * case.length // 2, case.batch * case.length
    cache = size.layers * 2 * d * (own + source)
    attention = size.layers * 4 * d * rows * (case.length // 2 + case.length)
    return Floor(4 * weights, 4 * cache, 2 * rows * weights + attention, bandwidth, rate)


def shares(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each kind of op in one call; the rest is what runs between the ops."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        call()
        whole = time.perf_counter() - started
    seconds = dict.fromkeys([*KINDS, "other ops"], 0.0)
    order = ["weights rearranged", *(kind for kind in KINDS if kind != "weights rearranged")]
    for event in profiler.key_averages():
        kind = next((k for k in order if any(part in event.key for part in KINDS[k])), "other ops")
        seconds[kind] += event.self_cpu_time_total / 1e6
    seconds["Python and the rest"] = max(0.0, whole - sum(seconds.values()))
    return seconds


def profile(case: Case, names: list[str], rounds: int, limits: tuple[float, float]) -> dict[str, Any]:
    """One case: the floor, and for each side the times and shares."""
    sides, src = ways(case, "cpu", uncached=False), sources(case, "cpu")
    once = ways(case._replace(length=1), "cpu", uncached=False)  # one step: the encoder, and what is done once
    found: dict[str, Any] = {"case": case._asdict(), "floor": asdict(floor(case, *limits)), "sides": {}}
    found["floor"]["seconds"] = floor(case, *limits).seconds
    for name in names:
        whole = least(lambda: sides[name](src), rounds)  # noqa: B023
        first = least(lambda: once[name](src), rounds)  # noqa: B023
        found["sides"][name] = {
            "whole": whole,
            "first": first,
            "step": (whole - first) / (case.length - 1),
            "shares": shares(lambda: sides[name](src)),  # noqa: B023
        }
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: the step against its floor, and the shares."""
    lines = ["| case | side | whole | encoder and first step | a step | its floor | floor / step |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for one in found:
        lowest = one["floor"]["seconds"]
        for name, side in one["sides"].items():
            times = f"{side['whole'] * 1e3:.0f} ms | {side['first'] * 1e3:.0f} ms | {side['step'] * 1e3:.2f} ms"
            lines.append(f"| {title(one)} | {name} | {times} | {lowest * 1e3:.2f} ms | {lowest / side['step']:.0%} |")
    kinds = [*KINDS, "other ops", "Python and the rest"]
    lines += ["", f"| case | side | {' | '.join(kinds)} |", "| --- | --- |" + " --- |" * len(kinds)]
    for one in found:
        for name, side in one["sides"].items():
            total = sum(side["shares"].values())
            parts = " | ".join(f"{side['shares'][kind] / total:.0%}" for kind in kinds)
            lines.append(f"| {title(one)} | {name} | {parts} |")
    lines.append("")
    for one in found:
        f = one["floor"]
        read = f"{f['weight_bytes'] / 1e6:.0f} MB of weights and {f['cache_bytes'] / 1e6:.0f} MB of keys and values"
        reading = (f["weight_bytes"] + f["cache_bytes"]) / f["bandwidth"] * 1e3
        doing = f["operations"] / f["rate"] * 1e3
        lines.append(
            f"- {title(one)}: a step reads {read}, {reading:.2f} ms at {f['bandwidth'] / 1e9:.0f} GB/s, "
            f"and does {f['operations'] / 1e9:.2f} G operations, {doing:.2f} ms at {f['rate'] / 1e9:.0f} GFLOP/s."
        )
    return "\n".join(lines)


def title(one: dict[str, Any]) -> str:
    case = one["case"]
    return f"{case['size']} {case['search']} B {case['batch']} L {case['length']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[16])
    parser.add_argument("--search", nargs="+", choices=("greedy", "beam"), default=["greedy", "beam"])
    parser.add_argument("--sides", nargs="+", choices=("ours", "Marian"), default=["ours", "Marian"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = ceilings()
    cases = [Case(args.size, search, batch, args.length) for search in args.search for batch in args.batch]
    found = [profile(case, args.sides, args.rounds, limits) for case in cases]
    head = f"fp32, {args.threads} threads, torch {torch.__version__}; fastest of {args.rounds}\n\n"
    print(head + table(found))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "profile_generation.md").write_text(head + table(found) + "\n", encoding="utf-8")
        (args.out / "profile_generation.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
