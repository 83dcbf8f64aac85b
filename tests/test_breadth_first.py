"""``--minutes``: which cases run first, and what happens to those that come too late."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from breadth_first import round_of_each

TESTS = Path(__file__).parent
SUITE = """
import pytest

@pytest.mark.parametrize("case", range(40))
def test_many(case):
    pass

@pytest.mark.parametrize("case", range(2))
def test_few(case):
    pass

def test_last(): pass
"""


def test_rounds_double() -> None:
    cases = [f"a.py::many[{index}]" for index in range(100)]
    rounds = round_of_each([*cases, "a.py::one", "b.py::many[0]"])
    sizes = [sum(rounds[case] == number for case in cases) for number in range(8)]
    assert sizes == [1, 1, 2, 4, 8, 16, 32, 36]
    assert rounds["a.py::one"] == rounds["b.py::many[0]"] == 0
    assert round_of_each([*reversed(cases)]).items() <= rounds.items(), "by the names, not by the order"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_test_runs_before_any_has_many_cases(workers: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes=10", "-n", workers, "--maxschedchunk=1")
    order = [case.partition("[")[0] for case in passed(done)]
    assert len(order) == 43 and set(order[:5]) == {"test_many", "test_few", "test_last"}
    assert "did not run" not in done


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_comes_too_late_is_skipped_and_counted(workers: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes=0", "-n", workers)
    assert "43 skipped" in done
    assert "43 cases did not run, the time was up; 3 tests ran with no case" in done


def test_without_it_nothing_changes(tmp_path: Path) -> None:
    order = passed(run(tmp_path, "-n", "0"))
    assert order[:40] == [f"test_many[{case}]" for case in range(40)] and order[-1] == "test_last"


def passed(output: str) -> list[str]:
    """The cases that passed, in their order; a line has `file::case PASSED`, with workers `PASSED file::case`."""
    return re.findall(r"::(\S+)", "\n".join(line for line in output.splitlines() if "PASSED" in line))


def run(folder: Path, *options: str) -> str:
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "-p", "breadth_first", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
