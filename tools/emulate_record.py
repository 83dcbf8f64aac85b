"""The cases that a run of tools/emulate.py has passed, kept so that a run that was cut short need not begin again."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
DECISIVE = (
    *("transformer_fast/*.py", "transformer_fast/ops/*.py", "transformer_fast/reference/**/*.py"),
    *("transformer_fast/triton/**/*.py", "transformer_fast/cli/verification*.py"),
    *("csrc/**/*.*h", "csrc/cuda/*.cu", "tests/support/cuda_on_cpu/*.h", "tests/support/cuda_sources.py"),
    *("tools/emulate.py", "tools/emulated_*.py", "tools/ptx_emulator/*.py"),
    *("tools/tests/emulation_cases*.py", "tests/fuzz/fuzz*.py", "tests/support/helpers.py"),
)
"""The files that decide what comes of a case: kernels and what launches them, reference, gate, cases and emulator."""


@functools.cache
def state() -> str:
    """A digest of these files and of the versions of Triton and torch."""
    digest = hashlib.sha256(f"triton {triton.__version__}, torch {torch.__version__}".encode())
    for path in sorted({path for pattern in DECISIVE for path in ROOT.glob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class PassedBefore:
    """A file of JSON lines, one for each case that passed; it counts while `state` is what it was.

    Args:
        path: the file, made where there is none.
        given: settings that decide outcomes too.
    """

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        self.path, self.given = path, {"state": state(), **given}
        path.parent.mkdir(parents=True, exist_ok=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The outcomes, each as it was added. A line that was not written to its end is none."""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["given"] == self.given:
                yield entry["outcome"]

    def add(self, outcome: dict[str, Any]) -> None:
        """The line begins with a line break, so that one cut short by a kill spoils no other."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"given": self.given, "outcome": outcome}) + "\n")
