"""The parity table: every op, and the whole Transformer, on this device, compared with the eager reference.

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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import backends, ops, reference
from ..masks import AttentionMask
from ..models import Transformer
from ..ops.dropout import dropout
from ..ops.embedding import add_positional

Tensors = dict[str, Tensor]
Measured = tuple[Tensor, Tensors]  # an output, and gradients by name

ULPS = 4.0
SEED = 20170612
HEADER = f"{'op':16} {'case':39} {'dtype':8} {'tensor':15} {'backend':9} {'error':>8} {'eager':>8} {'gate':>8}"
# What `backends.choose` calls the kernel of an op, where it has another name.
KERNELS = {
    "attention_packed": "attention",
    "layer_norm": "norm",
    "embed": "embedding",
    "add_positional": "embedding",
    "Transformer": "attention",
}


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
    gate: float
    eager_error: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.gate  # False for NaN

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        figures = f"{self.error:8.1e} {self.eager_error:8.1e} {self.gate:8.1e}"
        verdict = "ok" if self.passed else f"FAIL {self.note}".rstrip()
        return f"{self.op:16} {self.case:39} {dtype:8} {self.tensor:15} {self.backend:9} {figures}  {verdict}"


def errors(actual: Tensor, eager: Tensor, exact: Tensor, ulps: float = ULPS) -> tuple[float, float, float]:
    """The gate of every kernel, where the exact values are finite.

    Args:
        actual: what the kernel computed.
        eager: what plain PyTorch computed in the kernel's own dtype.
        exact: what plain PyTorch computed in fp64.
        ulps: allowance, in units in the last place of the largest exact value.

    Returns:
        The kernel's largest error, the largest one allowed, and eager's.
    """
    finite = exact.isfinite()
    if not finite.any():
        return 0.0, 0.0, 0.0
    exact = exact.double()[finite]
    error = (actual.double()[finite] - exact).abs().max().item()
    eager_error = (eager.double()[finite] - exact).abs().nan_to_num(0.0).max().item()
    rounding = ulps * torch.finfo(actual.dtype).eps * max(exact.abs().max().item(), 1e-30)
    return error, 2 * eager_error + rounding, eager_error


class Case(NamedTuple):
    """A computation to check: `run` computes a tensor, or several, from the `inputs`, given in fp32 by its names."""

    op: str
    name: str
    inputs: Tensors
    run: Callable[..., Tensor | tuple[Tensor, ...]]


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


def describe(device: torch.device) -> str:
    """The device in words, and the kernels that will run on it."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{hardware}, torch {torch.__version__}, attention: {backends.choose('attention', device, torch.float32)[0]}"


def print_parity(rows: Iterable[Parity], indent: str = "") -> bool:
    """Print the table as it grows, with a last line that counts; whether all of it passed."""
    print(indent + HEADER, flush=True)
    passed = []
    for row in rows:
        print(f"{indent}{row}", flush=True)
        passed.append(row.passed)
    failed = passed.count(False)
    print(f"{indent}{len(passed) - failed} of {len(passed)} passed" + (f", {failed} FAILED" if failed else ""))
    return not failed


