"""Time ours beside its peers on a GPU, in the cases that tell most, and save each result when it is known.

    python -m benchmarks.quick.headline --out results --seconds 150
    python -m benchmarks.quick.headline --only "norm layer 16384x4096"

The cases are those of the benchmark suite (bench_attention.py, bench_norm.py, ...), measured by its harness. A line of
headline.jsonl has a case's times (median, 20th and 80th percentile), what its peers refused, and the shares of the
ceilings measured in the same run. Cases run in one process until a CUDA graph could not be captured or a case failed;
the next case then starts in a new process. A case that ends without a result is not tried again.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .record import CUT, Deadline, Record, parser, settle_keys, versions

LIMIT = 45
"""Seconds of one case, its compilations included."""
LEFT_OUT = ("sdpa math",)
"""Peers that nobody expects to be fast, and that take long."""

Case = Callable[[Callable[..., None], str, bool], None]
"""A function of (versus, device, small) that calls one of the benchmark suite; small for a rehearsal."""


def attention(name: str) -> tuple[str, Case]:
    """A case of attention_cases.py, by its name there."""

    def run(versus: Callable[..., None], device: str, small: bool) -> None:
        import torch
        from attention_cases import CASES
        from bench_attention import test_attention

        case = next(case for case in CASES["cuda"] if str(case) == name)
        if small:
            length = case.L and min(case.L, 128)
            case = dataclasses.replace(case, B=2, H=2, L=length, dtype=torch.float32)
        test_attention(versus, device, device, case)

    return name, run


def norm(what: str, rows: int, d: int) -> tuple[str, Case]:
    def run(versus: Callable[..., None], device: str, small: bool) -> None:
        from bench_norm import test_norm

        for backward in (False, True):
            shape = (64 if small else rows, d)
            named = functools.partial(versus, suffix=" forward+backward" if backward else " forward")
            test_norm(named, device, device, shape, what, backward)

    return f"norm {what} {rows}x{d}", run


def embedding(*shape: int) -> tuple[str, Case]:
    def run(versus: Callable[..., None], device: str, small: bool) -> None:
        from bench_embedding import test_embed

        test_embed(versus, device, device, (2, 16, 64, 100) if small else shape, 0.1, True, "zipf")

    return f"embed {'x'.join(map(str, shape))} Zipf", run


def loss(*shape: int) -> tuple[str, Case]:
    def run(versus: Callable[..., None], device: str, small: bool) -> None:
        from bench_cross_entropy import test_linear_cross_entropy

        test_linear_cross_entropy(versus, device, device, (64, 64, 500) if small else shape, True)

    return f"loss {'x'.join(map(str, shape))}", run


def cases() -> dict[str, Case]:
    """Cases in order of worth."""
    return dict(
        [
            attention("sentences-b64h16k256-p0.1-bfloat16-train"),
            attention("long-b4h16k4096-p0.1-bfloat16-train"),
            norm("residual+dropout+layer", 16_384, 1024),
            attention("sentences-b64h16kmax-p0.1-bfloat16-train"),
            attention("full causal-b4h16k4096-p0.0-bfloat16-train"),
            embedding(64, 256, 768, 30_000),
            loss(8192, 512, 32_000),
            attention("long-b4h16k4096-p0.0-bfloat16-train"),
            norm("residual+dropout+layer", 16_384, 4096),
            attention("full-b4h16k4096-p0.1-bfloat16-train"),
            attention("sentences causal-b64h16k256-p0.1-bfloat16-train"),
            norm("layer", 16_384, 4096),
            attention("long causal-b4h16k4096-p0.1-bfloat16-train"),
            attention("sentences-b64h16k256-p0.0-bfloat16-train"),
            attention("full-b4h16k4096-p0.0-bfloat16-infer"),
            attention("full-b4h8k4096d128-p0.0-bfloat16-infer"),
            attention("sentences cross-b64h16k256-p0.1-bfloat16-train"),
            attention("sentences-b64h16k256-p0.1-float16-train"),
        ]
    )


class Measured:
    """Fixture ``versus`` of the benchmark suite for one case: measures, records and prints."""

    def __init__(self, name: str, record: Record, seconds: float, device: str) -> None:
        self.name, self.record, self.seconds, self.device = name, record, seconds, device
        self.spoiled = False

    def __call__(
        self, make_inputs: Any, calls: dict[str, Any], *, check: Any = None, bytes_moved: float = 0.0,
        operations: float = 0.0, suffix: str = "",
    ) -> None:  # fmt: skip
        import harness
        import torch

        calls = {name: call for name, call in calls.items() if name not in LEFT_OUT}
        found = harness.compare(make_inputs, calls, check=check, seconds=self.seconds, device=self.device)
        self.spoiled |= found.spoiled
        times = found.device if "ours" in found.device else found.wall
        ours, limits = times["ours"].median, harness.ceilings(self.device)
        row = {
            "case": self.name + suffix,
            **versions(self.device),
            "us": {name: round(t.median * 1e6, 2) for name, t in found.device.items()},
            "p20": {name: round(t.p20 * 1e6, 2) for name, t in found.device.items()},
            "p80": {name: round(t.p80 * 1e6, 2) for name, t in found.device.items()},
            "wall_us": {name: round(t.median * 1e6, 1) for name, t in found.wall.items()},
            "peak_memory": found.peak_memory,
            "refused": found.refused,
            "bytes": bytes_moved,
            "operations": operations,
            "ceilings": limits,
            "share_of_copy": round(bytes_moved / ours / limits["copy"], 3),
            "share_of_matmul": round(operations / ours / limits["matmul"], 3),
        }
        self.record.add(row)
        ratios = ", ".join(f"{name} {t.median / ours:.2f}x" for name, t in times.items() if name != "ours")
        shares = f"{row['share_of_copy']:.2f} of a copy, {row['share_of_matmul']:.2f} of a matmul"
        print(
            f"{row['case']}: ours {ours * 1e6:.1f} us ({shares}); {ratios}; refused {sorted(found.refused)}", flush=True
        )
        if self.device == "cuda" and not self.spoiled:
            torch.cuda.empty_cache()


def work(names: list[str], record: Record, current: Path, seconds: float, device: str) -> None:
    """Measure cases in this process, until a failed capture or another failure."""
    settle_keys()
    for name in names:
        current.write_text(name)
        versus = Measured(name, record, seconds, device)
        try:
            cases()[name](versus, device, device == "cpu")
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            add_failure(record, name, f"{type(error).__name__}: {lines[0][:300]}")
            return
        record.add({"case": name, "ended": True})
        if versus.spoiled:
            return


def add_failure(record: Record, name: str, reason: str) -> None:
    print(f"{name}: FAILED: {reason}", flush=True)
    record.add({"case": name, "ended": True, "error": reason})


def left(record: Record, names: list[str]) -> Iterator[str]:
    """Yield the cases that have not ended."""
    ended = {row["case"] for row in record.rows() if row.get("ended")}
    return (name for name in names if name not in ended)


def supervise(options: Any, record: Record, current: Path, names: list[str]) -> int:
    """Run workers, each with the cases that are left; one that hangs is killed, and its case not tried again.

    Returns:
        CUT if there was no time for all cases.
    """
    deadline = Deadline(options.seconds)
    while (todo := list(left(record, names))) and deadline.left() > 12:
        current.write_text("")
        command = [sys.executable, "-m", "benchmarks.quick.headline", "--out", options.out, "--device", options.device]
        child = subprocess.Popen([*map(str, command), "--each", str(options.each), "--worker", *todo])
        seen, since = "", time.monotonic()
        while child.poll() is None and deadline.left() > 0 and time.monotonic() - since < LIMIT:
            time.sleep(0.2)
            if (now := current.read_text()) != seen:
                seen, since = now, time.monotonic()
        if child.poll() is None:
            child.kill()
            child.wait()
            if deadline.left() <= 0:  # not the case's fault: it may be tried again
                break
            add_failure(record, seen or todo[0], f"killed after {LIMIT} s")
        elif child.returncode and (seen or todo[0]) in left(record, names):
            add_failure(record, seen or todo[0], f"the process ended with exit status {child.returncode}")
    if late := list(left(record, names)):
        print("no time for:", ", ".join(late))
        return CUT
    return 0


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 150)
    options_parser.add_argument("--each", type=float, default=0.15, help="about how long each way is timed")
    options_parser.add_argument("--only", nargs="+", choices=list(cases()), metavar="CASE", help="these cases only")
    options_parser.add_argument("--worker", nargs="+", help="measure these in this process")
    options = options_parser.parse_args(given)
    record, current = Record(options.out / "headline.jsonl", "case"), options.out / "headline.current"
    if options.worker:
        work(options.worker, record, current, options.each, options.device)
        return 0
    return supervise(options, record, current, options.only or list(cases()))


if __name__ == "__main__":
    sys.exit(main())
