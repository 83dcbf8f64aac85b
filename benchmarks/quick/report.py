"""Make tables of the records of a run on a GPU: measured.md beside them.

python -m benchmarks.quick.report benchmarks/results/h200
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import Record

PEERS = ("eager", "eager compiled", "compiled", "F.layer_norm", "sdpa efficient_attention", "sdpa cudnn_attention",
         "sdpa flash_attention", "flex", "ours packed", "FA2 varlen", "varlen_attn")  # fmt: skip
"""Columns of the table of headline times, in this order."""


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def headline(rows: list[dict[str, Any]]) -> Iterator[str]:
    timed = [row for row in rows if "us" in row]
    if not timed:
        return
    limits = timed[0]["ceilings"]
    copied, multiplied = limits["copy"] / 1e12, limits["matmul"] / 1e12
    yield f"Ceilings of the run: a copy {copied:.2f} TB/s, a product of 8192^3 in bf16 {multiplied:.0f} TFLOP/s.\n"
    for title, chosen in (("Attention", True), ("Other ops", False)):
        part = [row for row in timed if ("-b" in row["case"]) == chosen]
        peers = [peer for peer in PEERS if any(peer in row["us"] for row in part)]
        yield f"## {title}: microseconds on the device, median (20th to 80th percentile of ours)\n"
        lines = []
        for row in part:
            spread = f"{row['us']['ours']:.1f} ({row['p20']['ours']:.1f}-{row['p80']['ours']:.1f})"
            shares = f"{row['share_of_matmul' if chosen else 'share_of_copy']:.2f}"
            times = [f"{row['us'][peer]:.1f}" if peer in row["us"] else "" for peer in peers]
            lines.append([row["case"], spread, *times, shares])
        yield from table(["case", "ours", *peers, f"share of a {'product' if chosen else 'copy'}"], lines)


def steps(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield "## Whole training steps, bf16 autocast, AdamW: wall time\n"
        head = ["model", "way", "ms (20th to 80th percentile)", "least", "tokens a second", "peak MB"]
        yield from table(
            head,
            [
                [row["what"], row["way"], f"{row['ms']:.1f} ({row['p20_p80'][0]:.1f}-{row['p20_p80'][1]:.1f})",
                 f"{row['least']:.1f}", f"{row['tokens_per_second']:,}", f"{(row['peak_bytes'] or 0) / 1e6:,.0f}"]
                for row in rows
            ],
        )  # fmt: skip


def tiles(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield "## Tiles: the table's entry beside the fastest of the grid, microseconds\n"
        lines = []
        for row in rows:
            best, time = min(row["us"].items(), key=lambda item: item[1])
            ours = row["us"]["table"]
            lines.append(
                [row["case"], row["kernel"], row["table"], f"{ours:.1f}", best, f"{time:.1f}", f"{ours / time:.2f}"]
            )
        yield from table(["case", "kernel", "entry", "its time", "fastest", "its time", "ratio"], lines)


def profiles(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of what bounds each kernel; shares are of the most that is possible."""
    if not rows:
        return
    shares = ("tensor cores", "issued", "memory", "occupancy")
    yield "## What bounds each kernel: Nsight Compute, caches flushed before each kernel\n"
    lines = []
    for row in rows:
        waits = ", ".join(f"{reason.replace('_', ' ')} {value:.1f}" for reason, value in row["stalls"].items())
        name = row["kernel"].removeprefix("void ").replace("|", " ")[:60]
        lines.append([row["case"], row["way"], name, f"{row['us']:.0f}", f"{row['registers']:.0f}",
                      *("" if row[share] is None else f"{row[share]:.2f}" for share in shares), waits])  # fmt: skip
    yield from table(["case", "way", "kernel", "us", "registers", *shares, "warps that wait, per instruction"], lines)


def parity(rows: list[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    counts = Counter(row["passed"] for row in rows)
    yield f"## Parity\n\n{counts[True]} of {len(rows)} tensors are within their gate.\n"
    if counts[False]:
        yield "The others:\n"
        yield from table(
            ["op", "case", "dtype", "tensor", "error", "eager", "gate"],
            [
                [row["op"], row["case"], row["dtype"].removeprefix("torch."), row["tensor"],
                 *(f"{row[name]:.1e}" for name in ("error", "eager", "gate"))]
                for row in rows if not row["passed"]
            ],
        )  # fmt: skip


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the records")
    folder = parser.parse_args(given).folder
    parts = {"headline": headline, "step": steps, "profile": profiles, "tiles": tiles, "parity": parity}
    found = {name: Record(folder / f"{name}.jsonl").rows() for name in parts}
    versions = next((row for rows in found.values() for row in rows if "torch" in row), {})
    names = ("device", "driver", "torch", "triton")
    lines = [f"# Measured: {', '.join(f'{name} {versions[name]}' for name in names if name in versions)}\n"]
    for name, part in parts.items():
        lines += part(found[name])
    (folder / "measured.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
