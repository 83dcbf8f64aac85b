"""A row of ``make mutants``: a fault to plant, and the tests that are most likely to see it."""

from __future__ import annotations

import dataclasses
from pathlib import Path


class Unfit(Exception):
    """A row that no longer applies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One text of one file is replaced.

    Attributes:
        name: what is wrong, in plain words.
        path: the file.
        old, new: the text, which must be in the file exactly once, and what takes its place.
        tests: files that run first, from the root.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """The first cells of the row in the record."""
        return self.name, self.path.removeprefix("transformer_fast/")

    def planted(self, tree: Path) -> str:
        """The content of the file with the fault in it.

        Raises:
            Unfit: the old text is not there exactly once.
        """
        file = tree / self.path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if (found := text.count(self.old)) != 1:
            raise Unfit(
                f"its text is in the file {found} times, not once" if file.exists() else "there is no such file"
            )
        return text.replace(self.old, self.new)
