"""The short list: the cases that run without ``--all``.

Every test runs with at least one case. Of a test with parameters the cases are chosen such that every pair of values of
two parameters is in one of them: 24 cases hold every pair of a product of 7 x 3 x 3 x 3 = 189. One `parametrize` is one
parameter, so rows that were written by hand are all in the list. Two marks change that:

    @pytest.mark.cover("values")   every value of every parameter is in one case; "one": one case of the test
    @pytest.mark.slow("reason")    no case, or not this one

A test that is named on the command line (``file.py::test``) runs with all its cases.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

STRENGTHS = {"one": 0, "values": 1, "pairs": 2}
LEFT = pytest.StashKey[int]()
COLLECTED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, not only those of the short list")
    parser.addoption("--verdict", metavar="FILE", type=Path, help="write the counts of the run to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow(reason): runs with --all alone")
    config.addinivalue_line("markers", 'cover(what): "pairs" of the values of two parameters, "values", or "one" case')


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders in as many processes as there are cores, if nothing is said of it."""
    option = config.option
    alone = hasattr(config, "workerinput") or option.collectonly or option.usepdb
    if not alone and getattr(option, "numprocesses", 0) is None and all(Path(name).is_dir() for name in config.args):
        option.numprocesses, option.maxschedchunk = os.cpu_count(), 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left: list[pytest.Item] = []
    if not config.getoption("all") and not any("::" in argument for argument in config.args):
        chosen = short_list(items)
        left = [item for item in items if item not in chosen]
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=left)
    output = getattr(config, "workeroutput", config.stash)
    key_left, key_collected = ("left", "collected") if isinstance(output, dict) else (LEFT, COLLECTED)
    output[key_left], output[key_collected] = len(left), len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep what a process of xdist has counted: each of them has collected all tests."""
    counted = getattr(node, "workeroutput", {})
    node.config.stash[LEFT], node.config.stash[COLLECTED] = counted.get("left", 0), counted.get("collected", 0)


def short_list(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The cases that run without ``--all``."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("cover")
        strength = STRENGTHS[mark.args[0] if mark else "pairs"]
        chosen.update(covering({case: parameters(case) for case in cases}, strength))
    return chosen


def parameters(case: pytest.Item) -> dict[str, Hashable]:
    """Which value each parameter of a case has; a parameter is a `parametrize`, or a fixture that has values."""
    spec = getattr(case, "callspec", None)
    values = {name: id(value) for name, value in spec.params.items()} if spec else {}
    found: dict[str, Hashable] = {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], str) else ",".join(mark.args[0])
        found[names] = tuple(values.pop(name.strip(), None) for name in names.split(","))
    return {**found, **values}


def covering(rows: dict[Any, dict[str, Hashable]], strength: int) -> list[Any]:
    """Choose rows such that every combination of ``strength`` values that occurs in a row is in a chosen one.

    Args:
        rows: the value of each parameter, for each row.
        strength: 0, 1 or 2; 0 chooses one row.
    """
    order = sorted(rows, key=lambda row: zlib.crc32(str(getattr(row, "nodeid", row)).encode()))
    wanted = {
        row: set(itertools.combinations(sorted(rows[row].items()), min(strength, len(rows[row])))) for row in order
    }
    missing = set().union(*wanted.values())
    chosen = []
    while missing:
        best = max(order, key=lambda row: len(wanted[row] & missing))
        missing -= wanted[best]
        chosen.append(best)
    return chosen


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    left, collected = config.stash.get(LEFT, 0), config.stash.get(COLLECTED, 0)
    if left:
        terminalreporter.write_line(f"{left} more cases run with --all")
    if (path := config.getoption("verdict")) is None:
        return
    counts = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped", "xfailed")}
    reasons = Counter(reason_of(report) for report in stats.get("skipped", ()))
    path.write_text(json.dumps({**counts, "collected": collected, "only_all": left, "reasons": reasons}))


def reason_of(report: Any) -> str:
    """The reason of a skipped test, as its author wrote it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
