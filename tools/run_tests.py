"""``make test``: every part, also after a red one, and one verdict at the end.

A part is a command of its own. Its output is shown as it comes; the verdict repeats the last line of pytest's.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SUMMARY = re.compile(r"=+ (.* in [\d.]+s.*?) =+")


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    command: list[str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def parts(workers: str) -> list[Part]:
    """What `make test` consists of; a further vector unit, say, is one more line."""
    pytest = [sys.executable, "-m", "pytest", "-n", workers, f"--color={'yes' if sys.stdout.isatty() else 'no'}"]
    interpreted = {"TRITON_INTERPRET": "1"}
    return [
        Part("lint", ["make", "--no-print-directory", "lint"]),
        Part("tests", [*pytest, "tests", "--ignore", "tests/interpreter"]),
        Part("interpreter", [*pytest, "tests/interpreter"], interpreted),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2", help="processes of pytest-xdist (default: %(default)s)")
    return run_all(parts(parser.parse_args().workers))


def run_all(todo: list[Part]) -> int:
    """Run each and print the verdict; 1 if one failed."""
    verdict, failed = [], []
    for part in todo:
        print(f"\n== {part.name}: {' '.join(part.command)}", flush=True)
        start = time.monotonic()
        code, summary = run(part)
        if code != 0:
            failed.append(part.name)
        outcome = "passed" if code == 0 else f"FAILED ({code})"
        verdict.append(f"   {part.name:12} {outcome:12} {time.monotonic() - start:5.0f} s   {summary}".rstrip())
    verdict.append(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    print("\n== verdict", *verdict, sep="\n", flush=True)
    return 1 if failed else 0


def run(part: Part) -> tuple[int, str]:
    """The exit code of a part, and the summary that pytest printed last, if it did."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **part.environment}
    with subprocess.Popen(
        part.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        text = b""
        while chunk := os.read(process.stdout.fileno(), 65536):  # not by lines: dots of progress have no end of line
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            text = text[-65536:] + chunk
    found = SUMMARY.findall(COLOURS.sub("", text.decode(errors="replace")))
    return process.returncode, found[-1] if found else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
