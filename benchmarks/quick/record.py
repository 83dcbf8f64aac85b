"""Record of a command: a line of JSON per result, written when the result is known; and the options of all commands."""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CUT = 75
"""Exit status of a command that had no time for all its cases; the same command goes on."""


CACHE = Path(tempfile.gettempdir()) / "transformer_fast-triton"
"""Folder of Triton's cache. The cache holds absolute paths: the folder is the same here and where it was filled."""


class Record:
    """Results in a file, one object of JSON per line.

    Args:
        path: of the file; results in it are kept.
        key: names of the fields that tell results apart.
    """

    def __init__(self, path: Path, *key: str) -> None:
        self.path, self.key = path, key
        path.parent.mkdir(parents=True, exist_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """Results so far. A last line that was cut short is left out."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def done(self) -> set[tuple[Any, ...]]:
        """Keys of the results so far."""
        return {tuple(row[name] for name in self.key) for row in self.rows()}

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Deadline:
    """End of a command that may take so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        return self.end - time.monotonic()


def parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """Parser with the options that every command has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("results"), help="folder of the records (default: results)")
    made.add_argument("--seconds", type=float, default=seconds, help="time for all of it (default: %(default)s)")
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal with small cases")
    return made


MOST_COMPILED = "most kernels had to be compiled"
"""Words of a command that found few of its kernels in Triton's cache."""


@dataclass
class Kernels:
    """Counts of Triton kernels that were in the cache, and of those that were compiled."""

    cached: int = 0
    compiled: int = 0

    def listen(self) -> Kernels:
        """Count from now on what this process loads."""
        import triton

        triton.knobs.compilation.listener = self._count
        settle_keys()
        return self

    def _count(self, *, cache_hit: bool, **_: Any) -> None:
        self.cached += cache_hit
        self.compiled += not cache_hit

    def __str__(self) -> str:
        most = f"; {MOST_COMPILED}" if self.compiled > self.cached else ""
        return f"Triton: {self.cached} kernels from the cache, {self.compiled} compiled{most}"


@functools.cache
def settle_keys() -> int:
    """Compute the key of every kernel and helper in Triton's cache, in one order; return their number.

    With Triton before 3.8 the key of a function that calls another depends on whether the key of the other was computed
    before: Triton 3.6.0 gave two keys to one kernel, and 3.9.0 one key. A process finds what another one compiled only
    if both keep to one order.
    """
    from tools.triton_kernels import jit_functions

    return len({function.cache_key for function in jit_functions()})


@functools.cache
def versions(device: str) -> dict[str, str]:
    """Device, its driver and highest clock, versions, commit and date, as every result has them."""
    import torch
    import triton

    from benchmarks import records

    found = {"device": "cpu", "torch": torch.__version__, "triton": triton.__version__}
    found |= {"commit": records.commit() or "", "date": datetime.now(UTC).date().isoformat()}
    if device == "cuda":
        from benchmarks.nvidia_smi import smi

        driver, clock = smi("driver_version"), smi("clocks.max.sm")
        found |= {"device": torch.cuda.get_device_name(0), "driver": str(driver), "highest clock": str(clock)}
    return found
