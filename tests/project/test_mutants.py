"""`make mutants`: a fault is seen, missed, or no longer applies, and the record keeps what did not run."""

from __future__ import annotations

import sys
from pathlib import Path

import mutants
import pytest
from mutant_rows import ROWS
from mutant_rows.fault import Fault, Unfit

SOURCE = "def f():\n    return 1  # one\n"
TESTS = """
from package import f

def test_f(): assert f() == 1
def test_other(): pass
"""


def fault(name: str, old: str, new: str, test: str = "tests/ops") -> Fault:
    return Fault(name=name, path="package.py", old=old, new=new, tests=(test,))


SEEN = fault("another number", "return 1", "return 2")
LATE = fault("its tests are gone", "return 1", "return 2", "tests/nowhere.py")
MISSED = fault("another comment", "# one", "# two")
GONE = fault("text of an older version", "return one", "return two")
TWICE = fault("text in two places", "f", "g")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mutants.Tree:
    """Return the tree of a project with one function; `main` runs in it."""
    tree = mutants.Tree(tmp_path)
    for name, text in (("package.py", SOURCE), ("tests/ops/test_it.py", TESTS), ("tests/interpreter/none", "")):
        (tree.built / name).parent.mkdir(parents=True, exist_ok=True)
        (tree.built / name).write_text(text)
    monkeypatch.setitem(tree.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(tree, "prepare", lambda compiled: None)
    monkeypatch.setattr(mutants, "Tree", lambda folder: tree)
    return tree


def run(monkeypatch: pytest.MonkeyPatch, table: Path, rows: tuple[Fault, ...]) -> int:
    monkeypatch.setattr(mutants, "ROWS", rows)
    monkeypatch.setattr(sys, "argv", ["mutants.py", "--table", str(table)])
    return mutants.main()


@pytest.mark.parametrize("row", [SEEN, LATE])
def test_a_fault_is_seen_and_taken_out(tree: mutants.Tree, row: Fault) -> None:
    tree.plant(row)
    assert tree.outcome(row) == "`tests/ops/test_it.py::test_f`"
    tree.fresh()
    assert (tree.path / "package.py").read_text() == SOURCE
    assert tree.outcome(row) == mutants.NOT_SEEN


@pytest.mark.parametrize("row", [GONE, TWICE])
def test_a_text_that_is_not_there_once_is_unfit(tree: mutants.Tree, row: Fault) -> None:
    with pytest.raises(Unfit, match="times, not once"):
        tree.plant(row)


def test_a_run_goes_on_behind_a_row_that_no_longer_applies(
    tree: mutants.Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "table.md"
    many = tuple(fault(f"number {number}", "return 1", f"return {number}") for number in range(2, 11))
    monkeypatch.setattr(tree, "outcome", lambda row: "`tests/ops/test_it.py::test_f`")
    assert run(monkeypatch, table, (GONE, *many)) == 0
    assert mutants.read_table(table)[GONE.key].startswith(mutants.GONE)
    assert run(monkeypatch, table, (GONE, *many[1:])) == 1, "more than a tenth"


def test_a_missed_fault_fails_the_run(tree: mutants.Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, table := tmp_path / "table.md", (MISSED,)) == 1
    assert mutants.read_table(table) == {MISSED.key: mutants.NOT_SEEN}


def test_a_test_that_fails_without_the_fault_has_not_seen_it(
    tree: mutants.Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tree.built / "package.py").write_text(SOURCE.replace("1 ", "3 "))
    row = fault("another number", "return 3", "return 2")
    assert run(monkeypatch, table := tmp_path / "table.md", (row,)) == 1
    assert "fails without the fault" in mutants.read_table(table)[row.key]


def test_the_record_keeps_what_did_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table, found = tmp_path / "table.md", {SEEN.key: "`tests/a.py::test[x | y]`", GONE.key: f"{mutants.GONE}: why"}
    monkeypatch.setattr(mutants, "ROWS", (SEEN, MISSED, GONE))
    mutants.write_table(table, found)
    assert mutants.read_table(table) == {**found, MISSED.key: mutants.UNKNOWN}
    assert "sees 1 of 1 faults: 100.0%" in table.read_text()


def test_each_row_is_there_once() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert all(row.old != row.new and row.tests for row in ROWS)
