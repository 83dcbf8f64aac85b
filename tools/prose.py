"""Find prose that breaks two rules of docs/style.md, and print it.

A docstring does not open with a question word. A sentence of a docstring, a comment or a page does not open with a
pronoun, because the pronoun's noun would be in another sentence, nor with Of or That of.

``python tools/prose.py [FILE ...]`` reads all files of the checkout by default; the exit code is 1 if there is a
finding.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "csrc", "docs", "tests", "tools", "transformer_fast")
HELD = (*FOLDERS, "*.md", "noxfile.py", "setup.py")
ENDINGS = (".py", ".md", ".cpp", ".h", ".cu", ".cuh")
QUESTION = re.compile(r"(?:What|Whether|How|Which|Where|Why|Tell|Tells|Who|Whose|When)\b")
PRONOUN = re.compile(
    r"(?:^|[.!?:]\s|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|\|\s)\s*((?:It|Its|They|Their|Them|Theirs)\b"
    r"|(?:This|That|These|Those)\s(?:is|are|was|were|has|have|had|does|do|did|can|may|must|will|would)\b"
    r"|Of\b(?! course)|(?:That|Those)\sof\b)"
)
Part = tuple[int, str]
"""A line number, and the prose that begins there."""


def main(names: list[str]) -> int:
    """Print each finding; return 1 if there is one."""
    found = [line for path in held(names) for line in findings(path)]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print(f"{len(found)} findings; docs/style.md has the rules")
    return bool(found)


def held(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files that the rules hold for: of those named, or all."""
    chosen = {Path(name).resolve() for name in names}
    for path in sorted(file for name in HELD for top in ROOT.glob(name) for file in [top, *top.rglob("*")]):
        if path.suffix in ENDINGS and (not chosen or path in chosen):
            yield path


def findings(path: Path) -> Iterator[str]:
    """Yield file, line and text of each docstring or sentence that breaks a rule."""
    text = path.read_text(encoding="utf-8")
    parts = {".py": python, ".md": page}.get(path.suffix, cpp)
    for line, prose in parts(text):
        if path.suffix == ".py" and QUESTION.match(prose):
            yield f"{path.relative_to(ROOT)}:{line}: begin with a verb or a noun: {prose.splitlines()[0]}"
        for match in PRONOUN.finditer(prose):
            row = line + prose.count("\n", 0, match.start(1))
            sentence = " ".join(prose[match.start(1) :][:60].split())
            yield f"{path.relative_to(ROOT)}:{row}: name the thing: {sentence} ..."


def python(text: str) -> Iterator[Part]:
    """Yield docstrings and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from blocks([(t.start[0], t.string.lstrip("# ")) for t in tokens if t.type == tokenize.COMMENT])


def cpp(text: str) -> Iterator[Part]:
    """Yield comments."""
    found = [(row, re.search(r"(?:^|\s)//+ ?(.*)", line)) for row, line in enumerate(text.splitlines(), 1)]
    yield from blocks([(row, match[1]) for row, match in found if match])


def page(text: str) -> Iterator[Part]:
    """Yield a page without its code."""
    yield 1, re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)


def blocks(lines: list[Part]) -> Iterator[Part]:
    """Join comments of neighbouring lines, because a sentence may go over several."""
    for _, group in groupby(enumerate(lines), key=lambda item: item[1][0] - item[0]):
        found = [line for _, line in group]
        yield found[0][0], "\n".join(words for _, words in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
