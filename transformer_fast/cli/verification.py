"""The parity table: every op, and the whole Transformer, on this device, compared with the eager reference.

Each case runs three times on the same numbers: in fp64 on the reference (the exact values), in its own dtype on the
reference (plain PyTorch), and in its own dtype on the kernels. The kernels pass if their largest error is at most twice
that of plain PyTorch plus four units in the last place of the largest value, for the output and for every gradient.
Dropout is drawn from one seed on all three sides, so it is compared exactly.
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

from .. import backends, reference
from ..masks import AttentionMask
from ..models import Transformer
from ..ops.registry import OPS, SEED, Case, Draw, Tensors, op_cases
from ..testing import errors

Measured = tuple[Tensor, Tensors]  # an output, and gradients by name

HEADER = f"{'op':16} {'case':39} {'dtype':8} {'tensor':15} {'backend':9} {'error':>8} {'eager':>8} {'gate':>8}"


@dataclass(frozen=True)
class Parity:
    """One line of the table. Errors are absolute: the largest difference to fp64 of one tensor.

    op, case: the op and the case. tensor: "output", or the gradient closest to its gate. backend: the backend that ran.
    error, eager_error: errors of the kernels and of plain PyTorch. gate: the allowed error. note: the message, if the
        kernels raised an error.
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


def parity(device: torch.device | str, dtypes: Iterable[torch.dtype] | None = None) -> Iterator[Parity]:
    """Check every op on `device`, with two lines per case: the output, and the worst gradient.

    dtypes: default fp32 and bf16 on CPU, and fp16 as well on CUDA.
    """
    device = torch.device(device)
    if dtypes is None:
        dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    for dtype in dtypes:
        for case in op_cases(device):
            yield from check_case(case, device, dtype)
        yield from check_transformer(device, dtype)


def describe(device: torch.device) -> str:
    """The device in words, and the kernels that will run on it."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return f"{hardware}, torch {torch.__version__}, attention: {backends.choose('attention', device, torch.float32)[0]}"


def print_parity(rows: Iterable[Parity], indent: str = "") -> bool:
    """Print the table row by row and a last line with counts; return True if all rows passed."""
    print(indent + HEADER, flush=True)
    passed = []
    for row in rows:
        print(f"{indent}{row}", flush=True)
        passed.append(row.passed)
    failed = passed.count(False)
    print(f"{indent}{len(passed) - failed} of {len(passed)} passed" + (f", {failed} FAILED" if failed else ""))
    return not failed


def check_case(case: Case, device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    """Check one case: a line for the output, and one for the worst gradient."""
    inputs = {name: tensor.to(dtype) for name, tensor in case.inputs.items()}

    def measure(backend: str, dtype: torch.dtype) -> Measured:
        leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in inputs.items()}
        torch.manual_seed(SEED)
        with backends.backend(backend):
            result = case.run(**leaves)
            parts = result if isinstance(result, tuple) else (result,)
            output = torch.cat([part.flatten() for part in parts])
            output.backward(Draw(device).normal(*output.shape).to(dtype))
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items()}

    yield from _compare(
        (case.op, case.name, dtype),
        device,
        exact=measure("reference", torch.float64),
        eager=measure("reference", dtype),
        fast=partial(measure, backends.current(), dtype),
    )


def check_transformer(device: torch.device, dtype: torch.dtype) -> Iterator[Parity]:
    """A small model of each norm: the drop-in against the class it replaces, and a training step with dropout."""
    draw = Draw(device)
    src, trg = draw.integers(1, 60, 4, 19), draw.integers(1, 60, 4, 23)
    masks = AttentionMask.lengths(torch.tensor([19, 4, 11, 1], device=device)), AttentionMask.causal()

    def measure(model: nn.Module, backend: str, *, training: bool) -> Measured:
        model.train(training).zero_grad()
        torch.manual_seed(SEED)
        with backends.backend(backend):
            logits = model(src, trg, *masks)
            F.cross_entropy(logits.flatten(0, 1).to(torch.float64), trg.roll(-1, 1).flatten()).backward()
        # Compare all gradients as one vector, because rounding errors vary at random between the weights of a model.
        gradients = [parameter.grad.flatten() for parameter in model.parameters()]
        return logits.detach(), {f"{len(gradients)} weights": torch.cat(gradients)}

    classic = reference.layers.Transformer
    kinds = ((classic, torch.float64), (classic, dtype), (Transformer, torch.float64), (Transformer, dtype))
    for norm, norm_first in (("std", True), ("layer", False), ("rms", True)):
        options = {"d_ff": 160, "norm": norm, "norm_first": norm_first}
        torch.manual_seed(SEED)
        models = [kind(60, 60, 80, 2, 4, 0.1, **options).to(device, its_dtype) for kind, its_dtype in kinds]
        exact, eager, exact_fast, fast = models
        with torch.no_grad():  # embeddings times sqrt(d) shall have unit variance, as the paper means it (section 3.4)
            for embed in (eager.encoder.embed, eager.decoder.embed):
                embed.lut.weight.div_(80**0.5)
        for model in models:
            model.load_state_dict(eager.state_dict())
        order = f"{'pre' if norm_first else 'post'}-norm {norm}"
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
    kernels = OPS[op].kernels if op in OPS else {"Transformer": "attention"}.get(op, op)
    backend = backends.choose(kernels, device, dtype)[0]
    try:
        output, gradients = fast()
    except Exception as error:  # a kernel that does not compile or launch becomes a line of the table
        note = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Parity(*label, "output", backend, math.inf, 0.0, 0.0, note)
        return
    yield Parity(*label, "output", backend, *errors(output, eager[0], exact[0]))
    lines = [
        Parity(*label, f"grad {name}", backend, *errors(gradients[name], eager[1][name], exact[1][name]))
        for name in exact[1]
    ]
    yield max(lines, key=lambda line: math.inf if math.isnan(line.error) else line.error / max(line.gate, 1e-300))
