"""Predicted cases as launches on a device, which are measured beside each prediction."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks.attention_cases import Case
from benchmarks.attention_launches import launches
from benchmarks.launch_tensors import META
from tools.triton_kernels import triton_compiled
from transformer_fast.triton.launcher import Launch

from . import calibration, report, rows
from .kernels import CAPABILITY
from .machine import H100
from .predictions import Range

Make = Callable[[str], list[Launch]]


@dataclass(frozen=True)
class PredictedLaunch:
    """Record of one launch; times in seconds.

    Args:
        name: of the kernel, with its tile.
        time: predicted.
        replayed: by the replay alone, without the calibration's factor and without the gap to the next kernel.
        copied: what its bytes take at the speed of a copy.
        moved: bytes.
        operations: of the products that are needed; 0 without products.
    """

    name: str
    time: Range
    replayed: float
    copied: float
    moved: int
    operations: float

    @classmethod
    def of(cls, kernel: dict) -> PredictedLaunch:
        """From a kernel of the record."""
        return cls(
            kernel["name"], Range(**kernel["time"]), kernel["cycles"] / H100.clock, kernel["moved"] / H100.copy,
            kernel["moved"], kernel["operations"],
        )  # fmt: skip


@dataclass(frozen=True)
class Twin:
    """A predicted case that can be run.

    Args:
        case: its name in the record.
        launches: what is predicted of each of its launches.
        make: the launches on a device, with their tensors.
    """

    case: str
    launches: tuple[PredictedLaunch, ...]
    make: Make

    @property
    def time(self) -> Range:
        return sum((launch.time for launch in self.launches), Range(0.0, 0.0))


def makers() -> dict[str, Make]:
    """Functions that make the launches of a case on a device, by its name in the record."""
    found: dict[str, Make] = {
        f"{case}{' packed' * packed}": partial(attention_case, case, packed)
        for case, packed in report.attention_names()
    }
    return found | {name: partial(row_case, work) for name, work in rows.cases().items()}


def attention_case(case: Case, packed: bool, device: str) -> list[Launch]:
    return [launch for _, launch in launches(case, packed, device)]


def row_case(works: Callable[..., list[rows.Work]], device: str) -> list[Launch]:
    return [work.launch for work in works(device=device)]


def calibration_case(head_dim: int, tile: tuple[int, int, int, int], device: str) -> list[Launch]:
    return [calibration.launch(head_dim, tile, device)]


def twins(record: dict) -> list[Twin]:
    """Yield every case of predicted.json: the calibration's kernel first, then those with a goal.

    Raises:
        ValueError: the record has a case that is not made here.
    """
    known = makers()
    predicted = record["attention"] + record["rows"]
    unknown = [row["case"] for row in predicted if row["case"] not in known]
    if unknown:
        raise ValueError(f"predicted, but there is nothing to measure it by: {', '.join(unknown)}")
    goals = {goal["case"] for goal in record["goals"]}
    predicted.sort(key=lambda row: row["case"] not in goals)
    return [_calibration(entry, Range(**record["factor"])) for entry in record["calibration"]] + [
        Twin(row["case"], tuple(map(PredictedLaunch.of, row["kernels"])), known[row["case"]]) for row in predicted
    ]


def _calibration(entry: dict, factor: Range) -> Twin:
    head_dim, tile = entry["published"]["head_dim"], tuple(entry["tile"])
    make: Make = partial(calibration_case, head_dim, tile)
    (launch,) = make(META)
    operations = calibration.operations(head_dim)
    replayed = operations / entry["predicted"]
    time = Range(replayed / factor.high + H100.gap, replayed / factor.low + H100.gap)
    # Bytes: q, k, v and out in fp16, logsumexp in fp32.
    moved = calibration.BATCH_HEADS * calibration.LENGTH * (4 * 2 * head_dim + 4)
    predicted = PredictedLaunch(launch.name, time, replayed, moved / H100.copy, moved, operations)
    return Twin(f"calibration d{head_dim}", (predicted,), make)


def compile_all(cases: Iterable[Twin], workers: int | None = None) -> None:
    """Compile the launches for an H100 into Triton's cache, side by side: one process would take minutes."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        # A kernel that does not compile fails again, and is recorded, when its case is measured.
        for job in [pool.submit(compile_case, twin.make) for twin in cases]:
            job.exception()


def compile_case(make: Make) -> None:
    """Compile the launches of a case for an H100."""
    for launch in make(META):
        triton_compiled(launch, CAPABILITY)
