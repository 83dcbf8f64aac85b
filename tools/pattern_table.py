"""Writes the table of hand-written structures in docs/accelerate.md, from ``KNOWS`` of the patterns.

``python tools/pattern_table.py`` writes the table; with ``--check`` the exit code is 1 if it is out of date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from transformer_fast.accelerate.patterns import KNOWS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accelerate.md"
HEAD = "| hand-written structure, by its names | code that has it |\n| --- | --- |\n"


def page(text: str) -> str:
    """Return the page with the table of the patterns that are here now."""
    table = HEAD + "".join(f"| {structure} | {code} |\n" for structure, code in KNOWS)
    written, tables = re.subn(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table, text)
    assert tables == 1, f"{PAGE} has no table with this head"
    return written


def main() -> int:
    """Write the page, or compare it."""
    before = PAGE.read_text()
    after = page(before)
    if "--check" in sys.argv[1:]:
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
