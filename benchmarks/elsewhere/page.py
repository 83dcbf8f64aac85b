"""Write docs/elsewhere.md from the answers of the probes, what was read in sources, and the rows of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.elsewhere import cited

ANSWERS = Path(__file__).with_name("answers.json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "elsewhere.md"
TEMPLATE = Path(__file__).with_name("page.md")
USUAL = " (Lq, Lk), (B, 1, 1, Lk), (B, 1, Lq, Lk), (B, H, Lq, Lk); refused (B, Lk), (B, Lq, Lk)"
"""Text of a cell for masks that broadcast to the scores, and no others; the page says it once."""
COLUMNS = {
    "attention": ("empty", "mask", "causal", "dropout"),
    "models": ("smoothing", "positions", "scores"),
}


def rows(answers: dict[str, list[dict[str, Any]]], columns: tuple[str, ...]) -> list[list[str]]:
    """Return library, version and cells of each row that has one of these columns; a cell that nobody ran is a dash."""
    found = [row for rows in answers.values() for row in rows]
    kept = [row for row in found if any(row["cells"].get(column) for column in columns)]
    return [[row["library"], row["version"], *(shown(row["cells"].get(c)) for c in columns)] for row in kept]


def shown(cell: str | None) -> str:
    """Return a cell as the page has it."""
    return cell.replace(USUAL, "") if cell else "-"


def read(rows: list[dict[str, str]], columns: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table for rows whose answer was read in the library's source."""
    return [[r["library"], f"{r['version']}; read: {r['source']}", *(r[column] for column in columns)] for r in rows]


def lines(rows: list[list[str]]) -> str:
    """Return the rows of a table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in row)} |" for row in rows)


def text() -> str:
    """Return the page."""
    answers = json.loads(ANSWERS.read_text())
    attention, models = COLUMNS["attention"], COLUMNS["models"]
    tables = {
        "ATTENTION": rows(answers, attention) + read(cited.ATTENTION, attention),
        "MODELS": rows(answers, models) + read(cited.MODELS, models),
        "DROPOUT": [[r["kernel"], r["version"], r["dropout"], r["source"]] for r in cited.DROPOUT],
    }
    page = TEMPLATE.read_text()
    for name, table in tables.items():
        page = page.replace(f"{{{name}}}", lines(table))
    return page
