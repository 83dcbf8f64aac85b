"""Scripts of findings/: each is in the table, says what it found, and fails if that changes. None is run here."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from pages import ROOT

FOLDER = ROOT / "findings"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
PARTS = ("Versions", "Guess", "Behaviour", "Why it matters", "Output seen", "The script fails")
GUESSES = (FOLDER / "guesses.md").read_text()


def test_every_script_is_in_the_table_with_its_time() -> None:
    rows = re.findall(r"^\| `(\w+\.sh)` \| .+ \| .+ \| \d+ \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [path.name for path in SCRIPTS]
    assert {*re.findall(r"see `(\w+\.sh)`", GUESSES)} <= {*rows}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_found(path: Path) -> None:
    script = path.read_text()
    heading = script.partition("set -euo pipefail\n")[0]
    parts = re.findall(rf"^# ({'|'.join(PARTS)})\b", heading, re.MULTILINE)
    assert parts == [*PARTS]
    assert re.search(r"\(Python 3\.\d\d", heading)
    assert "mktemp -d" in script and "transformer_fast" not in script
    pinned = re.findall(r"pip\" install (.+)", re.sub(r"\\\n| 2> \S+", " ", script))
    packages = [word for line in pinned for word in line.split() if not word.startswith("-")]
    assert packages and all("==" in package for package in packages)
    assert script.rstrip().splitlines()[-1].startswith("[[")


def test_the_sums_of_the_guesses() -> None:
    table = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", GUESSES, re.MULTILINE)
    found = {}
    for section in GUESSES.split("\n## ")[1:]:
        answers = Counter(re.findall(r" \| (yes|half|no) \| (?:[\d, -]* ?\| )[^|]+ \|$", section, re.MULTILINE))
        found[section.splitlines()[0]] = [answers.total(), answers["yes"], answers["half"], answers["no"]]
    found["all"] = [sum(numbers) for numbers in zip(*found.values(), strict=True)]
    assert {area: [int(n) for n in numbers] for area, *numbers in table} == found
    assert f"has {found['all'][0]} guesses" in (ROOT / "docs/elsewhere.md").read_text()
