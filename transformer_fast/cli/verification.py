"""The parity table: every op, and the whole Transformer, on this device, held to the eager reference.

Each case runs three times on the same numbers: in fp64 on the reference (the truth), in its own dtype on the
reference (what plain PyTorch would give), and in its own dtype on the kernels. The kernels pass if their largest
error is at most twice that of plain PyTorch plus four units in the last place of the largest value, for the output
and for every gradient. Dropout is drawn from one seed on all three sides, so it is compared exactly.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import backends, ops, reference
from ..masks import AttentionMask
from ..models import Transformer
from ..ops.dropout import dropout
from ..ops.embedding import add_positional

Tensors = dict[str, Tensor]
Runner = Callable[[Tensors], Tensor]
Measured = tuple[Tensor, Tensors]  # an output, and gradients by name

ULPS = 4
SEED = 20170612


@dataclass(frozen=True)
class Parity:
    """One line of the table. Errors are absolute: the largest difference to fp64 of one tensor.

    op, case: what ran. tensor: "output", or the gradient that came closest to its gate. backend: the one that ran.
    error, eager_error: of the kernels and of plain PyTorch. gate: what error may be. note: what went wrong, if the
    kernels raised instead of computing.
    """

    op: str
    case: str
    dtype: torch.dtype
    tensor: str
    backend: str
    error: float
    eager_error: float
    gate: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.gate  # False for NaN


@dataclass(frozen=True)
class Case:
    """A computation to check: `inputs` in fp32 (floating ones get gradients), `run` computes from them."""

    op: str
    name: str
    kernel: str  # what `backends.choose` calls the op
    inputs: Tensors
    run: Runner


def parity(device: torch.device | str, dtypes: Iterable[torch.dtype] | None = None) -> Iterator[Parity]:
    """Check every op on `device`, two lines a case: the output, and the worst gradient.

    dtypes: default fp32 and bf16 on CPU, and fp16 as well on CUDA.
    """
    device = torch.device(device)
    if dtypes is None:
        dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    for dtype in dtypes:
        for case in _op_cases(device):
            yield from _check_case(case, device, dtype)
        yield from _check_transformer(device, dtype)


def format_parity(rows: Iterable[Parity]) -> Iterator[str]:
    """The table as lines of text, one for each row as soon as it is known."""
    yield f"{'op':16} {'case':39} {'dtype':8} {'tensor':15} {'backend':9} {'error':>8} {'eager':>8} {'gate':>8}"
    for row in rows:
        dtype = str(row.dtype).removeprefix("torch.")
        figures = f"{row.error:8.1e} {row.eager_error:8.1e} {row.gate:8.1e}"
        verdict = "ok" if row.passed else f"FAIL {row.note}".rstrip()
        yield f"{row.op:16} {row.case:39} {dtype:8} {row.tensor:15} {row.backend:9} {figures}  {verdict}"


def describe(device: torch.device) -> str:
    """The device in words, and the kernels that will run on it."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{hardware}, torch {torch.__version__}, attention: {backends.choose('attention', device, torch.float32)[0]}"


def print_parity(rows: Iterable[Parity], indent: str = "") -> list[Parity]:
    """Print the table as it grows, with a last line that counts, and return its rows."""
    seen: list[Parity] = []
    for line in format_parity(_collect(rows, seen)):
        print(indent + line, flush=True)
    failed = sum(not row.passed for row in seen)
    print(f"{indent}{len(seen) - failed} of {len(seen)} passed" + (f", {failed} FAILED" if failed else ""))
    return seen


def _collect(rows: Iterable[Parity], seen: list[Parity]) -> Iterator[Parity]:
    for row in rows:
        seen.append(row)
        yield row


