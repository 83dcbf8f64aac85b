"""Profile of a decoding step, compared with the bytes of weights that it must read and the products it must compute.

    python benchmarks/profile_generation.py --size base --batch 16 --search greedy beam --out results

For every case and side of bench_generation.py: the time of a whole call, of its encoder with the first step, and of a
later step (the remaining time over the number of later steps). The lower bound of each time is the greater of two
quotients: the bytes of weights, keys and values over the measured read bandwidth, and the operations over the measured
rate of a big matrix product, in fp32 (PyTorch's) or int8 (of transformer_fast). All are measured in this run. Attention
is in fp32 on every side.

Sides that run in PyTorch also get the share of each kind of op, from a run under the profiler, which overstates the
share of Python.

The report is printed as Markdown. With --out, profile_generation.md and profile_generation.json are written there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import records
import torch
from bench_generation import BEAM, SIZES, VOCAB, Case, close, make_side, sources, ways

from transformer_fast.inference.prepacked import PrepackedLinear
from transformer_fast.ops import linear
from transformer_fast.ops.weight_layout import WeightLayout

KINDS = {
    "layers in one call": ("DecoderSession",),
    "products": ("linear", "addmm", "aten::mm", "matmul", "aten::mv", "addmv", "aten::bmm"),
    "weights rearranged": ("pack_weight", "_reorder_linear_weight"),
    "attention": ("attention",),
    "choice of tokens": (
        *("choose_tokens", "logsumexp", "softmax", "topk", "aten::max", "amax"),
        *("exp_", "sort", "argmax", "aten::sub"),
    ),
    "rows moved": ("copy_", "index", "cat", "gather", "scatter", "clone"),
    "norms": ("norm",),
}
"""A kind of work and what names of ops have in them; the first that fits counts, so rearranging is asked first. Layers
in one call are products, attention and norms of all layers together (generation/session.py)."""
SIDES = ("ours", "ours int8", "Marian", "CTranslate2", "CTranslate2 int8")


@dataclass(frozen=True)
class Limits:
    """Limits of this machine: bytes per second of reading, operations per second of products in fp32 and int8."""

    bandwidth: float
    fp32: float
    int8: float


@dataclass(frozen=True)
class Work:
    """Work that a step must do at least."""

    weights: int
    cache_bytes: int
    products: int
    attention: int

    def seconds(self, limits: Limits, int8: bool) -> tuple[float, float]:
        """Seconds of reading, and of computing."""
        read = self.weights * (1 if int8 else 4) + self.cache_bytes
        doing = self.products / (limits.int8 if int8 else limits.fp32) + self.attention / limits.fp32
        return read / limits.bandwidth, doing


def least(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of some calls."""
    call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def measured_limits(rounds: int = 5) -> Limits:
    """The rates are those of a 1024 x 2048 x 2048 product."""
    # As much as the weights of a base model's decoder in fp32: they may lie in a cache that several cores share.
    far = torch.randn(28 * 2**20)
    x, layer = torch.randn(1024, 2048), torch.nn.Linear(2048, 2048).requires_grad_(False)
    int8 = PrepackedLinear([layer], len(x), WeightLayout("int8"))
    operations = 2 * 1024 * 2048 * 2048
    return Limits(
        far.numel() * 4 / least(far.sum, rounds),
        operations / least(lambda: linear(x, layer.weight, layer.bias), rounds),
        operations / least(lambda: int8(x), rounds),
    )


