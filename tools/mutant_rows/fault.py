"""A row of ``make mutants``: a fault to plant, and the tests that are most likely to see it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = ("transformer_fast", "csrc")
MOVED = {"transformer_fast/checkpoints/": "transformer_fast/translation/checkpoints/"}
"""Folders that moved since commits that are taken back."""


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

    def changes(self, tree: Path) -> dict[str, bytes]:
        """The files that the fault changes, by path.

        Raises:
            Unfit: the old text is not there exactly once.
        """
        file = tree / self.path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            raise Unfit(f"its old text is {found} times in {self.path}; expected once, and another new one")
        return {self.path: text.replace(self.old, self.new).encode()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reverted:
    """A commit that repaired something is taken back, in the product's files alone.

    Attributes:
        commit: its hash.
        subject: of the commit, to read here.
        tests, why: as of a fault.
        only: the files to take back, where others have changed since; all by default.
    """

    commit: str
    subject: str
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        return f"revert {self.commit} {self.subject}"

    @property
    def path(self) -> str:
        return ", ".join(sorted(path for path in self._touched()))

    def changes(self, tree: Path) -> dict[str, bytes]:
        """The files that the fault changes, by path: merged three ways, as ``git apply -R --3way`` does.

        Raises:
            Unfit: the commit is not known, or what it changed has changed since.
        """
        changed = {}
        for path in self._touched():
            now = path
            for old, new in MOVED.items():
                now = now.replace(old, new)
            file, before = tree / now, _content(f"{self.commit}^", path)
            if not file.exists() or before is None:
                raise Unfit(f"{self.commit} made or moved {path}")
            merged = _merged(file, _content(self.commit, path) or b"", before)
            if merged != file.read_bytes():
                changed[now] = merged
        if not changed:
            raise Unfit(f"nothing of {self.commit} is left to revert")
        return changed

    def _touched(self) -> list[str]:
        names = _git("show", "--format=", "--name-only", "--no-renames", self.commit, "--", *(self.only or PRODUCT))
        return names.decode().split()


Row = Fault | Reverted


def digest(row: Row) -> str:
    """Digest of a row: another one for each row, and for the same row once it is edited."""
    fields = {name: value for name, value in dataclasses.asdict(row).items() if name != "why"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _merged(file: Path, base: bytes, before: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder, name) for name in ("base", "before")]
        for name, content in zip(names, (base, before), strict=True):
            name.write_bytes(content)
        done = subprocess.run(["git", "merge-file", "-p", str(file), *map(str, names)], capture_output=True)
    if done.returncode != 0:
        raise Unfit(f"what it changed in {file.name} has changed since")
    return done.stdout


def _content(commit: str, path: str) -> bytes | None:
    done = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True)
    return done.stdout if done.returncode == 0 else None


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode != 0:
        raise Unfit(done.stderr.decode(errors="replace").strip() or f"git {arguments[0]} failed")
    return done.stdout
