"""Check the kernels on a GPU, most telling cases first: is every number right?

    python -m benchmarks.quick.parity --out results --smoke         # six ops in bf16; exit status 3 if none is right
    python -m benchmarks.quick.parity --out results --seconds 70

After the smoke come large cases (whole tiles, many tiles, every kind of tile, kept dropout bits, packed batches, wide
norms) and then the table of ``transformer-fast verify``, each in bf16, fp32 and fp16. The gate is that of the table: at
most twice the error of eager PyTorch against fp64, plus four units in the last place. Each line goes to parity.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from transformer_fast import backends, ops
from transformer_fast.cli.verification import Parity, check_case, check_transformer
from transformer_fast.masks import AttentionMask as Mask
from transformer_fast.ops import seeds
from transformer_fast.ops.registry import Case, Draw, op_cases

from .record import CUT, Deadline, Kernels, Record, parser

SMOKE = (
    "padding, look-ahead, dropout 0.1",
    "look-ahead, dropout 0.1",
    "LayerNorm, residual + dropout 0.1",
    "scale + PE + dropout 0.1, padding_idx 0",
    "residual + dropout 0.1",
    "linear layer, label smoothing 0.1",
)
"""Names of the first cases: padded and packed attention, norm, embedding, dropout and loss."""
DTYPES = torch.bfloat16, torch.float32, torch.float16
NOTHING_WORKS = 3
"""Exit status if no case of the smoke passes."""


def large_cases(device: torch.device) -> Iterator[Case]:
    """Yield cases of whole tiles and of many tiles, one at least for each kind of tile of an H100."""
    draw = Draw(device)

    def attend(mask: Mask | None = None, **options: Any) -> partial:
        return partial(ops.attention, mask=mask, **options)

    def lengths(*numbers: int) -> Mask:
        return Mask.lengths(torch.tensor(numbers, device=device))

    def qkv(B: int, H: int, L: int, D: int, Lk: int | None = None, Hkv: int | None = None) -> dict[str, Tensor]:
        keys = B, Hkv or H, Lk or L, D
        return {"q": draw.normal(B, H, L, D), "k": draw.normal(*keys), "v": draw.normal(*keys)}

    def case(name: str, inputs: dict[str, Tensor], run: partial, op: str = "attention") -> Case:
        return Case(op, name, inputs, run)

    for D in (64, 128, 32):
        padded = lengths(256, 31, 130)
        yield case(f"256, d{D}, padding, dropout 0.1", qkv(3, 4, 256, D), attend(padded, dropout_p=0.1))
        both = lengths(1024, 700) & Mask.causal()
        yield case(f"1024, d{D}, padding, look-ahead, dropout", qkv(2, 2, 1024, D), attend(both, dropout_p=0.1))
    yield case("4096, d64, padding, kept bits", qkv(1, 2, 4096, 64), attend(lengths(3000), dropout_p=0.1))
    yield case("1024, d64, no mask", qkv(2, 4, 1024, 64), attend())
    yield case("1024, d128, look-ahead", qkv(1, 4, 1024, 128), attend(Mask.causal()))
    grouped = qkv(2, 8, 200, 64, 1000, 2)
    yield case("cross 200 x 1000, grouped heads", grouped, attend(lengths(1000, 3), dropout_p=0.1))
    keep = (torch.rand(2, 1, 300, 300, generator=draw.generator) < 0.5).to(device)
    yield case("300, dense mask, dropout 0.1", qkv(2, 4, 300, 64), attend(Mask.keep(keep), dropout_p=0.1))
    yield case("640, window of 100", qkv(1, 4, 640, 64), attend(Mask.window(100)))
    ids = torch.arange(700, device=device).div(90, rounding_mode="floor").expand(1, 700)
    yield case("700, documents, dropout 0.1", qkv(1, 4, 700, 64), attend(Mask.documents(ids), dropout_p=0.1))
    biased = qkv(2, 4, 260, 64) | {"bias": draw.normal(1, 4, 260, 260)}
    yield case("260, learned bias, padding, dropout", biased, attend(lengths(260, 99), dropout_p=0.1))
    for D, numbers in ((64, (24, 1, 256, 97, 130)), (128, (300, 40)), (64, (1500, 700))):
        starts = torch.tensor([0, *numbers], device=device).cumsum(0).to(torch.int32)
        inputs = {name: draw.normal(sum(numbers), 4, D) for name in "qkv"}
        for causal in (False, True):
            packed = partial(
                ops.attention_packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=causal, dropout_p=0.1
            )
            name = f"{len(numbers)} of up to {max(numbers)}, d{D}{', look-ahead' * causal}"
            yield case(name, inputs, packed, "attention_packed")
    for d in (512, 1024, 4096, 8192, 20_000):
        inputs = {
            "x": draw.normal(96, d), "weight": draw.normal(d, shift=1.0), "bias": draw.normal(d),
            "residual": draw.normal(96, d),
        }  # fmt: skip
        norm = partial(ops.layer_norm, eps=1e-5, dropout_p=0.1)
        yield case(f"width {d}, residual + dropout 0.1", inputs, norm, "layer_norm")
    table = ops.positional_table(128, 512).to(device)
    embed = partial(ops.embed, draw.integers(0, 4000, 16, 128), table=table, scale=512**0.5, dropout_p=0.1)
    yield case("16 x 128, width 512, dropout 0.1", {"weight": draw.normal(4000, 512)}, embed, "embed")


def dropped(device: torch.device, length: int = 64) -> tuple[Tensor, Tensor]:
    """Places where the forward and the backward of keys drop a weight, on a device: bool (2, 3, length, length).

    The values are unit vectors, so the output is the weights; and so is the gradient of the values.
    """
    q, k = (Draw(torch.device("cpu")).normal(2, 3, length, length).to(device) for _ in range(2))
    v = torch.eye(length, device=device).expand(2, 3, length, length).clone().requires_grad_()
    seed = torch.tensor([20170612], device=device)
    with (
        mock.patch.object(seeds, "draw_seed", lambda _: seed),
        mock.patch.object(seeds, "draw_launch_seed", lambda *_: seed),
    ):
        out = ops.attention(q, k, v, dropout_p=0.1)
    out.backward(v.detach())
    return out.detach() == 0, (v.grad == 0).mT


def dropout_rows(device: torch.device) -> Iterator[Parity]:
    """Compare the dropout mask on a device with the reference's on the CPU; the error is the share that differs."""
    backend = backends.choose("attention", device, torch.float32)[0]
    label = ("attention", "dropout mask equal to the CPU's", torch.float32)
    try:
        with backends.backend("reference"):
            expected = dropped(torch.device("cpu"))[0]
        for tensor, found in zip(("output", "grad v"), dropped(device), strict=True):
            yield Parity(*label, tensor, backend, float((found.cpu() != expected).double().mean()), 0.0, 0.0)
    except Exception as error:
        yield Parity(*label, "output", backend, float("inf"), 0.0, 0.0, f"{type(error).__name__}: {error}"[:300])


