"""Time other tiles than those of the tile tables on a GPU, kernel by kernel: the tables follow what was measured.

    python -m benchmarks.quick.tiles --out results --seconds 60

For each case and kernel of attention, a grid of tiles, pipeline depths and limits of registers runs on the same
tensors, interleaved, beside the entry of the table ("table"). A tile whose results differ from the entry's gets no
time. A line of tiles.jsonl has the times of all tiles of a kernel in a case, fastest first.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import Case
from benchmarks.attention_launches import launches as launches_of
from benchmarks.attention_launches import tiles
from benchmarks.harness import compare
from benchmarks.launch_tensors import META, storages
from transformer_fast.triton.configs import ATTENTION_KERNELS, AttentionConfig
from transformer_fast.triton.launcher import Launch, run

from .record import CUT, Deadline, Record, parser, settle_keys, versions

CASES = {
    "padded": (Case("sentences", 64, 16, 256, dropout_p=0.1), False),
    "kept bits": (Case("long", 4, 16, 4096, dropout_p=0.1), False),
    "packed": (Case("sentences", 64, 16, 256, dropout_p=0.1), True),
    "causal": (Case("full", 4, 16, 4096, causal=True), False),
    "long packed": (Case("long", 4, 16, 4096, dropout_p=0.1), True),
    "d128": (Case("full", 4, 8, 4096, D=128), False),
}
"""By name: (case, packed), in order of worth."""
RESULTS = {"forward": ("out",), "grad_q": ("grad_q",), "grad_kv": ("grad_k", "grad_v")}
ROWS_OF_QUERIES = ((64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 64, 8), (128, 128, 8), (128, 64, 4))
ROWS_OF_KEYS = ((64, 32, 4), (64, 64, 4), (64, 64, 8), (64, 128, 8), (128, 64, 8), (128, 128, 8), (32, 64, 4))
REGISTERS = {4: (None, 168), 8: (None, 128)}
"""Limits of registers by warps: none, and the one with which more programs fit."""


def candidates(kernel: str) -> Iterator[AttentionConfig]:
    """Configs of the grid for "forward", "grad_q" or "grad_kv"."""
    tiles = ROWS_OF_KEYS if kernel == "grad_kv" else ROWS_OF_QUERIES
    for (queries, keys, warps), stages in itertools.product(tiles, (2, 3)):
        for registers in REGISTERS[warps]:
            yield AttentionConfig(queries, keys, warps, stages, registers)


def on_meta(case: Case, packed: bool, kernel: str, config: AttentionConfig | None) -> Launch:
    """The launch of a kernel without its tensors, with another config than the table's unless that is None."""
    overrides = {} if config is None else {kernel: config}
    with tiles(case, packed, overrides):
        return dict(launches_of(case, packed, META))[kernel]


def with_tensors(launch: Launch, given: Launch) -> Launch:
    """A launch on the tensors of another launch of the same kernel.

    Raises:
        ValueError: the launches take different tensors. With 32 keys per tile a forward keeps no bits of dropout.
    """
    taken = [{name for name, value in one.arguments.items() if isinstance(value, Tensor)} for one in (launch, given)]
    if others := sorted(taken[0] ^ taken[1]):
        raise ValueError(f"another call: one of the two has no {', '.join(others)}")
    arguments = {
        name: given.arguments[name] if isinstance(value, Tensor) else value for name, value in launch.arguments.items()
    }
    return replace(launch, arguments=arguments)


def results(kernel: str, launch: Launch) -> dict[str, Tensor]:
    """Return the tensors that a launch writes, without statistics."""
    return {name: launch.arguments[name] for name in RESULTS[kernel]}


def difference(launch: Launch, written: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of what a launch writes to the expected results, as a share of the largest number."""
    for tensor in written.values():
        tensor.fill_(float("nan"))
    run([launch], next(iter(written.values())))
    worst = 0.0
    for name, tensor in written.items():
        error = (tensor.float() - expected[name].float()).abs().amax() / expected[name].float().abs().amax()
        worst = max(worst, float(error.nan_to_num(float("inf"))))
    return worst


def measure(name: str, kernel: str, device: str, seconds: float) -> dict[str, Any]:
    """Time all tiles of a kernel in a case."""
    case, packed = CASES[name]
    launches = launches_of(case, packed, device)
    run([launch for _, launch in launches], storages([launches[0][1]])[0])
    given = dict(launches)[kernel]
    tensors = storages([given])
    written = results(kernel, given)
    expected = {name: t.clone() for name, t in written.items()}
    calls, refused = {"ours": functools.partial(lambda one, _: run([one], tensors[0]), given)}, {}
    for config in candidates(kernel):
        label = "x".join(map(str, astuple(config)))
        try:
            launch = with_tensors(on_meta(case, packed, kernel, config), given)
            if (error := difference(launch, written, expected)) > 2e-2:
                refused[label] = f"differs by {error:.1e} of the largest result"
                continue
        except Exception as failure:  # too much shared memory, say
            refused[label] = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:100]}"
            continue
        calls[label] = functools.partial(lambda one, _: run([one], tensors[0]), launch)
    found = compare(lambda: tensors, calls, seconds=seconds, device=device)
    times = sorted(found.device.items(), key=lambda item: item[1].median)
    return {
        "case": name, "kernel": kernel, "of": str(case), **versions(device), "table": given.name,
        "us": {label if label != "ours" else "table": round(t.median * 1e6, 2) for label, t in times},
        "refused": refused | found.refused,
    }  # fmt: skip


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 60)
    options_parser.add_argument("--each", type=float, default=0.02, help="about how long each tile is timed")
    options_parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these cases only")
    options = options_parser.parse_args(given)
    if options.device == "cpu":
        print("tiles are compared on a GPU; without one, tools/stand_in_gpu.py compiles them")
        return 0
    settle_keys()
    record, deadline = Record(options.out / "tiles.jsonl", "case", "kernel"), Deadline(options.seconds)
    done, late = record.done(), False
    for name in options.only:
        kernels = ATTENTION_KERNELS if CASES[name][0].backward else ("forward",)
        for kernel in kernels:
            if (name, kernel) in done:
                continue
            if deadline.left() < 3:
                print(f"no time for {name} {kernel}", flush=True)
                late = True
                continue
            try:
                row = measure(name, kernel, options.device, options.each)
            except Exception as error:
                print(f"{name} {kernel}: FAILED: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            record.add(row)
            (best, time), ours = next(iter(row["us"].items())), row["us"]["table"]
            print(
                f"{name} {kernel}: table {ours:.1f} us, fastest {best} {time:.1f} us ({ours / time:.2f}x)", flush=True
            )
            torch.cuda.empty_cache()
    return CUT if late else 0


if __name__ == "__main__":
    sys.exit(main())
