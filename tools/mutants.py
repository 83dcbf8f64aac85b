"""``make mutants``: plant faults, and list the tests that detect them.

    python tools/mutants.py [--only PATTERN ...] [--continue] [--first-only] [--workers N] [--table FILE]
    python tools/mutants.py --check | --list

A row (tools/mutant_rows) is a fault: one text of one file is replaced, in a copy of the sources. Faults of C++ are
compiled together, each behind a switch; faults that no switch can turn on are compiled one by one. Tests run until one
fails, in three stages: the tests that the row names, as far as the short list runs them; the rest of the short list
(`make test`); all cases. At the end, the tests that failed run once more without any fault, and must pass. Tests of the
project itself (docs, packaging, tools) need a checkout and are left out.

A full run takes hours. build/mutants/seen.jsonl keeps the results. With ``--continue``, rows that a test detected are
skipped, and rows that all cases missed. The run fails if a row no longer applies to the sources, if the short list
detects fewer than 95 % of the faults that all cases detect, or if all cases detect fewer than 97 % of the faults.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from mutant_rows import ROWS
from mutant_rows.fault import ROOT, Fault, Unfit, digest
from mutant_tree import INTERPRETED, Run, Tree, split

SHORT_OF_WHOLE, WHOLE_OF_ALL = 0.95, 0.97
LEFT_OUT = ("tests/project", "tests/typing")
STAGES = ("first", "short list", "whole suite")
SECONDS = {"first": 1800, "short list": 7200, "whole suite": 28800}  # a fault may make a loop endless


@dataclasses.dataclass
class Seen:
    """Result of a row.

    Attributes:
        digest, name, path: values of the row.
        stage: the last one that ran.
        by: the stage that saw the fault, or None. test: the first that failed, or what happened instead.
        seconds: total time, with the build.
        alone: True if the test also fails without the fault; None if unknown.
    """

    digest: str
    name: str
    path: str
    stage: str = ""
    by: str | None = None
    test: str = ""
    seconds: float = 0.0
    alone: bool | None = None


def runs_of(row: Fault, stage: str) -> list[Run]:
    if stage == "first":
        return split(row.tests)
    more = ["--all"] if stage == "whole suite" else [f"--ignore={test}" for test in row.tests]
    elsewhere = [f"--ignore={name}" for name in (*LEFT_OUT, INTERPRETED)]
    return [(["tests", *elsewhere, *more], {}), ([INTERPRETED, *more], {"TRITON_INTERPRET": "1"})]


def look(tree: Tree, row: Fault, stages: Iterable[str]) -> Seen:
    """Plant a fault and run tests, stage after stage, until one of them sees it."""
    seen, start = Seen(digest(row), row.name, row.path), time.monotonic()
    with tree.planted(row):
        for seen.stage in stages:
            if test := tree.pytest(runs_of(row, seen.stage), SECONDS[seen.stage]):
                seen.by, seen.test = seen.stage, test
                break
    seen.seconds = round(time.monotonic() - start, 1)
    return seen


def known(file: Path) -> dict[str, Seen]:
    """Read the results of earlier runs, by the digest of the row; the last one counts."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found["digest"]: Seen(**found) for found in map(json.loads, lines)}


def keep(file: Path, seen: Seen) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(dataclasses.asdict(seen)) + "\n")


def summary(found: list[Seen]) -> tuple[list[str], bool]:
    """The shares that the short list and all cases see, in words, and whether they are enough."""
    real = [seen for seen in found if not seen.alone]
    by = {stage: sum(seen.by == stage for seen in real) for stage in STAGES}
    whole, short = sum(by.values()), by[STAGES[0]] + by[STAGES[1]]
    of_all, of_whole = whole / max(len(real), 1), short / max(whole, 1)
    words = [
        f"All cases see {whole} of {len(real)} faults: {of_all:.1%}; expected at least {WHOLE_OF_ALL:.0%}.",
        f"The short list sees {short} of those: {of_whole:.1%}; expected at least {SHORT_OF_WHOLE:.0%}.",
        f"{by[STAGES[0]]} were seen by the first tests that ran: the short list's cases of the files that a row names.",
    ]
    return words, of_all >= WHOLE_OF_ALL and of_whole >= SHORT_OF_WHOLE