def _op_cases(device: torch.device) -> Iterator[Case]:
    """Shapes are odd on purpose: nothing divides a tile."""
    draw = _Draw(device)
    yield from _attention_cases(draw)
    linear = {"x": draw.normal(70, 40), "weight": draw.normal(50, 40), "bias": draw.normal(50)}
    loss = partial(ops.linear_cross_entropy, target=draw.integers(0, 50, 70), label_smoothing=0.1, ignore_index=3)
    yield Case("cross_entropy", "linear layer, label smoothing 0.1", linear, loss)

    plain = {"x": draw.normal(61, 3, 100, shift=2.0), "weight": draw.normal(100, shift=1.0), "bias": draw.normal(100)}
    added = plain | {"residual": draw.normal(61, 3, 100)}
    for kind, eps, name in (("layer", 1e-5, "LayerNorm"), ("std", 1e-6, "Norm (std)")):
        norm = partial(ops.layer_norm, eps=eps, kind=kind)
        yield Case("layer_norm", name, plain, norm)
        yield Case("layer_norm", f"{name}, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))
    plain, added = ({name: t for name, t in inputs.items() if name != "bias"} for inputs in (plain, added))
    norm = partial(ops.layer_norm, bias=None, eps=1e-6, kind="rms")
    yield Case("layer_norm", "RMSNorm", plain, norm)
    yield Case("layer_norm", "RMSNorm, residual + dropout 0.1", added, partial(norm, dropout_p=0.1))

    ids, weight = draw.integers(0, 50, 7, 33), {"weight": draw.normal(50, 100)}
    table = ops.positional_table(64, 100).to(device)
    embed = partial(ops.embed, ids, table=table, scale=10.0)
    yield Case("embed", "scale + PE", weight, embed)
    dropping = partial(embed, dropout_p=0.1, padding_idx=0)
    yield Case("embed", "scale + PE + dropout 0.1, padding_idx 0", weight, dropping)
    yield Case("embed", "an offset for each sequence", weight, partial(embed, offset=ids[:, 0] // 2))
    adding = partial(add_positional, table=table, offset=5, dropout_p=0.1)
    yield Case("add_positional", "offset 5, dropout 0.1", {"x": draw.normal(7, 33, 100)}, adding)

    x = {"x": draw.normal(77, 100)}
    residual, bias = x | {"residual": draw.normal(77, 100)}, x | {"bias": draw.normal(100)}
    yield Case("dropout", "residual + dropout 0.1", residual, partial(dropout, p=0.1))
    yield Case("dropout", "ReLU, dropout 0.3", x, partial(dropout, p=0.3, relu=True))
    yield Case("dropout", "bias, ReLU, dropout 0.3", bias, partial(dropout, p=0.3, relu=True))


def _attention_cases(draw: _Draw) -> Iterator[Case]:
    B, H, Lq, Lk, D = 3, 4, 45, 77, 40
    lengths = AttentionMask.lengths(torch.tensor([77, 1, 50], device=draw.device))
    look_ahead = lengths & AttentionMask.causal(10)
    keep = torch.rand(B, 1, Lq, Lk, generator=draw.generator).to(draw.device) < 0.5
    keep[0, 0, 3] = keep[2, 0, 44] = False  # rows without a key
    dense = AttentionMask.keep(keep)
    for name, mask, options in (
        ("no mask", None, {}),
        ("padding", lengths, {}),
        ("padding, look-ahead", look_ahead, {}),
        ("padding, look-ahead, dropout 0.1", look_ahead, {"dropout_p": 0.1}),
        ("dense mask with empty rows, dropout 0.1", dense, {"dropout_p": 0.1}),
        ("dense mask, empty rows give zero", dense, {"empty_rows": "zero"}),
        ("weights after dropout 0.1, padding", lengths, {"dropout_p": 0.1, "return_weights": "dropped"}),
    ):
        inputs = {"q": draw.normal(B, H, Lq, D), "k": draw.normal(B, H, Lk, D), "v": draw.normal(B, H, Lk, D)}
        yield Case("attention", name, inputs, partial(ops.attention, mask=mask, **options))
    inputs |= {"k": draw.normal(B, 2, Lk, D), "v": draw.normal(B, 2, Lk, D), "bias": draw.normal(1, H, Lq, Lk)}
    yield Case("attention", "grouped heads, padding, learned bias", inputs, partial(ops.attention, mask=lengths))
    yield from _cases_by_position(draw, {name: draw.normal(B, H, Lk, D) for name in "qkv"})
    starts = torch.tensor([0, 45, 46, 90], dtype=torch.int32, device=draw.device)
    packed = partial(ops.attention_packed, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, dropout_p=0.1)
    inputs = {name: draw.normal(90, H, D) for name in "qkv"}
    yield Case("attention_packed", "look-ahead, dropout 0.1", inputs, packed)


def _cases_by_position(draw: _Draw, inputs: Tensors) -> Iterator[Case]:
    """Documents, biases by distance, a softcap and sinks; q, k and v (B, H, L, D)."""
    B, H, L, _ = inputs["q"].shape
    ids = torch.arange(L, device=draw.device).div(30, rounding_mode="floor").expand(B, L)
    documents = AttentionMask.documents(ids) & AttentionMask.causal()
    dropping = partial(ops.attention, mask=documents, dropout_p=0.1)
    yield Case("attention", "documents, look-ahead, dropout 0.1", inputs, dropping)

    def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return ops.attention(q, k, v, AttentionMask.alibi(slopes) & AttentionMask.causal())

    def relative(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return ops.attention(q, k, v, AttentionMask.relative(weight), dropout_p=0.1)

    yield Case("attention", "ALiBi, look-ahead", inputs | {"slopes": draw.normal(H).abs()}, alibi)
    yield Case("attention", "relative positions, dropout 0.1", inputs | {"weight": draw.normal(32, H)}, relative)
    capped = partial(ops.attention, softcap=5.0)
    yield Case("attention", "softcap 5, sinks", inputs | {"sinks": draw.normal(H)}, capped)


class _Draw:
    """Random inputs that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) + shift).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


def _check_case(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    inputs = {name: tensor.to(dtype) for name, tensor in case.inputs.items()}

    def measure(backend: str, dtype: torch.dtype) -> Measured:
        leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in inputs.items()}
        torch.manual_seed(SEED)
        with backends.backend(backend):
            result = case.run(**leaves)
            parts = result if isinstance(result, tuple) else (result,)
            output = torch.cat([part.flatten() for part in parts])
            output.backward(_Draw(device).normal(*output.shape).to(dtype))
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    yield from _compare(
        (case.op, case.name, dtype),
        device,
        exact=measure("reference", torch.float64),
        eager=measure("reference", dtype),
        fast=partial(measure, backends.current(), dtype),
    )


def _check_transformer(device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    """A small model of each norm: the drop-in against the class it replaces, and a training step with dropout."""
    draw = _Draw(device)
    src, trg = draw.integers(1, 60, 4, 19), draw.integers(1, 60, 4, 23)
    masks = AttentionMask.lengths(torch.tensor([19, 4, 11, 1], device=device)), AttentionMask.causal()

    def measure(model: nn.Module, backend: str, *, training: bool) -> Measured:
        model.train(training).zero_grad()
        torch.manual_seed(SEED)
        with backends.backend(backend):
            logits = model(src, trg, *masks)
            F.cross_entropy(logits.flatten(0, 1).to(torch.float64), trg.roll(-1, 1).flatten()).backward()
        # As one vector: rounding is shared out among the many weights of a model by chance.
        gradients = [parameter.grad.flatten() for parameter in model.parameters()]
        return logits.detach(), {f"{len(gradients)} weights": torch.cat(gradients)}

    classic = reference.layers.Transformer
    kinds = ((classic, torch.float64), (classic, dtype), (Transformer, torch.float64), (Transformer, dtype))
    for norm, norm_first in (("std", True), ("layer", False)):
        options = {"d_ff": 160, "norm": norm, "norm_first": norm_first}
        torch.manual_seed(SEED)
        models = [kind(60, 60, 80, 2, 4, 0.1, **options).to(device, its_dtype) for kind, its_dtype in kinds]
        exact, eager, exact_fast, fast = models
        with torch.no_grad():  # embeddings times sqrt(d) shall have unit variance, as the paper means it (section 3.4)
            for embed in (eager.encoder.embed, eager.decoder.embed):
                embed.lut.weight.div_(80**0.5)
        for model in models:
            model.load_state_dict(eager.state_dict())
        order = "pre-norm" if norm_first else "post-norm"
        for what, training, sides in (
            ("against the reference class", False, (exact, eager)),
            ("training with dropout 0.1", True, (exact_fast, fast)),
        ):
            yield from _compare(
                ("Transformer", f"{order}, {what}", dtype),
                device,
                exact=measure(sides[0], "reference", training=training),
                eager=measure(sides[1], "reference", training=training),
                fast=partial(measure, fast, backends.current(), training=training),
            )


def _compare(
    label: tuple[str, str, torch.dtype],
    device: torch.device,
    *,
    exact: Measured,
    eager: Measured,
    fast: Callable[[], Measured],
) -> Iterator[Parity]:
    op, _, dtype = label
    backend = backends.choose(KERNELS.get(op, op), device, dtype)[0]
    try:
        output, gradients = fast()
    except Exception as error:  # a kernel that does not compile or launch is a line of the table, not the end of it
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Parity(*label, "output", backend, math.inf, 0.0, 0.0, note)
        return
    yield Parity(*label, "output", backend, *errors(output, eager[0], exact[0]))
    lines = [
        Parity(*label, f"grad {name}", backend, *errors(gradients[name], eager[1][name], exact[1][name]))
        for name in exact[1]
    ]
    yield max(lines, key=lambda line: math.inf if math.isnan(line.error) else line.error / max(line.gate, 1e-300))
