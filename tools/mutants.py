"""``make mutants``: plant faults, and list the tests that see them.

    python tools/mutants.py [--only PATTERN ...] [--table FILE] [--folder FOLDER]
    python tools/mutants.py --list

A row (tools/mutant_rows) is a fault: one text of one file is replaced, in a fresh copy of the sources. First the tests
that the row names run, until one fails; if all pass, the rest of the short list (`make test`). At the end, the tests
that failed run once more without any fault, and must pass. Tests of the project itself (docs, packaging, tools) need a
checkout and are left out.

The record, tests/mutants.md, is written after each row; rows that do not run keep their result. A row whose text is no
longer in the sources is skipped, and the record says so. The run fails if the short list sees fewer than 95 % of the
faults that were planted, or if more than a tenth of the rows no longer apply.

Libraries (mutmut, cosmic-ray) exchange operators of Python code: they know no C++, and make thousands of faults, for
which there are no tests to run first.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mutant_rows import ROWS
from mutant_rows.fault import Fault, Unfit
from project import ROOT, copy_sources, setup_names

SEEN_AT_LEAST, GONE_AT_MOST = 0.95, 0.1
INTERPRETED = "tests/interpreter"
LEFT_OUT = ("tests/project", "tests/typing", "tests/test_architecture.py")
SECONDS = 3600  # a fault may make a loop endless
CANNOT_START, NOTHING_RUN = 4, 5  # pytest's exit codes
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
LINE = re.compile(r"^\| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
NOT_SEEN, GONE, UNKNOWN = "not seen", "no longer applies", "no result yet"

Results = dict[tuple[str, str], str]
"""The last cell of a row in the record, by the others: the test that saw the fault, in backticks, or words."""


class Tree:
    """Copy of the sources in which faults are planted.

    Attributes:
        path: the copy; each fault gets a fresh one.
        built: what it is copied from, with libraries.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.built = folder / "tree", folder / "built"
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self.environment = {
            **variables,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.path),
            "OMP_NUM_THREADS": "1",
            "TRANSFORMER_FAST_CUDA": "0",
            "TRANSFORMER_FAST_CPU_SETS": setup_names()["instruction_sets"]("host")[-1],
            "TRANSFORMER_FAST_CXX_FLAGS": "-O0 -w",  # a third of the compiler's time, and the same numbers
        }

    def prepare(self, compiled: bool) -> None:
        """Copy the sources and build them, or take this checkout's libraries if no fault is in C++."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        copy_sources(self.path)
        if compiled:
            self.build()
        else:
            for library in (ROOT / "transformer_fast").glob("*.so"):
                shutil.copy2(library, self.path / "transformer_fast")
        shutil.rmtree(self.built, ignore_errors=True)
        shutil.copytree(self.path, self.built)

    def fresh(self) -> None:
        """Take out what was planted. Files keep their times, so that a build compiles only what a fault concerns."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.built, self.path)

    def plant(self, row: Fault) -> None:
        """Plant a fault in a fresh copy.

        Raises:
            Unfit: its text is not there, or the compiler refuses the new one.
        """
        text = row.planted(self.built)
        self.fresh()
        (self.path / row.path).write_text(text, encoding="utf-8")
        if row.path.startswith("csrc/"):
            self.build()

    def build(self) -> None:
        code, output = run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], self.path, self.environment)
        if code != 0:
            errors = [line for line in output.splitlines() if "error" in line]
            raise Unfit(f"it does not build: {errors[0] if errors else output[-300:]}")

    def outcome(self, row: Fault) -> str:
        """Run tests until one sees what was planted; the last cell of the row.

        Raises:
            Unfit: pytest cannot start.
        """
        for arguments, variables in runs(row):
            code, output = self.pytest(["-x", *arguments], variables)
            if code == CANNOT_START:
                raise Unfit(f"pytest cannot start: {output.strip()[-300:]}")
            if code not in (0, NOTHING_RUN):
                found = FAILED.search(output)
                return f"`{found[1].strip() if found else 'no end' if code is None else f'exit code {code}'}`"
        return NOT_SEEN

    def pytest(self, arguments: list[str], variables: dict[str, str]) -> tuple[int | None, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        return run(command, self.path, {**self.environment, **variables})


def run(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command; its exit code, or None if it had to be ended, and its output. What it has started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def runs(row: Fault) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Arguments of pytest and what its environment has besides: the tests of a row, then the rest of the short list."""
    yield from split(test for test in row.tests if (ROOT / test).exists())
    others = [f"--ignore={test}" for test in row.tests]
    yield ["tests", *(f"--ignore={name}" for name in (*LEFT_OUT, INTERPRETED)), *others], {}
    yield [INTERPRETED, *others], {"TRITON_INTERPRET": "1"}


def split(tests: Iterable[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Split off the tests in Triton's interpreter."""
    found: tuple[list[str], list[str]] = [], []
    for test in tests:
        found[test.startswith(INTERPRETED)].append(test)
    yield from ((some, variables) for some, variables in zip(found, ({}, {"TRITON_INTERPRET": "1"})) if some)


def read_table(file: Path) -> Results:
    lines = LINE.findall(file.read_text(encoding="utf-8")) if file.exists() else []
    return {(name, path): cell.replace("\\|", "|") for name, path, cell in lines[2:]}  # behind the head


def write_table(file: Path, results: Results) -> None:
    every = {row.key: results.get(row.key, UNKNOWN) for row in ROWS}
    lines = ["# Planted faults, and which tests see them", "", "Written by `make mutants`.", "", *summary(every)[0], ""]
    lines += ["| fault | file | seen by |", "| --- | --- | --- |"]
    cells = {key: " ".join(cell.split()).replace("|", "\\|") for key, cell in every.items()}
    lines += [f"| {name} | {path} | {cell} |" for (name, path), cell in cells.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def summary(results: Results) -> tuple[list[str], bool]:
    """The share of the faults that the short list sees, in words, and whether it is enough."""
    gone, unknown = (sum(cell.startswith(word) for cell in results.values()) for word in (GONE, UNKNOWN))
    seen, planted = sum(cell.startswith("`") for cell in results.values()), len(results) - gone - unknown
    share = seen / max(planted, 1)
    words = [f"The short list sees {seen} of {planted} faults: {share:.1%}; expected at least {SEEN_AT_LEAST:.0%}."]
    if gone or unknown:
        words.append(f"Rows that no longer apply: {gone}; without a result: {unknown}.")
    return words, share >= SEEN_AT_LEAST and gone <= GONE_AT_MOST * len(results)


def without_faults(tree: Tree, results: Results) -> Results:
    """Run the tests that saw faults once more without any, and return the rows whose test fails all the same."""
    tree.fresh()
    failing: set[str] = set()
    for tests, variables in split(sorted({cell.strip("`") for cell in results.values() if cell.startswith("`tests/")})):
        failing.update(test.strip() for test in FAILED.findall(tree.pytest(tests, variables)[1]))
    wrong = {key: cell for key, cell in results.items() if cell.strip("`") in failing}
    return {key: f"{NOT_SEEN}; {cell} fails without the fault, too" for key, cell in wrong.items()}


def say(text: str) -> None:
    print(f"mutants: {text}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="run the rows whose file or name matches or contains this"
    )
    parser.add_argument("--list", action="store_true", help="print the rows, and which no longer apply; run none")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/mutants", help="folder for the copy of the sources"
    )
    parser.add_argument("--table", type=Path, default=ROOT / "tests/mutants.md", help="the record")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    patterns = [f"*{pattern}*" for pattern in options.only or [""]]
    chosen = [row for row in ROWS if any(fnmatch.fnmatch(f"{row.path} {row.name}", p) for p in patterns)]
    if options.list or not chosen:
        for row in chosen:
            try:
                row.planted(ROOT)
                print(f"{row.path}: {row.name}")
            except Unfit as reason:
                print(f"{row.path}: {row.name}: {GONE}: {reason}")
        say(f"{len(chosen)} rows")
        return int(not chosen)
    tree, found = Tree(options.folder.resolve()), {}
    tree.prepare(compiled=any(row.path.startswith("csrc/") for row in chosen))
    for number, row in enumerate(chosen, start=1):
        start = time.monotonic()
        try:
            tree.plant(row)
            found[row.key] = tree.outcome(row)
        except Unfit as reason:
            found[row.key] = f"{GONE}: {reason}"
        write_table(options.table, read_table(options.table) | found)
        seconds = time.monotonic() - start
        say(f"{number} of {len(chosen)}: {row.path}: {row.name}: {found[row.key]} ({seconds:.0f} s)")
    found |= without_faults(tree, found)
    write_table(options.table, read_table(options.table) | found)
    for (name, path), cell in found.items():
        if not cell.startswith("`"):
            say(f"{path}: {name}: {cell}")
    words, enough = summary(found)
    print(*words, sep="\n")
    return int(not enough)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # running commands are ended
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
