"""Record what the attention kernels spill, by version of Triton: tile tables must suit all versions that are allowed.

    python tools/triton_spills.py                # what changed, with all versions; benchmarks/results/static/spills.*
    python tools/triton_spills.py 3.8.0 --print  # every case, with one version; nothing is written

The cases are the launches of triton_cases.py for sm_90 with heads of 64 and 128 in 16 bits. Each is compiled as a
launch would compile it. Counted are registers, spilled bytes, and the instructions of the loop over tiles that read or
write what was spilled; noted is whether the assembler makes the matrix products of the loop wait for one another. A
case is compiled again only if Triton's front end makes another kernel of it than the one in the record. No GPU is
needed. A whole record takes about 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from triton_versions import ROOT, VERSIONS, check_imported, start_with

RECORD = ROOT / "benchmarks" / "results" / "static" / "spills.csv"
CAPABILITY = 90
RECORDED = re.compile(r"attention (forward|grad_q|grad_kv) b?float16 d(64|128)\b")


@dataclass(frozen=True)
class Found:
    """Result of compiling a case with a version of Triton.

    Args:
        digest: see :func:`.triton_kernels.front_end_digest`.
        registers: per thread.
        spilled: bytes per thread.
        hot: instructions of the loop over tiles that read or write what was spilled.
        serialised: True if each product of tensor cores waits for the one before.
    """

    digest: str
    registers: int
    spilled: int
    hot: int
    serialised: bool

    def __str__(self) -> str:
        hot = f" ({self.hot})" if self.spilled else ""
        return f"{self.registers}, {self.spilled}{hot}{' serialised' if self.serialised else ''}"


def launches() -> dict[str, object]:
    """The cases by name."""
    from tools.triton_cases import CASES

    found = (launch for name in ("attention", "attention_backward") for launch in CASES[name](f"sm{CAPABILITY}"))
    return {launch.name: launch for launch in found if RECORDED.match(launch.name)}


def compile_all(version: str, known: dict[str, Found], only: str) -> None:
    """Compile the cases with the Triton that is imported, and print each as JSON: its name, and what was found."""
    check_imported(version)
    from tools.triton_kernels import compile_launch, front_end_digest, triton_ir

    for name, launch in launches().items():
        if not re.search(only, name):
            continue
        digest = front_end_digest(triton_ir(launch, CAPABILITY))
        found = known.get(name)
        if found is None or found.digest != digest:
            compiled = compile_launch(launch, CAPABILITY)
            spilled = compiled.spill_bytes, compiled.hot_spills
            found = Found(digest, compiled.registers, *spilled, compiled.serialised)
        print(json.dumps([name, astuple(found)]), flush=True)


def read(path: Path = RECORD) -> dict[str, dict[str, Found]]:
    """The record: what was found, by case and version."""
    lines = list(csv.reader(path.read_text().splitlines()))[1:] if path.exists() else []
    record: dict[str, dict[str, Found]] = {}
    for name, version, digest, *numbers, serialised in lines:
        record.setdefault(name, {})[version] = Found(digest, *map(int, numbers), serialised == "True")
    return record


def written(record: dict[str, dict[str, Found]]) -> str:
    """The record as CSV, a line per case and version."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["kernel", "version", *(field.name for field in fields(Found))])
    for name, rows in sorted(record.items()):
        writer.writerows([name, version, *astuple(found)] for version, found in rows.items())
    return text.getvalue()


def markdown(record: dict[str, dict[str, Found]]) -> str:
    """The record as a table with a column per version."""
    text = """# Spilled registers by version of Triton

Made by `python tools/triton_spills.py` for sm_90. Per thread: registers, spilled bytes, and in brackets the
instructions of the loop over tiles that read or write what was spilled. Spills outside the loop cost a few accesses
per program. serialised: each matrix product of the loop waits for the one before.

"""
    lines = [["kernel", *VERSIONS], ["---"] * (1 + len(VERSIONS))]
    for name, rows in sorted(record.items()):
        lines.append([name.removeprefix("attention "), *(str(rows[version]) for version in VERSIONS)])
    return text + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help="default: all that are tried")
    parser.add_argument("--print", action="store_true", dest="afresh", help="compile all, and write no record")
    parser.add_argument("--only", default="", metavar="PATTERN", help="with --print: only cases whose name has this")
    parser.add_argument("--imported", help=argparse.SUPPRESS)  # in the process of one version
    options = parser.parse_args()
    before = {} if options.afresh else read()
    if options.imported:
        known = {name: rows[options.imported] for name, rows in before.items() if options.imported in rows}
        compile_all(options.imported, known, options.only)
        return 0
    record: dict[str, dict[str, Found]] = {}
    given = ["--only", options.only, *(["--print"] if options.afresh else [])]
    for version in options.versions:
        process = start_with(version, __file__, "--imported", version, *given)
        for name, row in map(json.loads, process.stdout):
            found = record.setdefault(name, {})[version] = Found(*row)
            print(f"Triton {version}: {found}: {name}", flush=True)
        if process.wait() != 0:
            return 1
        if not options.afresh:
            kept = {name: before.get(name, {}) | rows for name, rows in record.items()}
            RECORD.write_text(written(kept))
            if all(set(VERSIONS) <= set(rows) for rows in kept.values()):
                RECORD.with_suffix(".md").write_text(markdown(kept))
    hot = sum(found.hot > 0 for rows in record.values() for found in rows.values())
    print(f"{len(record)} cases, {len(options.versions)} versions; {hot} touch a spill in the loop over tiles")
    return int(hot > 0)


if __name__ == "__main__":
    sys.exit(main())
