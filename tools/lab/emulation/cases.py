"""The calls that `nox -s lab` runs on the compiled Triton kernels: public functions, forward and every gradient.

Attention is checked by the gate of tests/fuzz/fuzz_gate.py, the other ops by that of ``transformer_fast verify``. The
calls of the CUDA kernels, where there is nvcc, are in cases_cuda.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tests.fuzz import fuzz
from tests.fuzz.fuzz_config import LAYOUTS, Config
from tests.support.cuda_sources import nvcc
from transformer_fast import ops
from transformer_fast.cli import verification
from transformer_fast.cli.verification import Case
from transformer_fast.ops.cross_entropy import wide_loss
from transformer_fast.testing import poisoned_memory

from .cases_cuda import cuda_cases

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class EmulationCase:
    """A call to check.

    Args:
        name: what it is, unique.
        check: makes the call on the backend in force, and raises AssertionError unless each result holds the gate.
        may_be_empty: whether the call may have nothing to compute, and so launch nothing.
        cuda: whether the kernels are those of csrc/cuda, whose operators the check is then given.
        same_bits: whether the results must be the same to the last bit in every order of warps.
    """

    name: str
    check: Callable[..., None]
    may_be_empty: bool = False
    cuda: bool = False
    same_bits: bool = True


PLAIN = Config(
    number=2, kind="padded", B=2, H=2, Hkv=1, Lq=33, Lk=70, D=32, Dv=32, dtype="bf16", layout="contiguous",
    dialect="keep", parts=(), causal=3, bias="none", dropout_p=0.0, empty_rows="uniform", outputs="out", scale=None,
    window=(20, 9, 3), documents=20,
)  # fmt: skip
PACKED = replace(PLAIN, kind="packed", B=3, Lq=60, Lk=60, layout=LAYOUTS[1], causal=0)
DECODE = replace(PLAIN, kind="decode", H=4, Hkv=2, Lq=1, Lk=150, causal=0)

# By name, what differs from PLAIN.
MASK_PARTS: dict[str, dict[str, object]] = {
    "no mask": {},
    "dense": {"parts": ("dense",)},
    "key padding": {"parts": ("padding",), "empty_rows": "zero"},
    "lengths": {"parts": ("lengths",)},
    "a length per query": {"parts": ("lengths per query",), "empty_rows": "zero"},
    "causal": {"parts": ("causal",)},
    "window": {"parts": ("window",)},
    "documents": {"parts": ("documents",)},
    "alibi": {"parts": ("alibi",), "offset": 3},
    "relative": {"parts": ("relative",), "offset": 2},
    "softcap": {"softcap": 5.0},
    "sinks": {"parts": ("sinks",)},
    "bias": {"bias": "given"},
    "learned bias": {"bias": "learned"},
    "dropout": {"dropout_p": 0.1},
}
COMBINED: dict[str, dict[str, object]] = {
    "lengths, causal, dropout": {"parts": ("lengths", "causal"), "dropout_p": 0.1},
    "dense, learned bias, dropout": {"parts": ("dense",), "bias": "learned", "dropout_p": 0.3},
    "documents, window, alibi, sinks": {"parts": ("documents", "window", "alibi", "sinks"), "empty_rows": "zero"},
    "relative, softcap, dropout": {"parts": ("relative", "lengths per query"), "softcap": 0.7, "dropout_p": 0.1},
    "all parts": {
        "parts": ("dense", "padding", "lengths", "causal", "window", "documents", "alibi", "relative", "sinks"),
        "softcap": 5.0,
        "bias": "learned",
        "dropout_p": 0.1,
    },
}
OUTPUTS = ("weights", "dropped", "logsumexp")
HEAD_DIMS = {"bf16": (16, 32, 40, 64, 80, 128, 200, 256), "fp16": (16, 64, 128, 256), "fp32": (16, 64, 128, 256)}
# (queries, keys); of no queries and no keys too.
SHAPES = ((1, 1), (1, 65), (15, 17), (97, 129), (129, 64), (5, 257), (0, 20), (20, 0))
# More than 512 keys take other tiles.
LONG: dict[str, dict[str, object]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.1},
    "lengths": {"parts": ("lengths",), "dropout_p": 0.1},
    "lengths, causal, dropout": {"parts": ("lengths", "causal"), "causal": 5, "Lq": 540, "dropout_p": 0.3},
    "causal": {"parts": ("causal",), "causal": 560},
    "dense": {"parts": ("dense",)},
    "documents": {"parts": ("documents",), "documents": 50},
    "window": {"parts": ("window",), "window": (100, 0, 550)},
}
PACKED_PARTS: dict[str, dict[str, object]] = {
    "no mask": {},
    "causal, dropout": {"causal": 1, "dropout_p": 0.1},
    "window": {"parts": ("window",), "window": (9, 0, 0)},
    "documents, alibi, sinks": {"parts": ("documents", "alibi", "sinks"), "number": 3},
    "relative, softcap": {"parts": ("relative",), "softcap": 5.0, "empty_rows": "zero"},
    "other lengths of keys": {"layout": LAYOUTS[0], "Lk": 90, "dropout_p": 0.3},
    "long": {"B": 2, "H": 1, "Lq": 580, "Lk": 580, "causal": 1, "D": 64, "Dv": 64},
}
DECODE_PARTS: dict[str, dict[str, object]] = {
    "one part": {"Lk": 30},
    "in parts": {"Lk": 600},
    "pages": {"number": 3, "Lk": 600},
    "some queries, causal": {"Lq": 4, "causal": 1},
    "window, sinks": {"Lq": 2, "parts": ("window", "sinks"), "window": (40, 0, 0), "causal": 1},
    "documents": {"parts": ("documents",)},
    "alibi, softcap": {"parts": ("alibi",), "softcap": 5.0, "number": 3},
}
# One head of one sequence, so that an access beyond it is beyond its tensor; more than one tile of queries and of keys.
ALONE = {"B": 1, "H": 1, "Hkv": 1, "Lq": 70, "Lk": 150, "D": 64, "Dv": 64}
ONE_HEAD: dict[str, dict[str, object]] = {
    "bf16 lengths, causal, dropout": {"parts": ("lengths", "causal"), "causal": 90, "dropout_p": 0.1},
    "bf16 long, lengths, dropout": {"parts": ("lengths",), "Lk": 601, "dropout_p": 0.1},
    "bf16 dense": {"parts": ("dense",)},
    "bf16 learned bias": {"bias": "learned"},
    "bf16 relative, sinks": {"parts": ("relative", "sinks"), "dropout_p": 0.1},
    "fp16 long, lengths": {"dtype": "fp16", "parts": ("lengths",), "Lk": 601},
    "fp32 causal": {"dtype": "fp32", "parts": ("causal",), "causal": 90, "Lk": 70},
    "bf16 weights": {"outputs": "weights", "parts": ("lengths",), "Lk": 70},
    "packed bf16 causal, dropout": {"kind": "packed", "Lk": 70, "layout": LAYOUTS[1], "causal": 1, "dropout_p": 0.1},
    "decode bf16 in parts": {"kind": "decode", "Lq": 1, "Lk": 600, "causal": 0},
}


def attention_cases() -> Iterator[EmulationCase]:
    """Every mask part alone and, in every type, with others; all sizes of heads, shapes and layouts; padded, packed and
    decoding."""
    for name, changes in MASK_PARTS.items():
        yield attention(f"attention bf16 {name}", PLAIN, changes)
    for dtype, (name, changes) in itertools.product(DTYPES, COMBINED.items()):
        yield attention(f"attention {dtype} {name}", PLAIN, {"D": 64, "Dv": 64, "dtype": dtype} | changes)
    for dtype, sizes in HEAD_DIMS.items():
        for D in sizes:
            changes = {"D": D, "Dv": D, "dtype": dtype, "parts": ("lengths", "causal"), "dropout_p": 0.1}
            yield attention(f"attention {dtype} head size {D}", PLAIN, changes)
    yield attention("attention bf16 values of another size", PLAIN, {"D": 64, "Dv": 12})
    for dtype, outputs in itertools.product(DTYPES, OUTPUTS):
        changes = {"outputs": outputs, "dtype": dtype, "parts": ("lengths",), "dropout_p": 0.3}
        yield attention(f"attention {dtype} with {outputs}", PLAIN, changes)
    for Lq, Lk in SHAPES:
        yield attention(f"attention bf16 {Lq} queries, {Lk} keys", PLAIN, {"Lq": Lq, "Lk": Lk, "D": 64, "Dv": 64})
    yield attention("attention fp16 no batch", PLAIN, {"B": 0, "dtype": "fp16"})
    for layout in LAYOUTS[1:]:
        yield attention(f"attention fp16 {layout}", PLAIN, {"layout": layout, "dtype": "fp16", "D": 40, "Dv": 40})
    for name, changes in LONG.items():
        shape = {"B": 2, "H": 1, "Lq": 40, "Lk": 600, "D": 64, "Dv": 64}
        yield attention(f"attention bf16 long, {name}", PLAIN, shape | changes)
    for D in (32, 128):
        changes = {"H": 1, "Lq": 40, "Lk": 600, "D": D, "Dv": D, "parts": ("lengths",), "dropout_p": 0.1}
        yield attention(f"attention fp16 long, head size {D}", PLAIN, changes | {"dtype": "fp16"})
    for name, changes in PACKED_PARTS.items():
        yield attention(f"packed bf16 {name}", PACKED, changes)
    for dtype, D in (("fp16", 128), ("fp32", 40)):
        changes = {"dtype": dtype, "D": D, "Dv": D, "causal": 1, "dropout_p": 0.1}
        yield attention(f"packed {dtype} causal, dropout, head size {D}", PACKED, changes)
    for name, changes in DECODE_PARTS.items():
        yield attention(f"decode bf16 {name}", DECODE, changes)
    for name, changes in ONE_HEAD.items():
        yield attention(f"one head {name}", PLAIN, ALONE | changes)
    for dtype, D in (("fp16", 64), ("fp16", 128), ("fp32", 40), ("fp32", 256), ("bf16", 256)):
        yield attention(f"decode {dtype} head size {D}", DECODE, {"dtype": dtype, "D": D, "Dv": D, "Lk": 300})


def attention(name: str, base: Config, changes: dict[str, object]) -> EmulationCase:
    config = replace(base, **changes)
    return EmulationCase(name, partial(fuzz.CHECKS[config.kind], config), 0 in (config.B, config.Lq, config.Lk))


def random_cases(seed: int, count: int) -> Iterator[EmulationCase]:
    """The first calls of attention of a seed of tests/fuzz/fuzz.py."""
    for number in range(count):
        config = fuzz.config(seed, number, "triton")
        yield EmulationCase(f"random {seed} {number}", partial(fuzz.CHECKS[config.kind], config), may_be_empty=True)


def normal(*shape: int, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + shift


NORM_SHAPES = ((1, 8), (37, 20), (9, 97), (3, 513), (150, 33), (2, 5000), (1, 16390), (0, 40))
DROPOUT_SHAPES = ((1, 1), (33, 7), (5, 64), (6, 129), (3, 512), (2, 2500))
# (rows, width, vocabulary)
LOSS_SHAPES = ((1, 8, 5), (70, 40, 50), (17, 16, 1500), (5, 16, 9001))


def op_cases() -> Iterator[EmulationCase]:
    """Norm, dropout and loss, on the shapes that break kernels; all of these in bf16."""
    for dtype in DTYPES:
        every = dtype == "bf16"
        norms = norm_cases(NORM_SHAPES if every else NORM_SHAPES[1:4:2] + NORM_SHAPES[5:7])
        dropouts = dropout_cases(DROPOUT_SHAPES if every else DROPOUT_SHAPES[1::2])
        losses = loss_cases(LOSS_SHAPES if every else LOSS_SHAPES[1:])
        for case in (*norms, *dropouts, *losses):
            yield op_case(case, dtype, f"{case.op} {dtype} {case.name}")


def norm_cases(shapes: Iterable[tuple[int, int]]) -> Iterator[Case]:
    for (rows, d), kind in itertools.product(shapes, ("layer", "std", "rms")):
        inputs = {"x": normal(rows, d, seed=1), "weight": normal(d, seed=2, shift=1.0), "bias": normal(d, seed=3)}
        norm = partial(ops.layer_norm, eps=1e-5, kind=kind)
        if kind == "rms":
            del inputs["bias"]
            norm = partial(norm, bias=None)
        yield Case("norm", f"{kind} {rows}x{d}", inputs, norm)
        if (rows, d) in ((37, 20), (2, 5000), (1, 16390)):
            more = inputs | {"residual": normal(rows, d, seed=4)}
            yield Case("norm", f"{kind} {rows}x{d}, residual, dropout", more, partial(norm, dropout_p=0.3))
    plain = partial(ops.layer_norm, weight=None, bias=None, eps=1e-5)
    yield Case("norm", "without weight and bias", {"x": normal(5, 100)}, plain)


def dropout_cases(shapes: Iterable[tuple[int, int]]) -> Iterator[Case]:
    for rows, d in shapes:
        x, bias, residual = {"x": normal(rows, d)}, {"bias": normal(d, seed=1)}, {"residual": normal(rows, d, seed=2)}
        yield Case("dropout", f"{rows}x{d}", x, partial(ops.dropout, p=0.3))
        yield Case("dropout", f"{rows}x{d}, bias, ReLU", x | bias, partial(ops.dropout, p=0.3, relu=True))
        yield Case("dropout", f"{rows}x{d}, bias, residual", x | bias | residual, partial(ops.dropout, p=0.3))


def loss_cases(shapes: Iterable[tuple[int, int, int]]) -> Iterator[Case]:
    for rows, d, vocabulary in shapes:
        target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
        inputs = {"x": normal(rows, d, seed=1), "weight": normal(vocabulary, d, seed=2), "bias": normal(vocabulary)}
        loss = partial(wide_loss, target=target, label_smoothing=0.1)
        yield Case("loss", f"{rows}x{d}, vocabulary {vocabulary}", inputs, loss)
        summed = partial(wide_loss, target=target, ignore_index=int(target[0]), reduction="sum")
        yield Case("loss", f"{rows}x{d}, vocabulary {vocabulary}, sum, ignored", inputs, summed)


def op_case(case: Case, dtype: str, name: str) -> EmulationCase:
    empty = any(t.numel() == 0 for t in case.inputs.values())
    return EmulationCase(name, partial(check_op, case, DTYPES[dtype]), empty)


def check_op(case: Case, dtype: torch.dtype) -> None:
    """Raise AssertionError unless the output and every gradient of a case of ``transformer_fast verify`` hold."""
    with poisoned_memory():
        lines = list(verification.check_case(case, CPU, dtype))
    failed = [str(line) for line in lines if not line.passed]
    assert not failed, "\n".join(failed)


QUICK_CUDA = (
    "embedding bf16 20 columns, table fp32",
    "embedding gradient bf16 40 columns, skewed ids, sorted",
    "embedding gradient fp32 3 columns, outside ids, atomic",
    "positional table 40x7",
)
"""Names of small cases that reach every kernel of csrc/cuda, where there is nvcc."""
QUICK = (
    "attention bf16 lengths, causal, dropout",
    "attention bf16 dense",
    "attention fp16 head size 16",
    "attention fp32 head size 16",
    "attention bf16 with weights",
    "packed bf16 causal, dropout",
    "decode bf16 in parts",
    "decode bf16 pages",
    "norm bf16 layer 37x20, residual, dropout",
    "norm fp32 rms 37x20",
    "norm fp16 std 3x513",
    "dropout bf16 33x7, bias, ReLU",
    "dropout fp32 6x129",
    "loss bf16 70x40, vocabulary 50",
    "loss fp32 17x16, vocabulary 1500",
)
"""Names of small cases that reach every kind of kernel, for tools/lab/tests/test_emulation.py."""
MUTATED = (
    *(f"one head {name}" for name in ONE_HEAD),
    "norm bf16 layer 37x20, residual, dropout",
    "norm fp32 rms 1x16390",
    "dropout bf16 33x7, bias, ReLU",
    "loss bf16 70x40, vocabulary 50",
)
"""Names of the cases whose kernels `nox -s lab` makes faulty."""


@functools.cache
def cases(seed: int = 0, random_calls: int = 0) -> dict[str, EmulationCase]:
    """All of them by name, with so many random calls."""
    found: dict[str, EmulationCase] = {}
    cuda = (EmulationCase(name, check, cuda=True, same_bits=same) for name, check, same in cuda_cases())
    for case in (*attention_cases(), *op_cases(), *(cuda if nvcc() else ()), *random_cases(seed, random_calls)):
        if case.name in found:
            raise ValueError(f"two cases are called {case.name!r}")
        found[case.name] = case
    return found
