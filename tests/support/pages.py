"""Pages of the documentation: README, CONTRIBUTING, CHANGELOG and all of docs/, new pages included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
REFERENCE = DOCS / "reference"
WRITTEN = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
"""All pages."""
PAGES = [page for page in WRITTEN if page.parent != REFERENCE]
"""All pages except those of the reference, which are made from docstrings."""


def page_name(page: Path) -> str:
    """Return the path of a page in the repository, without docs/ and the extension."""
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


def of_pages(pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    """Parametrize a test with pages."""
    return pytest.mark.parametrize("page", pages, ids=page_name)


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def block_with(page: Path, text: str) -> str:
    """Return a page's one block that has this text."""
    (block,) = (block for block in blocks(page) if text in block)
    return block


def without_blocks(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def tables(page: Path) -> list[list[dict[str, str]]]:
    """Return the tables of a page: rows, with a cell per column; the last of several columns with one name."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines())
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def commands(page: Path) -> list[str]:
    """Return the lines of a page's indented blocks, which are commands; without their comments."""
    text = without_blocks(page).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]


REDIRECTION = re.compile(r"(?<!\S)([<>]) (\S+)")
OMITTED = {"train": "--source train.en --target train.de --save runs/en-de"}
"""Arguments for which "..." stands in a command of `transformer-fast`, by its name."""


def with_omitted(words: list[str]) -> list[str]:
    """Return the words of a command, from its name on, with the arguments for which "..." stands."""
    return [part for word in words for part in (OMITTED[words[0]].split() if word == "..." else [word])]


def inline_commands(page: Path) -> list[str]:
    """Return the commands in the sentences of a page."""
    return re.findall(
        r"`((?:make|(?:\.venv/bin/)?nox|transformer-fast|python3?|pytest|torchrun|benchmarks/\w+\.py)(?: [^`\n]*)?)`",
        without_blocks(page),
    )
