"""Record of the cases that passed in an emulation, so that an interrupted run can continue."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[3]
DECISIVE = (
    *("transformer_fast/*.py", "transformer_fast/ops/*.py", "transformer_fast/reference/**/*.py"),
    *("transformer_fast/masks/*.py", "transformer_fast/testing/*.py"),
    *("transformer_fast/triton/**/*.py", "transformer_fast/cli/verification*.py"),
    *("csrc/**/*.*h", "csrc/cuda/*.cu", "tests/support/cuda_on_cpu/*.h", "tests/support/cuda_sources.py"),
    *("tools/lab/emulation/*.py", "tools/lab/ptx_emulator/*.py", "tests/fuzz/fuzz*.py", "tests/support/helpers.py"),
)
"""Files that decide the outcome of a case: kernels, launchers, reference, gate, cases and emulator."""


@functools.cache
def state() -> str:
    """A digest of these files and of the versions of Triton and torch."""
    digest = hashlib.sha256(f"triton {triton.__version__}, torch {torch.__version__}".encode())
    for path in sorted({path for pattern in DECISIVE for path in ROOT.glob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class PassedBefore:
    """File of JSON lines, one per passed case; valid while `state` is unchanged.

    Args:
        path: the file; created if missing.
        given: settings that also decide outcomes.
    """

    def __init__(self, path: Path, given: dict[str, Any]) -> None:
        self.path, self.given = path, {"state": state(), **given}
        path.parent.mkdir(parents=True, exist_ok=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the recorded outcomes. Incomplete lines are ignored."""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry["given"] == self.given:
                yield entry["outcome"]

    def add(self, outcome: dict[str, Any]) -> None:
        """Append an outcome. The record begins with a line break, so that an incomplete line does not damage the next
        one."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"given": self.given, "outcome": outcome}) + "\n")
