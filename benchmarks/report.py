"""Turn the JSON of a run into a page, rows of a table and pictures, or into a record.

    python benchmarks/report.py results/benchmarks.json --out results
    python benchmarks/report.py results/benchmarks.json --record cpu-model
    python benchmarks/report.py results/compare_rnn.json --record rnn/compare_rnn

The JSON is of ``pytest benchmarks --benchmark-json``, or of a program of this folder (``records.save``). OUT gets the
page, the rows in results.csv, and a picture per file of the suite. With ``--record`` the page goes below
benchmarks/results, and the rows into benchmarks/results.csv, in place of the record's rows.

``python -m benchmarks.quick.report`` does the same for a run on a GPU. profile_step.py, host_cost.py and resources.py
write pages without rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import records
from records import Figure, Row

LABELS = ("search", "precision", "size", "batch", "length", "lines", "sentences", "batch_tokens", "beam", "seed")
"""Fields of a program's JSON, or of one result, that name the case."""
WAYS = ("side", "weights", "model", "name")
"""Fields of a result that name the way."""
NO_SETTINGS = ("what", "machine_info", "datetime", "results")
"""Fields of a program's JSON that are no settings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="JSON of a run")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the page (default: results)")
    parser.add_argument("--record", help="make a record of this name")
    arguments = parser.parse_args()
    run, name = json.loads(arguments.json.read_text()), arguments.record or arguments.json.stem
    if arguments.record:
        table, path = records.TABLE, records.page_of(name)
    else:
        table, path = arguments.out / "results.csv", arguments.out / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    records.replace(rows(run, name), table)
    text = page(run, [row for row in records.read(table) if row.record == name])
    path.write_text(text)
    if not arguments.record:
        for op, cases in grouped(run.get("benchmarks", [])).items():
            draw(op, cases, arguments.out / f"{op}.png")
    print(text)


def rows(run: dict[str, Any], record: str) -> Iterator[Row]:
    """Yield the rows of a run."""
    info = run["machine_info"]
    versions = {"torch": info["torch"], **info.get("packages", {})}
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    about = where(info), said, info["commit"] or "", run["datetime"][:10]
    found = suite_figures(run["benchmarks"]) if "benchmarks" in run else program_figures(run, record)
    for case, way, median, p20, p80, ratio, unit in found:
        yield Row(record, case, way, float(median), p20, p80, ratio, unit, *about)


def suite_figures(cases: list[dict[str, Any]]) -> Iterator[Figure]:
    """Yield the times of a run of pytest-benchmark, and the peaks of memory."""
    for case in cases:
        info = case["extra_info"]
        if "times" not in info:
            continue
        for way, time in (info["times"] or info["wall"]).items():
            yield title(case), way, time["median"], time["p20"], time["p80"], info["ratios"].get(way), "s"
        peaks = info.get("peak_memory") or {}
        for way, peak in peaks.items():
            ratio = None if way == "ours" else peak / max(peaks["ours"], 1)
            yield title(case), way, peak, None, None, ratio, records.BYTES


def program_figures(run: dict[str, Any], record: str) -> Iterator[Figure]:
    """Yield the numbers of a program's results.

    Results are a list of objects, or a table of objects by way, or by way and seed. The least of a list of seconds
    counts. A table of tokens per second has a number per way. Other lists and tables have no rows.
    """
    found: list[tuple[str, str, float, str]] = []
    for one in results(run["results"]):
        given = {key: one.get(key, run.get(key)) for key in LABELS}
        known = ((key, value) for key, value in given.items() if value is not None)
        labels = [value if isinstance(value, str) else f"{key} {value}" for key, value in known]
        case = ", ".join(labels) or record.rpartition("/")[2]
        way = next((one[key] for key in WAYS if key in one), "")
        for name, value in one.items():
            unit = "BLEU" if name == "bleu" else name.replace("_", " ")
            if name in LABELS or isinstance(value, bool):
                continue
            if isinstance(value, int | float):
                found.append((case, way, value, unit))
            elif name == "seconds" and value:
                found.append((case, way, min(value), records.FASTEST))
            elif name == "tokens_per_second":
                found += [(case, side, speed, unit) for side, speed in value.items()]
    times = {(case, way): value for case, way, value, unit in found if unit == records.FASTEST}
    for case, way, value, unit in found:
        ours = "ours int8" if way.endswith("int8") else "ours"
        is_peer = unit == records.FASTEST and way != ours and (case, ours) in times
        ratio = value / times[case, ours] if is_peer else None
        yield case, way, value, None, None, ratio, unit


def results(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of results; "side" is the way's name in a table, and "seed" the seed."""
    if isinstance(found, list):
        yield from found
        return
    for way, one in found.items():
        if all(isinstance(value, dict) for value in one.values()):
            yield from ({"side": way, "seed": int(seed)} | run for seed, run in one.items())
        else:
            yield {"side": way} | one


def page(run: dict[str, Any], found: list[Row]) -> str:
    """Return the page of a run."""
    if "benchmarks" in run:
        tables = (f"\n## {name}\n\n{table(cases)}\n" for name, cases in grouped(run["benchmarks"]).items())
        return machine(run["machine_info"]) + "\n" + "".join(tables)
    if "page" in run:
        return run["page"] + "\n"
    first, what = found[0], run["what"]
    head = f"{what[0].upper()}{what[1:]}. {first.machine}; {first.versions}; commit {first.commit}, {first.date}."
    given = {key: setting(value) for key, value in run.items() if key not in (*LABELS, *NO_SETTINGS)}
    settings = "\n".join(f"- {key.replace('_', ' ')}: {value}" for key, value in given.items() if value)
    return "\n\n".join(filter(None, (head, settings, figures_table(found)))) + "\n"


def setting(value: Any) -> str:
    """Return a setting as text; "" for other lists and tables than of plain values."""
    if isinstance(value, dict):
        parts = {name: setting(part) for name, part in value.items()}
        return ", ".join(f"{name} {part}" for name, part in parts.items()) if all(parts.values()) else ""
    if isinstance(value, list):
        return "; ".join(map(str, value)) if all(isinstance(part, str | int | float) for part in value) else ""
    return str(value)


def figures_table(found: Iterable[Row]) -> str:
    """Return a table of rows: a line per case and way, a column per unit, and one for how much faster ours is."""
    by_line: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in found:
        cells = by_line[row.case, row.way]
        cells[row.unit] = f"{row.median:,.0f}" if row.median.is_integer() else f"{row.median:.5g}"
        if row.ratio is not None:
            cells["ours is faster by"] = f"{row.ratio:.2f}"
    units = list(dict.fromkeys(unit for cells in by_line.values() for unit in cells))
    lines = [["case", "way", *units], ["---"] * (2 + len(units))]
    lines += [[*names, *(cells.get(unit, "") for unit in units)] for names, cells in by_line.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(info: dict[str, Any]) -> str:
    """Return the processor and the kernels of a run."""
    text = info["gpu"] or f"{info['cpu'].get('brand_raw', 'CPU')}, {info['threads']} threads"
    if info.get("kernels"):
        text += f"; kernels for {info['kernels']}, PyTorch's for {info['torch_cpu_capability']}"
    return text


def machine(info: dict[str, Any]) -> str:
    """Return one line about the machine of the measurements."""
    limits = info["ceilings"]
    return (
        f"{where(info)}; torch {info['torch']}; commit {info['commit']}; copy {limits['copy'] / 1e9:.0f} GB/s, "
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
