"""Profile of a training step by kind of op, beside the reference, and the speed that could still be gained.

    python benchmarks/profile_step.py --shape base-b16-l64 --out benchmarks/results/cpu-model

The steps are those of bench_model.py: forward, label-smoothed loss and backward, with dropout; 3 / 8 of the batch is
padding. Times are those of the ops under PyTorch's profiler, the median of several steps, on the CPU. The table also
shows the time of the products with weights at this machine's rate of a big product.

A padded model computes its padded rows, so none of its steps can be faster than those products: forward returns the
logits of every position, and dropout is drawn by row number, which skipping rows would change. With ``packed=True``
padded rows are not computed.

The report is printed as Markdown. With --out, profile_step.md is written there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_model
import torch
from harness import ceilings

from transformer_fast.ops import eager as _eager

KINDS = {
    "loss": ("cross_entropy", "log_softmax", "nll_loss"),
    "attention": ("attention", "aten::bmm", "aten::softmax", "_softmax", "masked_fill", "scaled_dot"),
    "embedding": ("embed", "add_positional"),
    "norm, residual, ReLU, dropout": ("norm", "dropout", "bernoulli", "relu", "threshold", "aten::mean", "aten::std"),
    "products with weights": ("aten::addmm", "aten::mm", "aten::linear", "mkldnn::_linear_pointwise"),
    "sums over rows": ("aten::sum",),
    "copies, additions": ("copy_", "aten::add", "aten::mul", "aten::div", "index", "zero_", "fill_"),
}
"""A kind of work and what names of ops have in them; the first that fits counts."""

WHOLE = ("transformer_fast", "attention")
"""Ops with such names are counted with all that they call."""


def kind_of(name: str) -> str | None:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), None)


def shares(step: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each kind of op in one step; "other" is autograd's engine and ops of no kind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    seconds = dict.fromkeys([*KINDS, "other"], 0.0)

    def walk(event: Any) -> None:
        kind = kind_of(event.name)
        if kind is not None and any(part in event.name for part in WHOLE):
            seconds[kind] += event.cpu_time_total / 1e6
            return
        seconds[kind or "other"] += event.self_cpu_time_total / 1e6
        for child in event.cpu_children:
            walk(child)

    for event in profiler.events():
        if event.cpu_parent is None:
            walk(event)
    return seconds


def profile(shape: str, names: list[str], rounds: int) -> tuple[dict[str, dict[str, float]], float]:
    """Seconds by side and kind, medians of interleaved steps; and the least that the products with weights take."""
    models, make_inputs, operations = bench_model.build(shape, "cpu")
    torch.manual_seed(3)
    inputs = make_inputs()

    def step(model: bench_model.Model) -> None:
        model.module.train()
        loss = model.loss(inputs)
        model.module.zero_grad(set_to_none=True)
        loss.backward()

    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names:
            seconds = shares(lambda: step(models[name]))  # noqa: B023
            if round_ > 0:  # the first warms up
                found[name].append(seconds)
    medians = {
        name: {kind: statistics.median(one[kind] for one in steps) for kind in steps[0]}
        for name, steps in found.items()
    }
    return medians, 3 * operations / ceilings("cpu")["matmul"]


def table(found: dict[str, dict[str, float]], least: float) -> str:
    lines = [f"| ms | {' | '.join(found)} |", "| --- |" + " --- |" * len(found)]
    for kind in (*KINDS, "other"):
        lines.append(f"| {kind} | " + " | ".join(f"{times[kind] * 1e3:.0f}" for times in found.values()) + " |")
    lines.append("| all | " + " | ".join(f"{sum(times.values()) * 1e3:.0f}" for times in found.values()) + " |")
    lines.append(f"\nEvery product with a weight, padding included, at this machine's rate: {least * 1e3:.0f} ms.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape",
        choices=bench_model.SHAPES,
        nargs="+",
        default=list(bench_model.SHAPES),
        help="shapes of models (default: all)",
    )
    parser.add_argument(
        "--sides", nargs="+", default=["eager", "ours", "ours packed"], help="sides to profile (default: all three)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed runs per side (default: 5)")
    parser.add_argument("--out", type=Path, help="folder for the profile")
    args = parser.parse_args()
    _eager.native = lambda: None  # by the dispatcher, where every op has a name
    text = f"fp32, {torch.get_num_threads()} threads, torch {torch.__version__}; medians of {args.rounds} steps\n"
    for shape in args.shape:
        text += f"\n## {shape}\n\n{table(*profile(shape, args.sides, args.rounds))}\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "profile_step.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
