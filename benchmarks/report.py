"""Turn the JSON of ``pytest benchmarks --benchmark-json`` into one table (Markdown) and one picture per file.

python benchmarks/report.py results/benchmarks.json --out results
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="record that pytest-benchmark wrote")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the tables (default: results)")
    arguments = parser.parse_args()
    record = json.loads(arguments.json.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = machine(record["machine_info"]) + "\n"
    for name, cases in grouped(record["benchmarks"]).items():
        text += f"\n## {name}\n\n{table(cases)}\n"
        draw(name, cases, arguments.out / f"{name}.png")
    (arguments.out / "benchmarks.md").write_text(text)
    print(text)


def machine(info: dict[str, Any]) -> str:
    """Return one line about the machine of the measurements."""
    limits = info["ceilings"]
    where = info["gpu"] or f"{info['cpu'].get('brand_raw', 'CPU')}, {info['threads']} threads"
    if info.get("kernels"):
        where += f"; kernels for {info['kernels']}, PyTorch's for {info['torch_cpu_capability']}"
    return (
        f"{where}; torch {info['torch']}; commit {info['commit']}; copy {limits['copy'] / 1e9:.0f} GB/s, "
        f"matmul {limits['matmul'] / 1e12:.2f} TFLOP/s measured in this run."
        + (f" Driver, SM clock, memory clock: {info['driver']}." if info["gpu"] else "")
    )


def grouped(benchmarks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Cases by op: bench_norm.py -> norm."""
    groups = defaultdict(list)
    for case in benchmarks:
        if "times" in case["extra_info"]:
            groups[Path(case["fullname"].split("::")[0]).stem.removeprefix("bench_")].append(case)
    return dict(groups)


def table(cases: list[dict[str, Any]]) -> str:
    """A row a case: our time and its share of the ceilings, then how many times faster ours is than each peer. On a GPU
    also our peak of memory above the inputs, and how many times that each peer takes."""
    peers = list(dict.fromkeys(peer for case in cases for peer in [*case["extra_info"]["ratios"], *refused(case)]))
    head = ["case", "ours", "copy", "matmul", *(f"x {peer}" for peer in peers)]
    rows = [head, ["---"] * len(head)]
    for case in cases:
        info = case["extra_info"]
        cells = [f"{info['ratios'][p]:.2f}" if p in info["ratios"] else refused(case).get(p, "") for p in peers]
        peaks = info.get("peak_memory") or {}
        cells = [
            f"{cell}, memory x {peaks[p] / max(peaks['ours'], 1):.2f}" if p in peaks and cell != "refused" else cell
            for p, cell in zip(peers, cells, strict=True)
        ]
        ours = duration(info) + (f", {peaks['ours'] / 2**20:.1f} MiB" if peaks else "")
        shares = [f"{info[k]:.0%}" if info[k] else "" for k in ("share_of_copy", "share_of_matmul")]
        rows.append([title(case), ours, *shares, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def refused(case: dict[str, Any]) -> dict[str, str]:
    return dict.fromkeys(case["extra_info"]["refused"], "refused")


def title(case: dict[str, Any]) -> str:
    """Name of the case, without the device (all of a run are on one)."""
    name, _, parameters = case["name"].removeprefix("test_").rstrip("]").partition("[")
    parts = [part for part in parameters.split("-") if part not in ("cpu", "cuda")]
    return f"{name}: {'-'.join(parts)}"


def duration(info: dict[str, Any]) -> str:
    times = info["times"] or info["wall"]
    return f"{times['ours']['median'] * 1e6:.1f} us"


def draw(name: str, cases: list[dict[str, Any]], path: Path) -> None:
    """Bars of the peers' ratios, a group a case, on a log scale from the line at 1, which is ours; other forms of ours,
    as without padding, are black marks: left of the line they are faster still."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    names = list(dict.fromkeys(name for case in cases for name in case["extra_info"]["ratios"]))
    peers = [name for name in names if not name.startswith("ours")]
    if not peers:
        return
    height = 0.8 / len(peers)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.16 * len(cases) * max(1.5, len(peers))), layout="constrained")
    middle = 0.4 - height / 2

    def known(name: str) -> tuple[list[int], list[float]]:
        ratios = [(y, c["extra_info"]["ratios"].get(name)) for y, c in enumerate(cases)]
        return [y for y, ratio in ratios if ratio is not None], [ratio for _, ratio in ratios if ratio is not None]

    for index, peer in enumerate(peers):
        places, ratios = known(peer)
        widths = [ratio - 1 for ratio in ratios]
        axes.barh([y + index * height for y in places], widths, left=1.0, height=height * 0.9, label=peer)
    axes.axvline(1.0, color="black", linewidth=1)
    for form, mark in zip((name for name in names if name not in peers), itertools.cycle("Dos^v")):
        places, ratios = known(form)
        axes.plot(ratios, [y + middle for y in places], mark, color="black", markersize=5, label=form)
    axes.set_yticks([y + middle for y in range(len(cases))], [title(case) for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.01)
    axes.set_xlabel("time of the peer / time of ours (right of the line: ours is faster)")
    axes.set_title(f"{name}: transformer_fast against its peers")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
