"""Make tables of the results of a run on a GPU, measured.md beside them, or a record.

    python -m benchmarks.quick.report results
    python -m benchmarks.quick.report results --record h200/measured

With ``--record`` the table goes below benchmarks/results, and the rows into benchmarks/results.csv, in place of the
record's rows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import records

from .record import Record

PEERS = ("eager", "eager compiled", "compiled", "F.layer_norm", "sdpa efficient_attention", "sdpa cudnn_attention",
         "sdpa flash_attention", "flex", "ours packed", "FA2 varlen", "varlen_attn")  # fmt: skip
"""Columns of the table of headline times, in this order."""
SHARES = ("tensor cores", "issued", "memory", "occupancy")
"""Columns of the table of profiles: shares of the most that is possible."""


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
    for title, limit in (("Attention", "matmul"), ("Other ops", "copy")):
        part = [row for row in timed if limit_of(row["case"]) == limit]
        peers = [peer for peer in PEERS if any(peer in row["us"] for row in part)]
        yield f"## {title}: microseconds on the device, median (20th to 80th percentile of ours)\n"
        lines = []
        for row in part:
            spread = f"{row['us']['ours']:.1f} ({row['p20']['ours']:.1f}-{row['p80']['ours']:.1f})"
            share = f"{row[f'share_of_{limit}']:.2f}"
            times = [f"{row['us'][peer]:.1f}" if peer in row["us"] else "" for peer in peers]
            lines.append([row["case"], spread, *times, share])
        yield from table(["case", "ours", *peers, f"share of a {'product' if limit == 'matmul' else 'copy'}"], lines)


def limit_of(case: str) -> str:
    """Return the limit of a case: "matmul" of attention, whose names have a batch, or "copy"."""
    return "matmul" if "-b" in case else "copy"


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
    yield "## What bounds each kernel: Nsight Compute, caches flushed before each kernel\n"
    lines = []
    for row in rows:
        waits = ", ".join(f"{reason.replace('_', ' ')} {value:.1f}" for reason, value in row["stalls"].items())
        name = row["kernel"].removeprefix("void ").replace("|", " ")[:60]
        lines.append([row["case"], row["way"], name, f"{row['us']:.0f}", f"{row['registers']:.0f}",
                      *("" if row[share] is None else f"{row[share]:.2f}" for share in SHARES), waits])  # fmt: skip
    yield from table(["case", "way", "kernel", "us", "registers", *SHARES, "warps that wait, per instruction"], lines)


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


def rows(found: dict[str, list[dict[str, Any]]], record: str) -> Iterator[records.Row]:
    """Yield the rows of a run: times, peaks of memory, shares that a table has, and counts of checked tensors."""
    common = next((one for part in found.values() for one in part if "torch" in one), {})
    for of, figure in figures(found):
        one = common | of
        machine = ", driver ".join(one[name] for name in ("device", "driver") if name in one)
        versions = ", ".join(f"{name} {one[name]}" for name in ("torch", "triton") if name in one)
        yield records.Row(record, *figure, machine, versions, one.get("commit") or "", one.get("date") or "")


def figures(found: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], records.Figure]]:
    """Yield each figure with the result that has it."""
    alone = None, None, None
    for one in found["headline"]:
        for way, us in one.get("us", {}).items():
            ratio = None if way == "ours" else us / one["us"]["ours"]
            yield one, (one["case"], way, us, one["p20"][way], one["p80"][way], ratio, "us")
        for way, peak in (one.get("peak_memory") or {}).items():
            yield one, (one["case"], way, peak, *alone, records.BYTES)
        if "us" in one:
            limit = limit_of(one["case"])
            yield one, (one["case"], "ours", one[f"share_of_{limit}"], *alone, f"share of {limit}")
    ours = {one["what"]: one["ms"] for one in found["step"] if one["way"] == "ours"}
    for one in found["step"]:
        case, way = f"step: {one['what']}", one["way"]
        ratio = one["ms"] / ours[one["what"]] if way != "ours" and one["what"] in ours else None
        yield one, (case, way, one["ms"], *one["p20_p80"], ratio, "ms")
        yield one, (case, way, one["least"], *alone, "ms, least")
        yield one, (case, way, one["tokens_per_second"], *alone, "tokens/s")
        if one["peak_bytes"]:
            yield one, (case, way, one["peak_bytes"], *alone, records.BYTES)
    for one in found["tiles"]:
        best = min(one["us"], key=one["us"].__getitem__)
        for way in dict.fromkeys(("table", best)):
            name = one["table"] if way == "table" else way
            yield one, (f"tiles: {one['case']} {one['kernel']}", name, one["us"][way], *alone, "us")
    for one in found["profile"]:
        case, way = f"profile: {one['case']}", f"{one['way']}: {one['kernel']}"
        yield one, (case, way, one["us"], *alone, "us")
        for share in SHARES:
            if one[share] is not None:
                yield one, (case, way, one[share], *alone, share)
    if checked := found["parity"]:
        yield checked[0], ("parity", "ours", len(checked), *alone, "tensors")
        yield checked[0], ("parity", "ours", sum(one["passed"] for one in checked), *alone, "tensors within the gate")
        worst = max(one["error"] / one["gate"] for one in checked if one["gate"])
        yield checked[0], ("parity", "ours", worst, *alone, "largest share of the gate")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the results")
    parser.add_argument("--record", help="make a record of this name")
    options = parser.parse_args(given)
    parts = {"headline": headline, "step": steps, "profile": profiles, "tiles": tiles, "parity": parity}
    found = {name: Record(options.folder / f"{name}.jsonl").rows() for name in parts}
    versions = next((row for part in found.values() for row in part if "torch" in row), {})
    names = ("device", "driver", "torch", "triton")
    lines = [f"# Measured: {', '.join(f'{name} {versions[name]}' for name in names if name in versions)}\n"]
    for name, part in parts.items():
        lines += part(found[name])
    page = options.folder / "measured.md"
    if options.record:
        page = records.page_of(options.record)
        page.parent.mkdir(parents=True, exist_ok=True)
        records.replace(rows(found, options.record), records.TABLE)
    page.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
