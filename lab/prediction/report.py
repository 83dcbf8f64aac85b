"""The record of all predictions: lab/records/predicted.json and predicted.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from benchmarks.attention_cases import CUDA, Case

from . import attention, rows
from .calibration import Calibration, calibrate, factor
from .machine import assumptions
from .pipes import PIPES
from .predictions import Prediction, Range, predict
from .published import GOALS, PEERS, Goal

RECORDS = Path(__file__).resolve().parents[1] / "records"
CASES = [
    *(case for case in CUDA if case.dtype.itemsize == 2),
    Case("full", 4, 8, 4096, D=128),
    *(Case("long", 4, 8, 4096, D=128, dropout_p=p) for p in (0.0, 0.1)),
]
"""The benchmark's cases on tensor cores, and d 128 in training."""


@dataclass(frozen=True)
class Row:
    """A case with the predictions of its launches."""

    case: str
    kernels: list[Prediction]

    @property
    def time(self) -> Range:
        return sum((p.time for p in self.kernels), Range(0.0, 0.0))

    @property
    def binding(self) -> str:
        """Limit of the launch that takes longest."""
        return max(self.kernels, key=lambda p: p.time.middle).binding

    @property
    def slowest(self) -> str:
        """The launch that takes longest."""
        return short(max(self.kernels, key=lambda p: p.time.middle).name)


def attention_row(case: Case, packed: bool, by: Range) -> Row:
    """Predict a case of attention."""
    return Row(f"{case}{' packed' * packed}", [predict(one, by) for one in attention.launched(case, packed)])


def row_kernels_row(name: str, by: Range) -> Row:
    """Predict a case of :func:`.rows.cases`."""
    return Row(name, [predict(work.compiled(), by) for work in rows.cases()[name]()])


def attention_names() -> list[tuple[Case, bool]]:
    """Every case, and once more packed where it has padding."""
    return [(case, packed) for case in CASES for packed in (False, True)[: 1 + (case.lengths != "full")]]


def predict_all(say: Callable[[str], None], workers: int = 2) -> dict[str, object]:
    """Return the record; call `say` with a line per finished case."""
    calibrations = calibrate(say)
    by = factor(calibrations)
    say(f"published by predicted speed: {by.low:.3f} to {by.high:.3f}")
    found: dict[str, list[Row]] = {"attention": [], "rows": []}
    with ProcessPoolExecutor(workers) as pool:
        # Cases whose kernels are the same go to one worker, which compiles and replays them once.
        groups: dict[tuple[object, ...], list[tuple[Case, bool]]] = {}
        for case, packed in attention_names():
            groups.setdefault((case.D, case.dropout_p > 0, case.causal, packed), []).append((case, packed))
        jobs = [pool.submit(_group, group, by) for group in groups.values()]
        others = [pool.submit(row_kernels_row, name, by) for name in rows.cases()]
        for job in jobs:
            for row in job.result():
                found["attention"].append(row)
                say(line(row))
        for other in others:
            found["rows"].append(other.result())
            say(line(found["rows"][-1]))
    order = [f"{case}{' packed' * packed}" for case, packed in attention_names()]
    found["attention"].sort(key=lambda row: order.index(row.case))
    return record(calibrations, found)


def _group(group: list[tuple[Case, bool]], by: Range) -> list[Row]:
    return [attention_row(case, packed, by) for case, packed in group]


def line(row: Row) -> str:
    return f"{row.case}: predicted {microseconds(row.time)} us, {row.slowest} {row.binding}"


def record(calibrations: list[Calibration], found: dict[str, list[Row]]) -> dict[str, object]:
    """Everything that was predicted, as JSON takes it."""
    by = factor(calibrations)
    return {
        "what": "predicted from machine code, never measured",
        "triton": triton.__version__,
        "factor": asdict(by),
        "calibration": [asdict(c) | {"factor": asdict(c.factor)} for c in calibrations],
        "assumptions": assumptions(),
        "goals": [judged(goal, [*found["attention"], *found["rows"]]) for goal in GOALS],
        **{kind: [asdict(row) | {"time": asdict(row.time)} for row in those] for kind, those in found.items()},
    }


def judged(goal: Goal, found: Iterable[Row]) -> dict[str, object]:
    """Return a goal with its prediction, and the limiting resource if it is missed."""
    row = next((row for row in found if row.case == goal.case), None)
    if row is None:
        raise ValueError(f"the goal {goal.what} is of {goal.case}, which is not predicted")
    ends = [goal.value_of(seconds, row.kernels) for seconds in (row.time.low, row.time.high)]
    middle = goal.value_of(row.time.middle, row.kernels)
    holds = middle <= goal.limit if goal.at_most else middle >= goal.limit
    return {
        "what": goal.what,
        "case": goal.case,
        "limit": goal.limit,
        "unit": goal.unit,
        "predicted": sorted(ends),
        "holds": holds,
        "binding": f"{row.slowest}: {row.binding}",
    }


def short(name: str) -> str:
    return name.removeprefix("attention ").split(" ")[0] if name.startswith("attention") else name


def microseconds(time: Range) -> str:
    return (
        f"{time.low * 1e6:.0f}-{time.high * 1e6:.0f}"
        if time.low > 2e-5
        else f"{time.low * 1e6:.1f}-{time.high * 1e6:.1f}"
    )