def _op_cases(device: torch.device) -> Iterator[Case]:
    """Shapes are odd on purpose: nothing divides a tile."""
    draw = _Draw(device)
    yield from _attention_cases(draw)
    yield from _cross_entropy_cases(draw)

    x, residual = draw.normal(61, 3, 100, shift=2.0), draw.normal(61, 3, 100)
    weight, bias = draw.normal(100, shift=1.0), draw.normal(100)
    for kind, eps, name in (("layer", 1e-5, "LayerNorm"), ("std", 1e-6, "Norm (std)")):
        norm = partial(ops.layer_norm, eps=eps, kind=kind)
        plain = {"x": x, "weight": weight, "bias": bias}
        yield Case("layer_norm", name, "norm", plain, lambda t, norm=norm: norm(t["x"], t["weight"], t["bias"]))
        yield Case(
            "layer_norm",
            f"{name}, residual + dropout 0.1",
            "norm",
            plain | {"residual": residual},
            lambda t, norm=norm: torch.stack(
                norm(t["x"], t["weight"], t["bias"], residual=t["residual"], dropout_p=0.1)
            ),
        )

    ids = torch.randint(50, (7, 33), generator=draw.generator).to(device)
    table = ops.positional_table(64, 100).to(device)
    for name, options in (
        ("scale + PE", {}),
        ("scale + PE + dropout 0.1, padding_idx 0", {"dropout_p": 0.1, "padding_idx": 0}),
    ):
        yield Case(
            "embed",
            name,
            "embedding",
            {"weight": draw.normal(50, 100)},
            lambda t, options=options: ops.embed(ids, t["weight"], table, scale=10.0, **options),
        )
    yield Case(
        "add_positional",
        "offset 5, dropout 0.1",
        "embedding",
        {"x": draw.normal(7, 33, 100)},
        lambda t: add_positional(t["x"], table, 5, 0.1),
    )
    two = {"x": draw.normal(77, 100), "residual": draw.normal(77, 100)}
    yield Case(
        "dropout", "residual + dropout 0.1", "dropout", two, lambda t: dropout(t["x"], 0.1, residual=t["residual"])
    )
    yield Case("dropout", "ReLU, dropout 0.3", "dropout", {"x": two["x"]}, lambda t: dropout(t["x"], 0.3, relu=True))
    biased = {"x": two["x"], "bias": bias}
    yield Case("dropout", "bias, ReLU, dropout 0.3", "dropout", biased, lambda t: dropout(**t, p=0.3, relu=True))
    yield Case(
        "embed",
        "an offset for each sequence",
        "embedding",
        {"weight": draw.normal(50, 100)},
        lambda t: ops.embed(ids, t["weight"], table, scale=10.0, offset=ids[:, 0] // 2),
    )


def _attention_cases(draw: _Draw) -> Iterator[Case]:
    B, H, Lq, Lk, D = 3, 4, 45, 77, 40
    lengths = AttentionMask.lengths(torch.tensor([77, 1, 50], device=draw.device))
    keep = torch.rand(B, 1, Lq, Lk, generator=draw.generator).to(draw.device) < 0.5
    keep[0, 0, 3] = keep[2, 0, 44] = False  # rows without a key
    look_ahead = lengths & AttentionMask.causal(10)
    bias = draw.normal(1, H, Lq, Lk)
    for name, kv_heads, mask, options, more in (
        ("no mask", H, None, {}, {}),
        ("padding", H, lengths, {}, {}),
        ("padding, look-ahead", H, look_ahead, {}, {}),
        ("padding, look-ahead, dropout 0.1", H, look_ahead, {"dropout_p": 0.1}, {}),
        ("dense mask with empty rows, dropout 0.1", H, AttentionMask.keep(keep), {"dropout_p": 0.1}, {}),
        ("dense mask, empty rows give zero", H, AttentionMask.keep(keep), {"empty_rows": "zero"}, {}),
        ("grouped heads, padding, learned bias", 2, lengths, {}, {"bias": bias}),
        ("weights after dropout 0.1, padding", H, lengths, {"dropout_p": 0.1, "return_weights": "dropped"}, {}),
    ):
        inputs = {
            "q": draw.normal(B, H, Lq, D),
            "k": draw.normal(B, kv_heads, Lk, D),
            "v": draw.normal(B, kv_heads, Lk, D),
            **more,
        }

        def run(t: Tensors, mask=mask, options=options) -> Tensor:
            result = ops.attention(t["q"], t["k"], t["v"], mask, bias=t.get("bias"), **options)
            return torch.cat([part.flatten() for part in result]) if isinstance(result, tuple) else result

        yield Case("attention", name, "attention", inputs, run)
    starts = torch.tensor([0, 45, 46, 90], dtype=torch.int32, device=draw.device)
    yield Case(
        "attention_packed",
        "look-ahead, dropout 0.1",
        "attention",
        {name: draw.normal(90, H, D) for name in "qkv"},
        lambda t: ops.attention_packed(t["q"], t["k"], t["v"], starts, starts, causal=True, dropout_p=0.1),
    )


def _cross_entropy_cases(draw: _Draw) -> Iterator[Case]:
    target = torch.randint(0, 50, (70,), generator=draw.generator).to(draw.device)
    yield Case(
        "cross_entropy",
        "linear layer, label smoothing 0.1",
        "cross_entropy",
        {"x": draw.normal(70, 40), "weight": draw.normal(50, 40), "bias": draw.normal(50)},
        lambda t: ops.linear_cross_entropy(
            t["x"], t["weight"], t["bias"], target, label_smoothing=0.1, ignore_index=3
        ).unsqueeze(0),
    )


class _Draw:
    """Random inputs that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) + shift).to(self.device)


def _check_case(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    inputs = {name: tensor.to(dtype) for name, tensor in case.inputs.items()}

    def measure(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensors]:
        leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in inputs.items()}
        torch.manual_seed(SEED)
        with backends.backend(backend):
            output = case.run(leaves)
            output.backward(_Draw(device).normal(*output.shape).to(dtype))
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    chosen = backends.choose(case.kernel, device, dtype)[0]
    yield from _compare(
        (case.op, case.name, dtype),
        chosen,
        truth=measure("reference", torch.float64),
        eager=measure("reference", dtype),
        fast=partial(measure, backends.current(), dtype),
    )


def _check_transformer(device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    """A small model of each norm: the drop-in against the class it replaces, and a training step with dropout."""
    draw = _Draw(device)
    src = torch.randint(1, 60, (4, 19), generator=draw.generator).to(device)
    trg = torch.randint(1, 60, (4, 23), generator=draw.generator).to(device)
    masks = AttentionMask.lengths(torch.tensor([19, 4, 11, 1], device=device)), AttentionMask.causal()

    def measure(model: nn.Module, backend: str, *, training: bool) -> tuple[Tensor, Tensors]:
        model.train(training).zero_grad()
        torch.manual_seed(SEED)
        with backends.backend(backend):
            logits = model(src, trg, *masks)
            F.cross_entropy(logits.flatten(0, 1).to(torch.float64), trg.roll(-1, 1).flatten()).backward()
        # As one vector: rounding is shared out among the many weights of a model by chance.
        gradients = [parameter.grad.double().flatten() for parameter in model.parameters()]
        return logits.detach(), {f"{len(gradients)} weights": torch.cat(gradients)}

    for norm, norm_first in (("std", True), ("layer", False)):
        options = {"d_ff": 160, "norm": norm, "norm_first": norm_first}
        torch.manual_seed(SEED)
        eager = reference.layers.Transformer(60, 60, 80, 2, 4, 0.1, **options).to(device, dtype)
        with torch.no_grad():  # embeddings times sqrt(d) shall have unit variance, as the paper means it (section 3.4)
            for embed in (eager.encoder.embed, eager.decoder.embed):
                embed.lut.weight.div_(80**0.5)
        fast = Transformer(60, 60, 80, 2, 4, 0.1, **options).to(device, dtype)
        fast.load_state_dict(eager.state_dict())
        truth = reference.layers.Transformer(60, 60, 80, 2, 4, 0.1, **options).to(device, torch.float64)
        truth.load_state_dict(eager.state_dict())
        order = "pre-norm" if norm_first else "post-norm"
        yield from _compare(
            ("Transformer", f"{order}, against the reference class", dtype),
            backends.choose("attention", device, dtype)[0],
            truth=measure(truth, "reference", training=False),
            eager=measure(eager, "reference", training=False),
            fast=partial(measure, fast, backends.current(), training=False),
        )
        double = Transformer(60, 60, 80, 2, 4, 0.1, **options).to(device, torch.float64)
        double.load_state_dict(fast.state_dict())
        yield from _compare(
            ("Transformer", f"{order}, training with dropout 0.1", dtype),
            backends.choose("attention", device, dtype)[0],
            truth=measure(double, "reference", training=True),
            eager=measure(fast, "reference", training=True),
            fast=partial(measure, fast, backends.current(), training=True),
        )


def _compare(
    label: tuple[str, str, torch.dtype], backend: str, *, truth: Measured, eager: Measured, fast: Callable[[], Measured]
) -> Iterator[Parity]:
    try:
        output, gradients = fast()
    except Exception as error:  # a kernel that does not compile or launch is a line of the table, not the end of it
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Parity(*label, "output", backend, math.inf, 0.0, 0.0, note)
        return
    yield _line(label, "output", backend, truth[0], eager[0], output)
    lines = [
        _line(label, f"grad {name}", backend, truth[1][name], eager[1][name], gradients[name]) for name in truth[1]
    ]
    yield max(lines, key=lambda line: math.inf if math.isnan(line.error) else line.error / line.gate)


def _line(label: tuple, tensor: str, backend: str, truth: Tensor, eager: Tensor, fast: Tensor) -> Parity:
    truth = truth.double()
    error, eager_error = ((side.double() - truth).abs().max().item() for side in (fast, eager))
    ulp = torch.finfo(label[2]).eps * truth.abs().max().item()
    return Parity(*label, tensor, backend, error, eager_error, 2 * eager_error + ULPS * ulp)
