"""Profile kernels with Nsight Compute, ours and the peers' that are faster: what bounds each of them?

    python -m benchmarks.quick.profile --out results --seconds 100

Each way of WAYS computes its case once under ncu, in one process. profile.csv has a line per kernel with all of ncu's
metrics, and profile.jsonl has the metrics of COLUMNS, with the case and the way.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .record import CUT, Deadline, Record, parser, settle_keys

LONG, CAUSAL, FULL, D128 = (
    "long-b4h16k4096-p0.1-bfloat16-train",
    "full causal-b4h16k4096-p0.0-bfloat16-train",
    "full-b4h16k4096-p0.1-bfloat16-train",
    "full-b4h8k4096d128-p0.0-bfloat16-infer",
)
SENTENCES, NORM = "sentences-b64h16k256-p0.1-bfloat16-train", "norm residual+dropout+layer 16384x1024"
WAYS = (
    (LONG, "ours packed"), (LONG, "FA2 varlen"), (NORM, "ours"), (LONG, "ours"), (CAUSAL, "ours"),
    (CAUSAL, "sdpa cudnn_attention"), (FULL, "ours"), (FULL, "sdpa cudnn_attention"), (SENTENCES, "ours"),
    (SENTENCES, "ours packed"), (D128, "ours"), (D128, "sdpa cudnn_attention"),
)  # fmt: skip
"""Cases of benchmarks.quick.headline and their ways, in order of worth."""
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy",
            "LaunchStats", "SchedulerStats")  # fmt: skip
BETWEEN = "erfinv"
"""Word in the name of a kernel that runs before each way."""
COLUMNS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "registers": ("launch__registers_per_thread", 1),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1e-2),
    "multiprocessors": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
    "memory": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1e-2),
    "issued": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1e-2),
}
"""Name here: name at ncu, and its unit; all but the first two are shares of the most that is possible."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
"""ncu's name of how many warps wait for a reason, which the group is, per instruction that is issued."""


def calls_of(name: str, way: str, device: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """(function that makes inputs, function of them) of a way of a headline case, with its backward if it has one."""
    from .headline import cases

    found = []

    def versus(make_inputs: Any, calls: dict[str, Any], **_: Any) -> None:
        found.append((make_inputs, calls[way]))

    cases()[name](versus, device, False)
    return found[-1]


def run_ways(seconds: float) -> None:
    """Run each way twice, the second time for the profiler, until the time is over; print the names of those run."""
    import torch

    settle_keys()
    deadline, between = Deadline(seconds), torch.zeros(1, device="cuda")
    for name, way in WAYS:
        if deadline.left() < 0:
            print(f"no time for {name} {way}", flush=True)
            continue
        make_inputs, call = calls_of(name, way, "cuda")
        inputs = make_inputs()
        call(inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        between.erfinv_()
        call(inputs)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        print(f"{name} {way}: {seconds - deadline.left():.0f} s", flush=True)


def rows(profile: str) -> Iterator[dict[str, Any]]:
    """Yield the results of ncu's raw page: those of each kernel, after a line of names and one of units."""
    lines = [line for line in profile.splitlines() if line.startswith('"')]
    number = -1
    for kernel in list(csv.DictReader(lines))[1:]:
        if BETWEEN in kernel["Kernel Name"]:
            number += 1
            continue
        name, way = WAYS[number]
        waits = {found[1]: _number(kernel[column]) for column in kernel if (found := STALL.fullmatch(column))}
        stalls = {reason: value for reason, value in waits.items() if value is not None}
        row: dict[str, Any] = {"case": name, "way": way, "kernel": kernel["Kernel Name"].split("(")[0][:100]}
        for title, (metric, unit) in COLUMNS.items():
            value = _number(kernel.get(metric))
            row[title] = None if value is None else round(value * unit, 3)
        tensor = [_number(value) for column, value in kernel.items() if "pipe_tensor" in column and ".pct" in column]
        row["tensor cores"] = max((round(value / 100, 3) for value in tensor if value is not None), default=None)
        row["stalls"] = dict(sorted(stalls.items(), key=lambda item: -item[1])[:3])
        yield row


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 100)
    options_parser.add_argument("--under-ncu", action="store_true", help="only run the ways")
    options = options_parser.parse_args(given)
    if options.under_ncu:
        run_ways(options.seconds)
        return 0
    report = Path(options.out) / "profile.ncu-rep"
    sections = [part for section in SECTIONS for part in ("--section", section)]
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "-f", "-o", str(report), *sections]
    module = ["-m", "benchmarks.quick.profile", "--under-ncu", "--seconds", str(options.seconds * 0.7)]
    code = subprocess.run([*ncu, sys.executable, *module], timeout=options.seconds, check=False).returncode
    page = ["ncu", "--import", str(report), "--page", "raw", "--csv", "--print-units", "base"]
    text = subprocess.run(page, stdout=subprocess.PIPE, text=True, check=True).stdout
    (options.out / "profile.csv").write_text(text)
    record = Record(options.out / "profile.jsonl", "case", "way")
    for row in rows(text):
        record.add(row)
        print(" ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return code or CUT * (len(record.done()) < len(WAYS))


if __name__ == "__main__":
    sys.exit(main())
