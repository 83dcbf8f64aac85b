"""Records of measurements: the table benchmarks/results.csv, from which pages and pictures are checked and drawn.

``benchmarks/report.py`` adds a record. The page of a record is below benchmarks/results (:func:`page_of`).
"""

from __future__ import annotations

import csv
import functools
import json
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "results"
TABLE = FOLDER.with_suffix(".csv")
FASTEST = "s, fastest round"
"""Unit of programs that repeat their work a few times."""
BYTES = "bytes"
"""Unit of peaks of memory above the inputs."""


class Row(NamedTuple):
    """Figure of a record. No two rows have the same record, case, way and unit.

    Attributes:
        record: name of the record.
        case: measured work.
        way: program or setting that did the work; "ours" is this package.
        median: of the samples, or the only figure.
        p20, p80: 20th and 80th percentile of the samples.
        ratio: median divided by that of "ours" ("ours int8" for int8) in the same case. A ratio of times says how many
            times as fast ours is.
        unit: of median, p20 and p80.
        machine, versions, commit, date: of the run.
    """

    record: str
    case: str
    way: str
    median: float
    p20: float | None
    p80: float | None
    ratio: float | None
    unit: str
    machine: str
    versions: str
    commit: str
    date: str


Figure = tuple[str, str, float, float | None, float | None, float | None, str]
"""Fields of a row from its case to its unit."""


def page_of(record: str) -> Path:
    """Return the page of a record: "cpu" -> cpu/benchmarks.md, "h200/measured" -> h200/measured.md."""
    return FOLDER / (f"{record}.md" if "/" in record else f"{record}/benchmarks.md")


def read(table: Path = TABLE) -> list[Row]:
    """Return the rows of a table."""
    with table.open(encoding="utf-8", newline="") as file:
        return [Row(**{name: _value(name, cell) for name, cell in cells.items()}) for cells in csv.DictReader(file)]


def _value(name: str, cell: str) -> Any:
    if name not in ("median", "p20", "p80", "ratio"):
        return cell
    return float(cell) if cell else None


@functools.cache
def cases(record: str, unit: str = "s") -> dict[str, dict[str, Row]]:
    """Return the rows of a record in this unit, by case and way."""
    found: dict[str, dict[str, Row]] = {}
    for row in read():
        if (row.record, row.unit) == (record, unit):
            found.setdefault(row.case, {})[row.way] = row
    return found


def ratios(record: str, case: str) -> dict[str, float]:
    """Return how many times as fast as each way ours is, by way; 1 for ours."""
    return {way: row.ratio or 1.0 for way, row in cases(record)[case].items()}


def replace(rows: Iterable[Row], table: Path = TABLE) -> None:
    """Write rows into a table, in place of all rows of the same records. Records are in the order of their names."""
    new = list(rows)
    names = {row.record for row in new}
    old = [row for row in read(table) if row.record not in names] if table.exists() else []
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(map(_cell, row) for row in sorted([*old, *new], key=lambda row: row.record))


def _cell(value: str | float | None) -> str:
    """Return a cell; a figure has ten digits, an integer all."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.10g}"


def save(path: Path, run: dict[str, Any], *packages: str) -> None:
    """Write the JSON of a script's run, for ``benchmarks/report.py``.

    Args:
        path: of the file.
        run: what was done ("what"), its settings, and "results" (:func:`report.program_figures`).
        packages: peers whose versions are recorded.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about(*packages) | run, indent=1) + "\n", encoding="utf-8")


def about(*packages: str) -> dict[str, Any]:
    """Return machine, versions, commit and date of a run, under the names that pytest-benchmark's JSON has."""
    versions = {name: version(name) for name in ("transformer_fast", *packages)}
    info = here() | {"cpu": {"brand_raw": _processor()}, "packages": versions}
    return {"machine_info": info, "datetime": datetime.now(UTC).isoformat(timespec="seconds")}


@functools.cache
def _processor() -> str:
    from cpuinfo import get_cpu_info

    return get_cpu_info().get("brand_raw", "CPU")


def here() -> dict[str, Any]:
    """Return threads, kernels, versions and commit of this process."""
    import torch

    from transformer_fast import extension

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "kernels": extension.build_info().get("instruction_set"),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this checkout; None without git."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
