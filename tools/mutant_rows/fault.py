"""A row of ``make mutants``: a fault to plant, and the tests that are most likely to see it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


class Unfit(Exception):
    """A row that no longer applies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One text of one file is replaced.

    Attributes:
        name: what is wrong, in plain words.
        path: the file.
        old, new: the text, which must be in the file exactly once, and what takes its place.
        tests: files or folders that run first, from the root.
        why: no test can see it, if none can.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    def planted(self, tree: Path) -> str:
        """The content of the file with the fault in it.

        Raises:
            Unfit: the old text is not there exactly once.
        """
        file = tree / self.path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            raise Unfit(f"its old text is {found} times in {self.path}; expected once, and another new one")
        return text.replace(self.old, self.new)


def digest(fault: Fault) -> str:
    """Digest of a row: another one for each row, and for the same row once it is edited."""
    fields = {name: value for name, value in dataclasses.asdict(fault).items() if name != "why"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