def write_table(file: Path, found: list[Seen]) -> None:
    why = {digest(row): row.why for row in ROWS}
    lines = ["# Planted faults, and which tests see them", "", "Written by `make mutants`.", "", *summary(found)[0], ""]
    lines += ["| fault | file | seen by |", "| --- | --- | --- |"]
    for seen in found:
        ran = seen.stage.replace("first", "first tests")
        test = f"`{seen.test}`".replace("|", "\\|") if seen.by else why[seen.digest] or f"not seen by the {ran}"
        only = " with `--all` alone" if seen.by == STAGES[2] else ""
        path = seen.path.replace("transformer_fast/", "")
        lines.append(f"| {seen.name} | {path} | {test}{only} |".replace("\n", " "))
    file.write_text("\n".join(lines) + "\n")


def say(text: str) -> None:
    print(f"mutants: {text}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="run the rows whose file or name matches or contains this"
    )
    parser.add_argument("--list", action="store_true", help="print the rows; run none")
    parser.add_argument("--check", action="store_true", help="check that every row applies to the sources; run none")
    parser.add_argument("--first-only", action="store_true", help="run only the tests that a row names")
    parser.add_argument(
        "--continue", dest="going_on", action="store_true", help="skip the rows with a result from earlier runs"
    )
    parser.add_argument("--workers", default="2", help="number of processes of pytest-xdist (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/mutants", help="folder for the copy of the sources and the record"
    )
    parser.add_argument(
        "--table", type=Path, default=ROOT / "tests/mutants.md", help="table to write, if all rows have run"
    )
    return parser.parse_args()


def main() -> int:
    options = parsed()
    patterns = [f"*{pattern}*" for pattern in options.only or [""]]
    chosen = [row for row in ROWS if any(fnmatch.fnmatch(f"{row.path} {row.name}", p) for p in patterns)]
    if options.list:
        print(*(f"{digest(row)} {row.path}: {row.name}" for row in chosen), sep="\n")
        return 0
    unfit = unfit_rows(chosen)
    if options.check or not chosen:
        say(f"{len(chosen) - len(unfit)} of {len(chosen)} rows apply")
        return int(bool(unfit) or not chosen)
    options.folder.mkdir(parents=True, exist_ok=True)
    tree, record = Tree(options.folder.resolve(), options.workers), options.folder / "seen.jsonl"
    tree.prepare(ROWS)
    stages, before = STAGES[:1] if options.first_only else STAGES, known(record) if options.going_on else {}
    found = []
    for number, row in enumerate((row for row in chosen if row not in unfit), start=1):
        seen = before.get(digest(row))
        if seen is None or (seen.by is None and seen.stage != STAGES[-1]):
            try:
                seen = look(tree, row, stages)
            except Unfit as reason:
                unfit.append(row)
                say(f"{number} of {len(chosen)}: {row.path}: {row.name}: {reason}")
                continue
            keep(record, seen)
        say(f"{number} of {len(chosen)}: {seen.path}: {seen.name}: {seen.test or 'not seen'} ({seen.seconds:.0f} s)")
        found.append(seen)
    return verdict(tree, record, options, found, unfit)


def unfit_rows(rows: list[Fault]) -> list[Fault]:
    """Return the rows that no longer apply to the sources, or name tests that are not there, and say why."""
    unfit = []
    for row in rows:
        try:
            row.planted(ROOT)
            if missing := [test for test in row.tests if not (ROOT / test).exists()]:
                raise Unfit(f"there is no file or folder {', '.join(missing)}")
        except Unfit as reason:
            say(f"{row.path}: {row.name}: {reason}")
            unfit.append(row)
    return unfit


def verdict(tree: Tree, record: Path, options: argparse.Namespace, found: list[Seen], unfit: list[Fault]) -> int:
    """Check that the failed tests pass without faults, write the table, and return 1 for any problem."""
    asked = [seen for seen in found if seen.alone is None and seen.test.startswith("tests/")]
    failing = tree.failing({seen.test for seen in asked}, SECONDS["short list"])
    for seen in asked:
        seen.alone = seen.test in failing
        keep(record, seen)
    for seen in found:
        if seen.alone:
            say(f"{seen.test} also fails without this fault: {seen.name}")
    words, enough = summary(found)
    print(*words, sep="\n")
    print(*(f"not seen: {seen.path}: {seen.name}" for seen in found if seen.by is None), sep="\n")
    complete = len(found) + len(unfit) == len(ROWS)
    if complete:
        write_table(options.table, found)
        say(f"wrote {options.table}")
    return int(bool(unfit) or any(seen.alone for seen in found) or (complete and not enough))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the fault is removed, and running commands are ended
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
