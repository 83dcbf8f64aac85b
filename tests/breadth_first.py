"""``--minutes M``: every test once with one of its cases, then with more of them, for as long as there is time.

A test with 800 cases would else take the time of 800 tests. Each round has twice as many cases of a test as all rounds
before it; which they are follows from their names, so that a run on the same machine is the same run. What has not
begun when the time is up is skipped and counted. Without the option nothing is changed: all cases, in their order.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from typing import Any

import pytest

TOO_LATE = "the time is up"
DEADLINE = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, metavar="M", help="skip what has not begun after M minutes, widest first")


def pytest_configure(config: pytest.Config) -> None:
    minutes = config.getoption("minutes")
    if minutes is not None:
        given = getattr(config, "workerinput", {}).get("deadline")  # a worker's clock starts with its controller's
        config.stash[DEADLINE] = given or time.time() + 60 * minutes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if (deadline := node.config.stash.get(DEADLINE, None)) is not None:
        node.workerinput["deadline"] = deadline


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEADLINE in config.stash:
        rounds = round_of_each([item.nodeid for item in items])
        items.sort(key=lambda item: rounds[item.nodeid])


def round_of_each(cases: list[str]) -> dict[str, int]:
    """Node id -> round; of a test's cases 1, 1, 2, 4, 8... are in rounds 0, 1, 2, 3, 4..."""
    tests = defaultdict(list)
    for case in cases:
        tests[test_of(case)].append(case)
    return {
        case: index.bit_length()
        for group in tests.values()
        for index, case in enumerate(sorted(group, key=lambda case: zlib.crc32(case.encode())))
    }


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > item.config.stash.get(DEADLINE, float("inf")):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    late = [report.nodeid for report in terminalreporter.stats.get("skipped", []) if TOO_LATE in str(report.longrepr)]
    if late:
        ran = {test_of(report.nodeid) for report in terminalreporter.getreports("passed")}
        without = {test_of(case) for case in late} - ran
        terminalreporter.write_line(
            f"{len(late)} cases did not run, the time was up; {len(without)} tests ran with no case. "
            "`make test MINUTES=` runs all."
        )


def test_of(case: str) -> str:
    return case.partition("[")[0]
