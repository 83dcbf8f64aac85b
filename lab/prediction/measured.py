"""Time the cases of predicted.json on a GPU: the same launches, shapes, masks, lengths and dropout.

    python -m lab.prediction.measured --out results

The launches of a case run together and one by one, as replayed CUDA graphs over rotating tensors
(benchmarks/harness.py). Results are filled with NaN before; a case whose results are not finite afterwards gets no
time. measured.json and measured.md are written after every case; --resume continues after the last one. A case that
fails is recorded with its error. If the failure makes the device unusable, the other cases run in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.harness import compare
from benchmarks.launch_tensors import storages
from benchmarks.nvidia_smi import smi
from transformer_fast.testing import Timing
from transformer_fast.triton.launcher import Launch, run

from .comparison import TimedLaunch, entry, markdown, summary
from .kernels import CAPABILITY
from .report import RECORDS
from .twins import Twin, compile_all, twins

Timer = Callable[[Twin], tuple[Timing, list[TimedLaunch]]]
Inputs = tuple[list[Launch], list[Tensor]]
WHOLE = "ours"


def timed(twin: Twin, device: str = "cuda", seconds: float = 0.1) -> tuple[Timing, list[TimedLaunch]]:
    """Return the times of a case's launches together, and of each launch by itself.

    Raises:
        RuntimeError: a launch fails, cannot be captured, or leaves a result that is not finite.
    """

    names: list[str] = []

    def make_inputs() -> Inputs:
        launches = twin.make(device)
        tensors = storages(launches)
        run(launches, tensors[0])  # so that each single launch finds the results of earlier ones
        return launches, tensors

    def check(inputs: Inputs) -> None:
        names.extend(launch.name.replace(" torch.", " ") for launch in inputs[0])
        if len(names) != len(twin.launches):
            raise RuntimeError(f"predicted as {len(twin.launches)} launches, and made of {len(names)}")
        if not all(t.isfinite().all() for t in inputs[1] if t.is_floating_point()):
            raise RuntimeError("a result is not finite")

    def alone(index: int) -> Callable[[Inputs], None]:
        return lambda inputs: run(inputs[0][index : index + 1], inputs[1][0])

    calls: dict[str, Callable[[Inputs], None]] = {WHOLE: lambda inputs: run(inputs[0], inputs[1][0])}
    if len(twin.launches) > 1:
        calls |= {str(index): alone(index) for index in range(len(twin.launches))}
    result = compare(make_inputs, calls, check=check, seconds=seconds, device=device)
    if result.refused:
        raise RuntimeError("; ".join(result.refused.values()))
    whole = result.device[WHOLE]
    return whole, [TimedLaunch(name, result.device.get(str(index), whole)) for index, name in enumerate(names)]


def measure(cases: Iterable[Twin], timer: Timer, clock: Callable[[], int | None]) -> Iterator[dict]:
    """Yield the entry of each case as soon as it is known."""
    for twin in cases:
        try:
            yield entry(twin, *timer(twin), clock())
        except Exception as error:
            lines = str(error).strip().splitlines()
            yield {"case": twin.case, "error": f"{type(error).__name__}: {lines[0][:200] if lines else ''}"}


def machine() -> dict[str, object]:
    """Description of the machine that measures the cases."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": smi("driver_version"),
        "highest clock": smi("clocks.max.sm"),
        "memory clock": smi("clocks.mem"),
        "power limit": smi("power.limit"),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def clock() -> int | None:
    """Return the current clock of the multiprocessors in MHz; None without nvidia-smi."""
    digits = (smi("clocks.sm") or "").removesuffix(" MHz")
    return int(digits) if digits.isdigit() else None


def usable() -> bool:
    """Return True if the device still computes: an illegal access ends its context."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def write(out: Path, record: dict, on: dict, entries: list[dict]) -> dict:
    """measured.json and measured.md of the cases so far; the first of them."""
    made = {"machine": on, "summary": summary(record, on, entries), "cases": entries}
    for name, text in (("measured.json", json.dumps(made, indent=1) + "\n"), ("measured.md", markdown(made))):
        partly = out / f"{name}.part"
        partly.write_text(text)
        partly.replace(out / name)  # whole, whenever the process is stopped
    return made


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for measured.json and measured.md")
    parser.add_argument(
        "--predicted", type=Path, default=RECORDS / "predicted.json", help="record that `make predict` wrote"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="approximate timing period per launch")
    parser.add_argument("--resume", action="store_true", help="skip the cases that measured.json has")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure on (torch.cuda.is_available() is false)")
    record, on = json.loads(options.predicted.read_text()), machine()
    options.out.mkdir(parents=True, exist_ok=True)
    path, entries = options.out / "measured.json", []
    if options.resume and path.exists():
        before = json.loads(path.read_text())
        entries = before["cases"] if before["machine"] == on else []
    known = {e["case"] for e in entries}
    left = [twin for twin in twins(record) if twin.case not in known]
    if torch.cuda.get_device_capability() == divmod(CAPABILITY, 10):
        print(f"compiling {len(left)} cases", flush=True)
        compile_all(left)
    for found in measure(left, lambda twin: timed(twin, seconds=options.seconds), clock):
        entries.append(found)
        write(options.out, record, on, entries)
        said = found.get("error") or f"{found['measured']['median'] * 1e6:.1f} us, {found['ratio']:.2f} of predicted"
        print(f"{found['case']}: {said}", flush=True)
        if "error" in found and not usable():
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "--resume"])
        torch.cuda.empty_cache()
    print(write(options.out, record, on, entries)["summary"]["advice"])


if __name__ == "__main__":
    main()
