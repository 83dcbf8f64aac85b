"""Summary of the ahead-of-time compilation of the Triton kernels, at the end of a test run.

The compilation itself is tools/triton_kernels.py, which benchmarks/resources.py uses too.
"""

from __future__ import annotations

import json
from pathlib import Path


def pytest_addoption(parser) -> None:
    parser.addoption("--compile-report", metavar="FILE", help="write the table of compiled Triton kernels to FILE")


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print the number of compiled kernels and architectures, and their resources."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    rows = [json.loads(v) for r in reports for key, v in getattr(r, "user_properties", ()) if key == "compiled"]
    if not rows:
        return
    terminalreporter.section("Triton kernels compiled ahead of time")
    for line in summary(rows):
        terminalreporter.line(line)
    if config.getoption("--compile-report"):
        Path(config.getoption("--compile-report")).write_text(table(rows), encoding="utf-8")


def summary(rows: list[dict]) -> list[str]:
    """Yield one line for all, one per architecture, and one per kernel that spills."""
    kernels = {row["kernel"] for row in rows}
    configs = {row["name"] for row in rows}
    lines = [
        f"{len(kernels)} kernels, {len(configs)} configs, {len(rows)} compilations in "
        f"{sum(row['seconds'] for row in rows):.0f} s of one core"
    ]
    for arch in sorted({row["arch"] for row in rows}):
        own = [row for row in rows if row["arch"] == arch]
        spilling = [row for row in own if row["spill_bytes"]]
        lines.append(
            f"sm_{arch}: {len(own)} compiled, at most {max(row['registers'] for row in own)} registers and "
            f"{max(row['shared'] for row in own) / 1024:.0f} KB of shared memory; "
            f"{len(spilling)} spill, {sum(row['wgmma'] > 0 for row in own)} use wgmma"
        )
    for row in rows:
        if row["spill_bytes"]:
            hot = f", {row['hot_spills']} accesses in the loop over tiles"
            lines.append(f"  spills {row['spill_bytes']} bytes a thread{hot}: sm_{row['arch']} {row['name']}")
    return lines


def table(rows: list[dict]) -> str:
    """Return a Markdown table of every compilation."""
    columns = ("arch", "name", "registers", "spill_bytes", "hot_spills", "shared", "warps", "wgmma")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for row in sorted(rows, key=lambda row: (row["name"], row["arch"])):
        lines.append("| " + " | ".join(str(row[column]) for column in columns) + " |")
    return "\n".join(lines) + "\n"
