"""docs/elsewhere.md is written by hand: rows are complete and dated, names of this package exist, links fit."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest
from pages import DOCS, PAGES, page_name

import transformer_fast

PAGE = DOCS / "elsewhere.md"
TEXT = PAGE.read_text()
COLUMNS = ("library", "version", "what differs", "what we do")


def tables() -> list[list[list[str]]]:
    """Return the cells of the tables about other libraries, the line of names first."""
    found = re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE)
    split = [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows.splitlines()] for rows in found]
    return [[rows[0], *rows[2:]] for rows in split if len(rows[0]) == len(COLUMNS)]


def test_each_row_says_which_version_and_what_we_do() -> None:
    assert re.search(r"\*\*Seen on [\d and]+ \w+ 20\d\d\*\*", TEXT)
    assert sum(len(rows) - 1 for rows in tables()) > 70
    for names, *rows in tables():
        assert all(name.startswith(column) for name, column in zip(names, COLUMNS, strict=True))
        assert re.search(r"\d", rows[0][1])
        for row in rows:
            assert len(row) == len(COLUMNS) and all(row), row
            assert re.search(r"\d|^the same", row[1]), row


def test_what_we_do_names_what_there_is() -> None:
    cells = "".join(row[3] for rows in tables() for row in rows)
    names = set(re.findall(r"`tfast\.(\w+)|`((?:compat|AttentionMask)\.\w+)|`(GenerationConfig)`", cells))
    assert len(names) > 8
    for name in names:
        attrgetter("".join(name))(transformer_fast)


@pytest.mark.parametrize("page", [p for p in PAGES if re.search(r"elsewhere\.md#", p.read_text())], ids=page_name)
def test_links_to_a_heading_of_this_page(page: Path) -> None:
    headings = {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    assert {*re.findall(r"elsewhere\.md#([\w-]+)", page.read_text())} <= headings