class Checks:
    """Parity rows as they come: recorded, counted, and printed where they fail."""

    def __init__(self, record: Record, deadline: Deadline) -> None:
        self.record, self.deadline, self.done = record, deadline, record.done()
        self.passed = self.failed = 0
        self.worst = 0.0

    def take(self, rows: Iterator[Parity]) -> None:
        for row in rows:
            share = row.error / row.gate if row.gate else 0.0
            if row.passed:
                self.passed, self.worst = self.passed + 1, max(self.worst, share)
            else:
                self.failed += 1
                print(str(row)[:250], flush=True)
            self.record.add(
                {"op": row.op, "case": row.case, "dtype": str(row.dtype), "tensor": row.tensor, "backend": row.backend,
                 "error": row.error, "gate": row.gate, "eager": row.eager_error, "passed": row.passed,
                 "note": row.note[:500]}
            )  # fmt: skip

    def take_cases(self, cases: Iterator[Case], device: torch.device, dtype: torch.dtype) -> bool:
        """Check cases that have no row yet; return False if there was no time for all."""
        for case in cases:
            if self.deadline.left() < 0:
                return False
            if (case.op, case.name, str(dtype)) not in self.done:
                self.take(check_case(case, device, dtype))
        return True

    def say(self, what: str) -> None:
        counts = f"{self.passed} passed, {self.failed} FAILED, worst {self.worst:.2f} of its gate"
        print(f"parity {what}: {counts}, {self.deadline.left():.0f} s left", flush=True)


def main(given: list[str] | None = None) -> int:
    options_parser = parser(__doc__, 90)
    options_parser.add_argument("--smoke", action="store_true", help="the smoke alone")
    options = options_parser.parse_args(given)
    device, kernels = torch.device(options.device), Kernels().listen()
    checks = Checks(Record(Path(options.out) / "parity.jsonl", "op", "case", "dtype"), Deadline(options.seconds))
    if options.smoke:
        checks.take_cases((c for c in op_cases(device) if c.name in SMOKE), device, torch.bfloat16)
        checks.take(dropout_rows(device))
        checks.say("smoke")
        print(kernels)
        return 0 if checks.passed else NOTHING_WORKS
    for what, cases in (("large", large_cases), ("table", op_cases)):
        for dtype in DTYPES:
            if not checks.take_cases(cases(device), device, dtype):
                checks.say(f"{what} {dtype}, cut")
                return CUT
            if what == "table" and ("Transformer", str(dtype)) not in {(op, kind) for op, _, kind in checks.done}:
                checks.take(check_transformer(device, dtype))
            checks.say(f"{what} {dtype}")
    print(kernels)
    return int(bool(checks.failed))


if __name__ == "__main__":
    sys.exit(main())
