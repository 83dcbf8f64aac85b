"""The short list: the cases that run without ``--all``.

Every test runs with at least one case. The cases of a test with parameters are chosen such that every pair of values
of two parameters is in one of them: 24 cases hold every pair of a product of 7 x 3 x 3 x 3 = 189. One `parametrize` is
one parameter, so all rows of a table that was written by hand are in the list. Two marks change that:

    @pytest.mark.cover("values")   every value of every parameter is in one case
    @pytest.mark.cover(12)         twelve cases, as different as there are
    @pytest.mark.slow("reason")    no case, or not this one

A test that is named on the command line (``file.py::test``) runs with all its cases.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = "bench_*.py"
"""Files that run all their cases, one after the other."""
STRENGTHS = {"values": 1, "pairs": 2}
LEFT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, not only those of the short list")
    parser.addoption("--cover", choices=STRENGTHS, default="pairs", help="cover no more than these in the short list")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # collected tests are no garbage, and a garbage collection takes a third of the time
    if config.getoption("all"):
        os.environ["TESTS_ALL"] = "1"  # for tests/support/examples.py, in all processes of the run
    config.addinivalue_line("markers", "slow(reason): runs with --all alone")
    config.addinivalue_line(
        "markers", 'cover(what): "pairs" of the values of two parameters, "values", or how many cases'
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run folders of tests in as many processes as there are cores, unless the command sets a number."""
    option = config.option
    alone = hasattr(config, "workerinput") or option.collectonly or option.usepdb
    folders = all(Path(name).is_dir() and not any(Path(name).glob(BENCHMARKS)) for name in config.args)
    if not alone and folders and getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = os.cpu_count(), "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left: list[pytest.Item] = []
    if not config.getoption("all") and not any("::" in argument for argument in config.args):
        chosen = short_list(items, STRENGTHS[config.getoption("cover")])
        left = [item for item in items if item not in chosen]
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = len(left)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # nor is it later: a test that compiles, or calls gc.collect(), looks through its own objects alone
    gc.set_threshold(50_000)  # Python's own is 700: compilers make millions of objects
    gc.enable()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash[LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep the count of a process of xdist: each of them has collected all tests."""
    if counted := getattr(node, "workeroutput", None):
        node.config.stash[LEFT] = counted["left"]


def short_list(items: Iterable[pytest.Item], most: int) -> set[pytest.Item]:
    """Return the cases that run without ``--all``, with every combination of at most this many parameters."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    chosen: set[pytest.Item] = set()
    for item in items:
        if item.path.match(BENCHMARKS):
            chosen.add(item)
        elif item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("cover")
        what = mark.args[0] if mark else "pairs"
        strength, count = (1, what) if isinstance(what, int) else (STRENGTHS[what], None)
        chosen.update(covering({case: parameters(case) for case in cases}, min(most, strength))[:count])
    return chosen


def parameters(case: pytest.Item) -> dict[str, Hashable]:
    """Return the value of each parameter of a case; a parameter is a `parametrize`, or a fixture that has values."""
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
        strength: 1 or 2.
    """
    order = sorted(rows, key=lambda row: zlib.crc32(str(getattr(row, "nodeid", row)).encode()))
    wanted = [combinations(rows[row], strength) for row in order]
    missing = set().union(*wanted)
    heap = [(-len(each), place) for place, each in enumerate(wanted)]  # upper bounds
    heapq.heapify(heap)
    chosen = []
    while missing:
        most, place = heap[0]
        if (added := -len(wanted[place] & missing)) > most:
            heapq.heapreplace(heap, (added, place))
        else:
            heapq.heappop(heap)
            missing -= wanted[place]
            chosen.append(order[place])
    return chosen


def combinations(row: dict[str, Hashable], strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    return set(itertools.combinations(sorted(row.items()), min(strength, len(row))))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if left := config.stash.get(LEFT, 0):
        terminalreporter.write_line(f"{left} more cases run with --all")


def reason_of(report: Any) -> str:
    """Return the reason of a skipped test, as its mark states it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