def markdown(made: dict) -> str:
    """Return the record as tables."""
    by = made["factor"]
    text = "# Predicted for an H100\n\nMade by `make predict`, from the machine code that Triton compiles for sm_90. "
    text += "**Nothing here is measured.** How: `lab/prediction/README.md`.\n\n"
    text += "## Goals\n\nA goal holds if the middle of its range does.\n\n"
    head = ["goal", "limit", "predicted", "holds", "slowest launch and what binds it"]
    text += table(head, (goal_cells(goal) for goal in made["goals"]))
    text += "\n## Calibration\n\nA kernel that others have measured, compiled and replayed in the same way. "
    text += f"Predictions are multiplied by {by['low']:.2f} to {by['high']:.2f} (in speed).\n\n"
    head = ["kernel", "tile, warps, stages", "replayed TFLOP/s", "published", "factor", "source"]
    text += table(head, (calibration_cells(c) for c in made["calibration"]))
    text += "\n## Attention\n\n"
    text += table(
        ["case", "us", "of which", "slowest launch", "bound by"], (case_cells(row) for row in made["attention"])
    )
    text += "\n## Norm, dropout, loss\n\nGB/s of what is read and written at least once; a copy: 3,000.\n\n"
    text += table(["case", "us", "GB/s", "of which", "bound by"], (row_cells(row) for row in made["rows"]))
    text += "\n## Peers\n\nPublished by others, on an H100 SXM where nothing else is said.\n\n"
    text += table(["what", "figure", "source"], ([p.what, p.figure, p.source] for p in PEERS))
    text += (
        "\n## Kernels\n\nInstructions of one warp in a step of the main loop, or in all where there is none, by pipe; "
    )
    text += "busy: how much of the time the pipe works. TFLOP/s: of the products that are needed.\n\n"
    head = ["kernel", "in", "registers", "spilled", "KB", "programs / SM", "for lack of", *PIPES, "bound by", "TFLOP/s"]
    text += table(head, kernel_rows(made["attention"] + made["rows"]))
    text += "\n## Assumptions\n\n"
    cells = ([a["name"], f"{a['value']:g}", a["unit"], a["source"]] for a in made["assumptions"])
    return text + table(["name", "value", "unit", "source"], cells)


def goal_cells(goal: dict) -> list[str]:
    low, high = goal["predicted"]
    limit = f"{'at most' if goal['unit'] == 'us' else 'at least'} {goal['limit']:g} {goal['unit']}"
    return [goal["what"], limit, f"{low:.0f}-{high:.0f}", "yes" if goal["holds"] else "no", goal["binding"]]


def calibration_cells(c: dict) -> list[str]:
    published, by = c["published"], c["factor"]
    low, high = (f"{published[end] / 1e12:.0f}" for end in ("low", "high"))
    factors = f"{by['low']:.2f}" if low == high else f"{by['low']:.2f}-{by['high']:.2f}"
    queries, keys, warps, stages = c["tile"]
    figure = low if low == high else f"{low}-{high}"
    tile = f"{queries}x{keys}, {warps}, {stages}"
    return [f"d {published['head_dim']}", tile, f"{c['predicted'] / 1e12:.0f}", figure, factors, published["source"]]


def times(row: dict) -> str:
    return ", ".join(f"{short(p['name'])} {microseconds(Range(**p['time']))}" for p in row["kernels"])


def case_cells(row: dict) -> list[str]:
    slowest = max(row["kernels"], key=lambda p: p["time"]["low"] + p["time"]["high"])
    return [row["case"], microseconds(Range(**row["time"])), times(row), short(slowest["name"]), slowest["binding"]]


def row_cells(row: dict) -> list[str]:
    slowest = max(row["kernels"], key=lambda p: p["time"]["low"] + p["time"]["high"])
    time, moved = Range(**row["time"]), row["kernels"][0]["moved"]
    rate = f"{moved / time.high / 1e9:.0f}-{moved / time.low / 1e9:.0f}"
    parts = " + ".join(microseconds(Range(**p["time"])) for p in row["kernels"])
    return [row["case"], microseconds(time), rate, parts, slowest["binding"]]


def kernel_rows(found: list[dict]) -> Iterable[list[str]]:
    """Each compiled kernel once, in the case with the most operations; those of one name differ in what is masked."""
    best: dict[tuple[object, ...], tuple[dict, str]] = {}
    for p, case in ((p, row["case"]) for row in found for p in row["kernels"]):
        key = (p["name"], p["registers"], tuple(p["instructions"].values()))
        if key not in best or p["operations"] > best[key][0]["operations"]:
            best[key] = p, case
    for _, (p, case) in sorted(best.items()):
        speed = [p["operations"] / p["time"][end] / 1e12 for end in ("high", "low")]
        pipes = [f"{p['instructions'][pipe]} ({p['busy'][pipe]:.0%})" for pipe in PIPES]
        spilled = f"{p['spilled']}, {p['spills']} accesses" if p["spilled"] else "0"
        yield [
            p["name"], case, str(p["registers"]), spilled, f"{p['shared'] / 1024:.0f}", str(p["resident"]),
            p["limited_by"], *pipes, p["binding"], f"{speed[0]:.0f}-{speed[1]:.0f}" if p["operations"] else "",
        ]  # fmt: skip


def table(head: list[str], cells: Iterable[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in [head, ["---"] * len(head), *cells])


def write(out: Path, say: Callable[[str], None]) -> None:
    """Predict everything and write both files."""
    made = json.loads(json.dumps(predict_all(say)))
    out.mkdir(parents=True, exist_ok=True)
    (out / "predicted.json").write_text(json.dumps(made, indent=1) + "\n")
    (out / "predicted.md").write_text(markdown(made))
