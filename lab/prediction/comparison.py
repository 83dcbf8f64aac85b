"""Measured times beside predicted ones: by case, and the calibration factor that the measurements give."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from transformer_fast.testing import Timing

from .machine import H100
from .predictions import Range
from .report import microseconds, table
from .twins import PredictedLaunch, Twin

SHORTEST = 1e-5
"""Seconds: of shorter launches the start and the gap are too much to find a factor by."""


@dataclass(frozen=True)
class TimedLaunch:
    """A launch that ran: the name of its kernel, and its time in a replayed CUDA graph."""

    name: str
    timing: Timing


@dataclass(frozen=True)
class Found:
    """Median of ratios, the range of the middle 80 %, and their number."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, ratios: list[float]) -> Found | None:
        if not ratios:
            return None
        cuts = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
        return cls(statistics.median(ratios), cuts[0], cuts[-1], len(ratios))


def entry(twin: Twin, whole: Timing, launches: list[TimedLaunch], clock: int | None = None) -> dict:
    """Return a measured case in the form of measured.json.

    Args:
        twin: the case with its predictions.
        whole: time of its launches together.
        launches: of each of them alone, in order.
        clock: of the multiprocessors just after, in MHz, if known.
    """
    each = zip(twin.launches, launches, strict=True)
    return {
        "case": twin.case,
        **_beside(whole, twin.time),
        "clock": clock,
        "launches": [_launch(predicted, timed) for predicted, timed in each],
    }


def _beside(measured: Timing, predicted: Range) -> dict:
    return {
        "measured": asdict(measured),
        "predicted": asdict(predicted),
        "ratio": measured.median / predicted.middle,
        "inside": predicted.low <= measured.median <= predicted.high,
    }


def _launch(predicted: PredictedLaunch, timed: TimedLaunch) -> dict:
    """Return the factor that predicts the speed of a launch with products that takes longer than its bytes; for a
    launch that takes as long as its bytes, the speed of a copy that predicts it. Else None.

    """
    own = timed.timing.median - H100.gap
    as_predicted = timed.name == predicted.name
    says = as_predicted and max(predicted.replayed, predicted.copied) >= SHORTEST and own > 0
    of_products = says and predicted.operations > 0 and predicted.replayed > predicted.copied
    of_memory = says and predicted.time.high <= predicted.copied + 1.001 * H100.gap
    return {
        "name": timed.name,
        **_beside(timed.timing, predicted.time),
        "as_predicted": as_predicted,
        "factor": predicted.replayed / own if of_products else None,
        "copy": predicted.moved / own if of_memory else None,
    }


def summary(record: dict, machine: dict, entries: Iterable[dict]) -> dict:
    """Summary of all measured cases, with what makes it doubtful.

    Args:
        record: predicted.json.
        machine: what the cases were measured on.
        entries: of :func:`entry`, or {"case", "error"}.
    """
    entries = list(entries)
    done = [e for e in entries if "error" not in e]
    launches = [launch for e in done for launch in e["launches"]]
    found = {
        "cases": len(entries),
        "failed": len(entries) - len(done),
        "inside": sum(e["inside"] for e in done),
        "ratio": Found.of([e["ratio"] for e in done]),
        "factor": Found.of([launch["factor"] for launch in launches if launch["factor"]]),
        "copy": Found.of([launch["copy"] for launch in launches if launch["copy"]]),
        "clock": Found.of([e["clock"] * 1e6 for e in done if e["clock"]]),
    }
    found = {name: asdict(value) if isinstance(value, Found) else value for name, value in found.items()}
    return found | {"notes": notes(record, machine, launches), "advice": advice(record, machine, found)}


def is_h100(machine: dict) -> bool:
    return "H100" in machine["device"] and machine["multiprocessors"] == H100.multiprocessors


def notes(record: dict, machine: dict, launches: list[dict]) -> list[str]:
    """Differences between the predicted machine and the measured one."""
    found = []
    if not is_h100(machine):
        found.append(
            f"Predicted for an H100 SXM with {H100.multiprocessors} multiprocessors, measured on {machine['device']} "
            f"with {machine['multiprocessors']}: the ratios compare two machines, and say nothing of the predictions."
        )
    if machine["triton"] != record["triton"]:
        found.append(f"Predicted from the machine code of Triton {record['triton']}, not of {machine['triton']}.")
    others = {launch["name"] for launch in launches if not launch["as_predicted"]}
    if others:
        found.append(f"Kernels other than predicted, left out of factor and copy: {'; '.join(sorted(others))}.")
    return found


def advice(record: dict, machine: dict, found: dict) -> str:
    """Return one sentence: the assumptions to change, with new values."""
    if not is_h100(machine):
        return "Change no assumption by these measurements: the table is of an H100 SXM."
    changes = []
    if (factor := found["factor"]) is not None:
        now = record["factor"]
        changes.append(
            f"the factor to {factor['low']:.2f}-{factor['high']:.2f} (it is {now['low']:.2f}-{now['high']:.2f}, from "
            f"calibration.py; found with the table's clock of {H100.clock / 1e6:.0f} MHz)"
        )
    if (copy := found["copy"]) is not None:
        changes.append(f"`copy` to {copy['median']:.3g} byte/s (it is {H100.copy:.3g})")
    return f"Change {'; and '.join(changes)}." if changes else "No measured launch says which assumption to change."


def markdown(made: dict) -> str:
    """measured.json as tables."""
    machine, found = made["machine"], made["summary"]
    lines = ["# Measured beside predicted", "", ", ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    lines += [f"\n**{note}**" for note in found["notes"]]
    done = found["cases"] - found["failed"]
    lines += [
        "",
        f"{done} cases measured, {found['failed']} failed; {found['inside']} of {done} inside their range.",
        "",
    ]
    rows = [
        [what, f"{f['median'] / unit:.2f}", f"{f['low'] / unit:.2f}-{f['high'] / unit:.2f}", str(f["count"])]
        for what, f, unit in (
            ("measured / predicted time, by case", found["ratio"], 1),
            ("factor: replayed / measured time, by launch with products", found["factor"], 1),
            ("copy, TB/s: bytes / measured time, by launch bound by memory", found["copy"], 1e12),
            ("clock of the multiprocessors after a case, GHz", found["clock"], 1e9),
        )
        if f is not None
    ]
    text = "\n".join(lines) + "\n" + table(["found", "median", "8 of 10 lie in", "of"], rows)
    text += f"\n{found['advice']}\n\nMicroseconds; measured: the median, and the 20th to the 80th percentile.\n\n"
    head = ["case", "measured", "spread", "predicted", "measured / predicted", "", "launches: measured / predicted"]
    return text + table(head, map(cells, made["cases"]))


def cells(e: dict) -> list[str]:
    """Return the cells of a row of the table."""
    if "error" in e:
        return [e["case"], "failed", "", "", "", "", e["error"].replace("|", "\\|")]
    measured = e["measured"]
    each = ", ".join(f"{n['ratio']:.2f}" if n["as_predicted"] else "another kernel" for n in e["launches"])
    inside = "inside" if e["inside"] else "outside"
    spread = microseconds(Range(measured["p20"], measured["p80"]))
    predicted = microseconds(Range(**e["predicted"]))
    return [e["case"], f"{measured['median'] * 1e6:.1f}", spread, predicted, f"{e['ratio']:.2f}", inside, each]
