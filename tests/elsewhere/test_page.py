"""docs/elsewhere.md: the page is that of the committed answers, and the row of this package is still true."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks.elsewhere import __main__ as command
from benchmarks.elsewhere import page

ANSWERS: dict[str, list[dict[str, Any]]] = json.loads(page.ANSWERS.read_text())
AGAIN = "python -m benchmarks.elsewhere --page"


def test_the_page_has_the_answers() -> None:
    assert page.PAGE.read_text() == page.text(), f"{AGAIN} writes the page"


def test_this_package_answers_as_the_page_says() -> None:
    assert command.asked("ours", sys.executable) == ANSWERS["ours"], "python -m benchmarks.elsewhere ours"


@pytest.mark.parametrize("name", command.PACKAGES)
def test_a_probe_ran_with_the_pinned_packages(name: str) -> None:
    """A version that was raised without a run, or a probe without answers, is a page that says what nobody saw."""
    assert (command.PROBES / f"{name}.py").exists()
    pinned = {p.replace("-cpu", "") for p in command.PACKAGES[name]}
    for row in ANSWERS[name]:
        versions = [v.replace(" ", "==") for v in row["version"].split(", ") if " " in v]
        assert set(versions) <= pinned and (versions or name == "ours")


def test_every_probe_is_in_the_list() -> None:
    found = {path.stem for path in command.PROBES.glob("*.py")} - {"shared"}
    assert found == set(command.PACKAGES) == set(ANSWERS)