def step_work(case: Case) -> Work:
    """Work of a step in the middle of the answer: half of the answer is in the cache."""
    size, rows = SIZES[case.size], case.batch * (1 if case.search == "greedy" else BEAM)
    d = size.d_model
    weights = size.layers * (6 * d * d + 2 * d * size.d_ff) + VOCAB * d
    own, source = rows * case.length // 2, case.batch * case.length
    attention = size.layers * 4 * d * rows * (case.length // 2 + case.length)
    return Work(weights, 4 * size.layers * 2 * d * (own + source), 2 * rows * weights, attention)


def first_work(case: Case) -> Work:
    """Work of the encoder, of the keys and values of the source, and of one step without a cache."""
    size, tokens = SIZES[case.size], case.batch * case.length
    d, step = size.d_model, step_work(case)
    weights = size.layers * (6 * d * d + 2 * d * size.d_ff)
    attention = size.layers * 4 * d * tokens * case.length
    return Work(
        weights + step.weights, step.cache_bytes, 2 * tokens * weights + step.products, attention + step.attention
    )


def shares(call: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of each kind of op in one call; the rest is spent between the ops."""
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


def profile(case: Case, names: list[str], rounds: int, limits: Limits) -> dict[str, Any]:
    """Profile one case: times per side, their lower bounds, and the shares."""
    sides, src = ways(case, "cpu", uncached=False), sources(case, "cpu")
    once = ways(case._replace(length=1), "cpu", uncached=False)  # one step: the encoder, and what is done once
    found: dict[str, Any] = {"case": case._asdict(), "sides": {}}
    for name in names:
        int8 = "int8" in name
        whole = least(lambda: sides[name](src), rounds)  # noqa: B023
        first = least(lambda: once[name](src), rounds)  # noqa: B023
        found["sides"][name] = {
            "whole": whole,
            "first": first,
            "step": (whole - first) / (case.length - 1),
            "first_reads_and_does": first_work(case).seconds(limits, int8),
            "step_reads_and_does": step_work(case).seconds(limits, int8),
        }
    close(sides)
    close(once)
    for name, side in found["sides"].items():
        side["shares"] = None
        if not name.startswith("CTranslate2"):
            here = make_side(name, case, "cpu")
            here(src)
            side["shares"] = shares(lambda: here(src))  # noqa: B023
    return found


def table(found: list[dict[str, Any]], limits: Limits) -> str:
    """Markdown: the times against the least, and the shares."""
    lines = ["| case | side | whole | first | least / first | a step | it reads | it does | least / step |"]
    lines.append("| --- |" + " --- |" * 8)
    for one in found:
        for name, side in one["sides"].items():
            reads, does = side["step_reads_and_does"]
            times = f"{side['whole'] * 1e3:.0f} ms | {side['first'] * 1e3:.0f} ms"
            of_first = f"{max(side['first_reads_and_does']) / side['first']:.0%}"
            step = f"{side['step'] * 1e3:.2f} ms | {reads * 1e3:.2f} ms | {does * 1e3:.2f} ms"
            of_step = f"{max(reads, does) / side['step']:.0%}"
            lines.append(f"| {title(one)} | {name} | {times} | {of_first} | {step} | {of_step} |")
    kinds = [*KINDS, "other ops", "Python and the rest"]
    lines += ["", f"| case | side | {' | '.join(kinds)} |", "| --- | --- |" + " --- |" * len(kinds)]
    for one in found:
        for name, side in one["sides"].items():
            if side["shares"] is not None:
                total = sum(side["shares"].values())
                parts = " | ".join(f"{side['shares'][kind] / total:.0%}" for kind in kinds)
                lines.append(f"| {title(one)} | {name} | {parts} |")
    rates = f"{limits.fp32 / 1e9:.0f} G operations in fp32, {limits.int8 / 1e9:.0f} G in int8"
    lines += ["", f"A second at most: {limits.bandwidth / 1e9:.0f} GB read, {rates}."]
    lines += ["First: the encoder, the keys and values of the source, and one step."]
    return "\n".join(lines)


def result(case: dict[str, Any], name: str, side: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a side that are recorded."""
    times = {f"{part}_seconds": side[part] for part in ("whole", "first", "step")}
    least = {f"least_of_{part}": max(side[f"{part}_reads_and_does"]) / side[part] for part in ("first", "step")}
    return {**case, "side": name, **times, **least}


def title(one: dict[str, Any]) -> str:
    case = one["case"]
    return f"{case['size']} {case['search']} B {case['batch']} L {case['length']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base", help="size of the model (default: base)")
    parser.add_argument("--length", type=int, default=64, help="tokens per answer (default: 64)")
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="sentences per batch (default: 16)")
    parser.add_argument(
        "--search",
        nargs="+",
        choices=("greedy", "beam"),
        default=["greedy", "beam"],
        help="searches to profile (default: both)",
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="sides to profile (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs per side (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="folder for the profile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = measured_limits()
    cases = [Case(args.size, search, batch, args.length) for search in args.search for batch in args.batch]
    found = [profile(case, args.sides, args.rounds, limits) for case in cases]
    head = f"{args.threads} threads, torch {torch.__version__}; fastest of {args.rounds}\n\n"
    text = head + table(found, limits)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "profile_generation.md").write_text(text + "\n", encoding="utf-8")
        results = [result(one["case"], name, side) for one in found for name, side in one["sides"].items()]
        run = {"what": "profile of a step", "limits": asdict(limits), "page": text, "results": results}
        records.save(args.out / "profile_generation.json", run)


if __name__ == "__main__":
    main()
