"""The table of all records is whole, and each record's page has the figures of its rows."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import records
import report
from pages import tables
from records import BYTES, FASTEST, Row

ROWS = records.read()
NAMES = sorted({row.record for row in ROWS})
SUITE = [name for name in NAMES if "/" not in name]
OWN_PAGES = ["generation/profile_generation", "h200/measured"]
"""Records whose page is not made from rows; test_gpu_quick.py has the one of the GPU."""
NO_ROWS = {
    "profile_step.md", "host_cost.md", "model_host_cost.md", "resources.md",
    "sentence_embeddings.md", "spills.md",
}  # fmt: skip
"""Pages without rows."""


def of_record(name: str) -> list[Row]:
    return [row for row in ROWS if row.record == name]


def test_no_row_is_there_twice_and_figures_are_in_order() -> None:
    counts = Counter((row.record, row.case, row.way, row.unit) for row in ROWS)
    assert not [key for key, count in counts.items() if count > 1]
    for row in ROWS:
        assert row.case and row.unit and row.machine and "torch 2." in row.versions, row
        assert re.fullmatch(r"[0-9a-f]{7,}", row.commit) and re.fullmatch(r"2026-\d\d-\d\d", row.date), row
        assert (row.p20 is None) == (row.p80 is None), row
        assert row.p20 is None or 0 < row.p20 <= row.median <= row.p80, row
        if row.unit in ("s", FASTEST, "us", "ms"):
            assert row.median > 0, row


@pytest.mark.parametrize("unit", ["s", BYTES, FASTEST, "us", "ms"])
def test_a_ratio_is_the_quotient_of_two_figures(unit: str) -> None:
    found = [row for row in ROWS if row.unit == unit and row.ratio is not None]
    assert found and not [row for row in found if row.way == "ours"]
    for row in found:
        ways = records.cases(row.record, unit)[row.case]
        ours = ways["ours int8"] if row.way.endswith("int8") and "ours int8" in ways else ways["ours"]
        assert row.ratio == pytest.approx(row.median / ours.median), row


def test_writing_the_table_changes_nothing(tmp_path: Path) -> None:
    text = records.TABLE.read_text()
    assert next(csv.reader(text.splitlines())) == list(Row._fields)
    records.replace(ROWS, tmp_path / "results.csv")
    assert (tmp_path / "results.csv").read_text() == text


def test_the_rows_of_a_record_are_replaced(tmp_path: Path) -> None:
    table, (first, second, *_) = tmp_path / "results.csv", NAMES
    records.replace([*of_record(second), *of_record(first)], table)
    assert records.read(table) == [*of_record(first), *of_record(second)]
    new = of_record(first)[0]._replace(median=1 / 3, ratio=None)
    records.replace([new], table)
    assert records.read(table) == [new._replace(median=0.3333333333), *of_record(second)]


def test_every_record_has_its_page() -> None:
    pages = {path for path in records.FOLDER.rglob("*.md") if path.name not in NO_ROWS}
    assert pages == {records.page_of(name) for name in NAMES}
    assert len(pages) == len(NAMES)


def test_no_raw_results_are_kept() -> None:
    assert {path.suffix for path in records.FOLDER.rglob("*") if path.is_file()} == {".csv", ".md", ".png"}


@pytest.mark.parametrize("name", SUITE)
def test_the_tables_of_the_suite_have_the_figures_of_the_rows(name: str) -> None:
    times, peaks = records.cases(name), records.cases(name, BYTES)
    shown = [line for lines in tables(records.page_of(name)) for line in lines]
    assert [line["case"] for line in shown] == list(times)
    for line in shown:
        ways, of_memory = times[line["case"]], peaks.get(line["case"], {})
        ours = f"{ways['ours'].median * 1e6:.1f} us"
        ours += f", {of_memory['ours'].median / 2**20:.1f} MiB" if of_memory else ""
        cells = {column.removeprefix("x "): cell for column, cell in line.items() if column.startswith("x ")}
        expected = dict.fromkeys(cells, "") | {way: f"{row.ratio:.2f}" for way, row in ways.items() if way != "ours"}
        for way in [way for way in of_memory if way != "ours"]:
            expected[way] += f", memory x {of_memory[way].ratio:.2f}"
        assert line["ours"] == ours
        assert {way: cell for way, cell in cells.items() if cell != "refused"} == {
            way: cell for way, cell in expected.items() if cells.get(way) != "refused"
        }


@pytest.mark.parametrize("name", sorted({*NAMES} - {*SUITE, *OWN_PAGES}))
def test_the_table_of_a_program_is_that_of_its_rows(name: str) -> None:
    rows, text = of_record(name), records.page_of(name).read_text()
    assert text.endswith("\n\n" + report.figures_table(rows) + "\n")
    first = rows[0]
    assert f" {first.machine}; {first.versions}; commit {first.commit}, {first.date}.\n" in text


def test_the_profile_of_a_step_has_the_figures_of_its_rows() -> None:
    name = "generation/profile_generation"
    found = {unit: records.cases(name, unit) for unit in {row.unit for row in of_record(name)}}
    shown = tables(records.page_of(name))[0]
    keys = [(case, way) for case, ways in found["step seconds"].items() for way in ways]
    assert len(shown) == len(keys)
    for line, (case, way) in zip(shown, keys, strict=True):
        search, size, batch, length = case.replace("batch", "B").replace("length", "L").split(", ")
        whole, first, step, of_first, of_step = (
            found[unit][case][way].median
            for unit in ("whole seconds", "first seconds", "step seconds", "least of first", "least of step")
        )
        assert (line["case"], line["side"]) == (f"{size} {search} {batch} {length}", way)
        assert (line["whole"], line["first"]) == (f"{whole * 1e3:.0f} ms", f"{first * 1e3:.0f} ms")
        assert (line["a step"], line["least / first"]) == (f"{step * 1e3:.2f} ms", f"{of_first:.0%}")
        assert line["least / step"] == f"{of_step:.0%}"


RUN = {
    "machine_info": {
        "torch": "2.13.0", "gpu": None, "cpu": {"brand_raw": "A CPU"}, "threads": 2, "kernels": "avx2",
        "torch_cpu_capability": "AVX2", "commit": "0123456", "packages": {"peer": "1.0"},
    },
    "datetime": "2026-11-01T00:00:00", "what": "two searches", "lines": 10, "model": {"layers": 2},
    "results": [
        {"search": "greedy", "side": "ours", "seconds": [2.0, 1.0], "bleu": 30.5, "same": None},
        {"search": "greedy", "side": "peer", "seconds": [3.0, 4.0], "bleu": 30.0, "same": 0.5},
        {"search": "beam", "side": "ours", "seconds": [], "refused": "not installed"},
    ],
}  # fmt: skip


def test_a_run_of_a_program_becomes_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(records, "TABLE", tmp_path / "results.csv")
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    for _ in range(2):  # the second takes the place of the first
        monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "run.json"), "--record", "new/run"])
        report.main()
    rows = records.read(tmp_path / "results.csv")
    assert [(row.case, row.way, row.median, row.ratio, row.unit) for row in rows] == [
        ("greedy, lines 10", "ours", 1.0, None, FASTEST),
        ("greedy, lines 10", "ours", 30.5, None, "BLEU"),
        ("greedy, lines 10", "peer", 3.0, 3.0, FASTEST),
        ("greedy, lines 10", "peer", 30.0, None, "BLEU"),
        ("greedy, lines 10", "peer", 0.5, None, "same"),
    ]
    machine = "A CPU, 2 threads; kernels for avx2, PyTorch's for AVX2"
    assert {row[8:] for row in rows} == {(machine, "torch 2.13.0, peer 1.0", "0123456", "2026-11-01")}
    text = (tmp_path / "results/new/run.md").read_text()
    assert text in capsys.readouterr().out
    assert text.splitlines()[2:] == [
        "- model: layers 2",
        "",
        "| case | way | s, fastest round | BLEU | ours is faster by | same |",
        "| --- | --- | --- | --- | --- | --- |",
        "| greedy, lines 10 | ours | 1 | 30.5 |  |  |",
        "| greedy, lines 10 | peer | 3 | 30 | 3.00 | 0.5 |",
    ]
