"""Find docstrings that open with a question word; docs/style.md has the rule.

``python tools/prose.py [FILE ...]`` lists them, of all files of the checkout by default; the exit code is 1 if there
are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELD = ("benchmarks", "tools", "transformer_fast", "conftest.py", "setup.py")
OPENING = re.compile(r"(?:What|Whether|How|Which|Where|Why|Tell|Tells|Who|Whose|When)\b")


def main(names: list[str]) -> int:
    """Print each docstring that the rule forbids; return 1 if there is one."""
    found = [line for path in held(names) for line in questions(path)]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print(f"{len(found)} docstrings open with a question word; docs/style.md: begin with a verb or a noun")
    return bool(found)


def held(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files that the rule holds for: of those named, or all."""
    paths = [Path(name).resolve() for name in names] or sorted(
        path for name in HELD for path in [ROOT / name, *(ROOT / name).rglob("*.py")]
    )
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and name.startswith(HELD):
            yield path


def questions(path: Path) -> Iterator[str]:
    """Yield file, line and first line of each docstring that opens with a question word."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and OPENING.match(text):
                yield f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {text.splitlines()[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
