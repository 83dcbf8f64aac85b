"""The short list has a case of every test and every pair of values, and is the same in every process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import short_list

pytest_plugins = ["pytester"]

SIZES = (7, 3, 3, 3)
PRODUCT = {row: dict(zip("abcd", row)) for row in itertools.product(*map(range, SIZES))}


def pairs(rows: list[tuple[int, ...]]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for row in rows for i, j in itertools.combinations(range(4), 2)}


def test_every_pair_of_a_product_is_in_few_rows() -> None:
    chosen = short_list.covering(PRODUCT, 2)
    assert pairs(chosen) == pairs(list(PRODUCT)) and len(chosen) <= 28


def test_seven_rows_hold_every_value() -> None:
    chosen = short_list.covering(PRODUCT, 1)
    assert len(chosen) == 7
    assert all({row[i] for row in chosen} == set(range(size)) for i, size in enumerate(SIZES))


def test_a_test_without_parameters_is_one_row() -> None:
    assert short_list.covering({"case": {}}, 2) == ["case"]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Run pytest with the short list and no other plugin, in this process; with "-n", in a new process with xdist."""
    monkeypatch.setenv("PYTHONPATH", str(Path(short_list.__file__).parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("TESTS_ALL", "")  # the test restores what --all sets

    def start(*options: str) -> pytest.RunResult:
        options = ("-p", "short_list", "--strict-markers", *options)
        if any(option.startswith("-n") for option in options):
            return pytester.runpytest_subprocess("-p", "xdist", *options)
        return pytester.runpytest_inprocess(*options)

    return start


SUITE = """
import pytest
{marks}
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [(1, 1), (1, 2), (2, 1), pytest.param(9, 9, marks=pytest.mark.slow("long"))])
def test_product(a, b, c): pass

def test_alone(): pass
"""


@pytest.mark.parametrize(
    ("marks", "options", "passed", "left"),
    [
        ("", (), 10, 3),  # 3 x 3 pairs; the slow row is left
        ('@pytest.mark.cover("values")', (), 4, 9),
        ("@pytest.mark.cover(2)", (), 3, 10),
        ('@pytest.mark.slow("takes an hour")', (), 1, 12),
        ("", ("--cover=values",), 4, 9),
        ('@pytest.mark.slow("takes an hour")', ("--all",), 13, 0),
        ('@pytest.mark.slow("takes an hour")', ("-n1",), 1, 12),
        ("", ("-n2",), 10, 3),
    ],
)
def test_what_runs(
    run: Callable[..., pytest.RunResult],
    pytester: pytest.Pytester,
    marks: str,
    options: tuple[str, ...],
    passed: int,
    left: int,
) -> None:
    pytester.makepyfile(SUITE.format(marks=marks))
    found = run(*options)
    found.assert_outcomes(passed=passed)
    assert (f"{left} more cases run with --all" in found.stdout.str()) == (left > 0)


def test_a_test_that_is_named_runs_with_all_its_cases(
    run: Callable[..., pytest.RunResult], pytester: pytest.Pytester
) -> None:
    path = pytester.makepyfile(SUITE.format(marks='@pytest.mark.slow("takes an hour")'))
    run(f"{path.name}::test_product").assert_outcomes(passed=12)


def test_benchmarks_run_with_all_their_cases(run: Callable[..., pytest.RunResult], pytester: pytest.Pytester) -> None:
    (pytester.path / "bench_it.py").write_text(SUITE.format(marks='@pytest.mark.cover("values")'))
    run("-o", "python_files=bench_*.py", ".").assert_outcomes(passed=13)
