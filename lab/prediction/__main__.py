"""Predict the times of the Triton kernels on an H100 from their machine code; README.md has the method.

python -m lab.prediction                                       all cases, into lab/records
python -m lab.prediction full-b4h16k4096-p0.0-bfloat16-infer   one case of benchmarks/attention_cases.py
python -m lab.prediction CASE --packed --tile forward=64x64,4,3,128
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.attention_cases import CUDA, Case
from benchmarks.attention_launches import tiles
from lab.prediction.attention import launched
from lab.prediction.predictions import Prediction, Range, predict
from lab.prediction.report import RECORDS, write
from transformer_fast.triton.configs import AttentionConfig


def tile(text: str) -> tuple[str, AttentionConfig]:
    """KERNEL=QUERIESxKEYS,WARPS,STAGES[,REGISTERS]."""
    kernel, _, rest = text.partition("=")
    size, *numbers = rest.split(",")
    queries, keys = map(int, size.split("x"))
    return kernel, AttentionConfig(queries, keys, *map(int, numbers))


def show(prediction: Prediction) -> None:
    p = prediction
    print(
        f"\n{p.name}: {p.registers} registers, {p.spilled} bytes spilled ({p.spills} accesses counted below), ", end=""
    )
    print(f"{p.shared / 1024:.0f} KB, {p.programs} programs, {p.resident} a multiprocessor ({p.limited_by})")
    print("  instructions:", ", ".join(f"{pipe} {n}" for pipe, n in p.instructions.items()))
    print("  busy:", ", ".join(f"{pipe} {share:.0%}" for pipe, share in p.busy.items()), "- binding:", p.binding)
    rate = f", {p.operations / p.time.high / 1e12:.0f}-{p.operations / p.time.low / 1e12:.0f} TFLOP/s"
    print(f"  predicted {p.time.low * 1e6:.1f}-{p.time.high * 1e6:.1f} us{rate if p.operations else ''}", flush=True)


def case_named(name: str) -> Case:
    found = {str(case): case for case in CUDA}
    if name not in found:
        raise SystemExit(f"no case {name}; there are:\n" + "\n".join(found))
    return found[name]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.prediction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="?", help="case of attention_cases.py (default: all)")
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder for the record of all cases")
    parser.add_argument("--packed", action="store_true", help="predict the packed batch, without padding")
    parser.add_argument(
        "--tile", type=tile, action="append", default=[], metavar="KERNEL=64x64,4,3[,128]", help=tile.__doc__
    )
    arguments = parser.parse_args()
    if arguments.case is None:
        write(arguments.out, lambda line: print(line, flush=True))
        return
    record = RECORDS / "predicted.json"
    if not record.is_file():
        raise SystemExit(f"{record} holds the calibration, and is missing: run `make predict` first")
    by = Range(**json.loads(record.read_text())["factor"])
    case, total = case_named(arguments.case), Range(0.0, 0.0)
    with tiles(case, arguments.packed, dict(arguments.tile)):
        for one in launched(case, arguments.packed):
            prediction = predict(one, by)
            show(prediction)
            total += prediction.time
    print(f"\n{case}: predicted {total.low * 1e6:.1f}-{total.high * 1e6:.1f} us")


if __name__ == "__main__":
    main()
