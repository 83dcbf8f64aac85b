"""A batch for a report. ``Report.explain``: calls that reach the kernels, and positions that the layers compute.
``Report.measure``: a model plain and accelerated.

In ``measure`` copies run, so that nothing in the user's model can change: hooks on parameters are not copied, and no
gradient, statistic or mode is written back. The report is copied with the model, and its copy undoes one copy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .. import backends, huggingface
from ..function_mode import counted_calls
from ..layers.padded_calls import Pass, layers_of, recorded
from ..masks.packing import Packing
from ..testing.timer import interleaved
from .check import SMALLEST, largest_difference, tensors_in
from .report import LOCK, Measurement, Report, Speed
from .rows import wrapped
from .swapped import FunctionalCalls


class _Kernels(TorchDispatchMode):
    """Count the calls of the ops of this package, and of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if func.namespace == "transformer_fast":
            given = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
            packed = name == "attention" and given.get("cu_seqlens_q") is not None
            self.calls["attention_packed" if packed else name] += 1
        elif name.startswith("_scaled_dot_product"):
            self.calls["torch's own attention"] += 1
        return func(*args, **(kwargs or {}))


def explained(model: nn.Module, batch: Any) -> str:
    """Kernels and positions of a packed model for one batch; the model is called once, without gradients."""
    parameter = next(model.parameters(), torch.zeros(()))
    args, named = huggingface.arguments_of(model, batch)
    with torch.no_grad(), recorded() as passes, counted_calls() as calls, _Kernels() as kernels:
        model(*args, **named)
    backend, why = backends.choose("attention", parameter.device, parameter.dtype)
    counts = ", ".join(f"{name} {n}" for name, n in kernels.calls.most_common())
    lines = [f"kernels: {backend} ({why})", f"calls: {counts or 'none reached them'}"]
    if calls or any(isinstance(module, FunctionalCalls) for module in model.modules()):
        ours = {name: calls[name, True] for name, _ in calls}
        texts = [f"{name} in {n} of {n + calls[name, False]} calls" for name, n in ours.items()]
        lines.append(f"torch's functions that this package computes: {', '.join(texts) or 'none was called'}")
    paths = {id(module): path for path, module in model.named_modules()}
    places: Counter[tuple[str, int, int, str]] = Counter()
    for each in passes:
        path, layers = paths.get(id(each.module), type(each.module).__name__), layers_of(each.module)
        path = path.rpartition(".")[0] if layers[0] is each.module else path
        places[path, each.positions, each.computed, each.reason] += len(layers)
    for (path, positions, computed, reason), n in places.items():
        where, why = path or "the model", reason and f": {reason}"
        lines.append(f"{where} ({n}): {computed} of {positions} positions{why}")
    total = sum(positions * n for (_, positions, _, _), n in places.items())
    left = sum((positions - computed) * n for (_, positions, computed, _), n in places.items())
    said = f"these layers skip {left / total:.0%} of their positions, which are padding" if total else ""
    lines.append(said or "this batch has no padding that the model's layers can skip")
    return "\n".join(part for line in lines for part in wrapped(line))


TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest difference in parts of the largest plain value, by the narrowest dtype that computes."""


def measured(
    model: nn.Module,
    packed_also: Callable[[nn.Module], Report] | None,
    report: Report,
    batch: Any,
    loss: Callable[[Any], Tensor] | None,
    rounds: int,
    tolerance: float | None,
) -> Measurement:
    """Compare and time a model; see :meth:`.report.Report.measure`. ``packed_also`` lets the stacks of a copy skip
    padding, to see the padding; None if they do already."""
    with _random_states(_device(model)), torch.inference_mode(False):
        plain, fast, fast_report = _copies(model, report)
        try:
            given = huggingface.arguments_of(fast, batch)
            passes = _passes(fast, packed_also, given)
            outputs = []
            for each in (plain, fast):
                torch.manual_seed(0)
                with torch.no_grad():
                    outputs.append(_call(each.eval(), given))
            kind, allowed = _allowed(fast, report) if tolerance is None else ("the given tolerance", tolerance)
            expected, actual = outputs
            difference, largest = compared(expected, actual, _keeps(passes, given[1]), allowed, kind)
            evaluation = _speed(torch.no_grad()(lambda each: _call(each, given)), plain, fast, rounds)
            training = None
            has_loss = _own_loss(expected) is not None and any(p.requires_grad for p in fast.parameters())
            if not report.int8 and (loss is not None or has_loss):
                for each in (plain, fast):
                    _set_training(each, model)
                training = _speed(lambda each: _train(each, given, loss), plain, fast, rounds)
        finally:
            fast_report.undo()
    fused = sum(row.now is not None for row in report.attention)
    share = _share(passes, given[1])
    return Measurement(evaluation, training, share, fused, len(report.attention), difference, largest)


def _copies(model: nn.Module, report: Report) -> tuple[nn.Module, nn.Module, Report]:
    """A plain and an accelerated copy, with the same parameters, and the report of the second.

    Raises:
        RuntimeError: if the plain model cannot be had.
    """
    for name, part in model.named_modules():
        if isinstance(vars(part).get("forward"), types.FunctionType):
            raise RuntimeError(f"measure: a copy of {name or 'the model'} would run its code: its forward was replaced")
    with LOCK:
        memo: dict[int, Any] = {}
        for part in model.modules():
            memo |= {id(t): t.detach().clone() for _, t in tensors_in(part) if not t.is_leaf}
        for *_, left in report._originals:  # weights of calls before the swap
            memo |= {id(t): t.detach().clone() for t in left.values() if isinstance(t, Tensor) and not t.is_leaf}
        fast, fast_report = copy.deepcopy((model, report), memo)
        memo = {id(p): p for p in fast.parameters()}
        plain, plain_report = copy.deepcopy((fast, fast_report), memo)
    try:
        plain_report.undo()
    except RuntimeError as error:
        raise RuntimeError(f"measure: there is no plain model to compare with: {error}") from error
    return plain, fast, fast_report


@contextlib.contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    """Restore the random states of PyTorch, on the CPU and the device, of Python and of NumPy."""
    python, numpy = random.getstate(), getattr(sys.modules.get("numpy"), "random", None)
    state = None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(state)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _call(model: nn.Module, given: Arguments) -> Any:
    """Output for copies of the arguments: each call reads its masks anew, as for a new batch."""
    args, named = _fresh(given)
    return model(*args, **named)


def _fresh(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {name: _fresh(inner) for name, inner in value.items()}
    return type(value)(map(_fresh, value)) if type(value) in (list, tuple) else value


def _passes(fast: nn.Module, packed_also: Callable[[nn.Module], Report] | None, given: Arguments) -> list[Pass]:
    """Calls of the stacks that skip the padding of the batch, or could."""
    also = packed_also(fast) if packed_also is not None else None
    fast.eval()
    try:
        with torch.no_grad(), recorded() as passes:
            _call(fast, given)
        return passes
    finally:
        if also is not None:
            also.undo()


def _train(model: nn.Module, given: Arguments, loss: Callable[[Any], Tensor] | None) -> None:
    """Run a training step without an optimizer.

    Raises:
        ValueError: if the loss has not one value with a gradient.
    """
    for p in model.parameters():
        p.grad = None
    with torch.enable_grad():
        output = _call(model, given)
        value = _own_loss(output) if loss is None else loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"measure: the loss must be a tensor with one value that needs a gradient, got {got}")
        value.backward()


def _own_loss(output: Any) -> Any:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


def _set_training(model: nn.Module, own: nn.Module) -> None:
    """Set training mode; parts that the user keeps in evaluation mode inside a model in training mode stay so."""
    model.train()
    if own.training:
        for module, one in zip(model.modules(), own.modules(), strict=True):
            module.training = one.training


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _speed(step: Callable[[nn.Module], Any], plain: nn.Module, fast: nn.Module, rounds: int) -> Speed:
    """Times of both models in turn, and on a GPU their memory."""
    device = _device(fast)

    def run(model: nn.Module) -> None:
        step(model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    steps = {"plain": functools.partial(run, plain), "accelerated": functools.partial(run, fast)}
    times = interleaved(steps, 0.0, rounds)
    if device.type != "cuda":
        return Speed(times["plain"], times["accelerated"])
    memory = {}
    for name, once in steps.items():
        for p in fast.parameters():  # both models have these parameters
            p.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once()
        memory[name] = torch.cuda.max_memory_allocated(device) - before
    return Speed(times["plain"], times["accelerated"], memory["plain"], memory["accelerated"])


def _keeps(passes: list[Pass], named: dict[str, Any]) -> list[Tensor]:
    """Masks (B, L) of the batch, True at tokens: those of the stacks, and ``attention_mask``."""
    keeps = [_keep(each.packing) for each in passes if each.packing is not None]
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
        keeps.append(mask != 0)
    return keeps


def _keep(packing: Packing) -> Tensor:
    keep = packing.indices.new_zeros(packing.batch * packing.length, dtype=torch.bool)
    keep[packing.indices] = True
    return keep.unflatten(0, (packing.batch, packing.length))


def _share(passes: list[Pass], named: dict[str, Any]) -> float | None:
    """Share of padding, from the stacks that know it, each layer once; else from ``attention_mask``."""
    known = [(each.positions, each.computed, len(layers_of(each.module))) for each in passes if each.packing]
    if total := sum(positions * n for positions, _, n in known):
        return sum((positions - computed) * n for positions, computed, n in known) / total
    keeps = _keeps([], named)
    return 1 - keeps[0].double().mean().item() if keeps else None


def _allowed(model: nn.Module, report: Report) -> tuple[str, float]:
    """The narrowest type that computes, in words, and the largest difference that it allows."""
    if report.int8:
        return "int8 weights", math.inf
    device = _device(model).type
    types = {p.dtype for p in model.parameters() if p.dtype in TOLERANCE} or {torch.float32}
    if torch.is_autocast_enabled(device):
        types.add(torch.get_autocast_dtype(device))
    narrowest = min(types, key=lambda dtype: dtype.itemsize)
    return str(narrowest).removeprefix("torch."), TOLERANCE.get(narrowest, 0.05)


def compared(expected: Any, actual: Any, keeps: list[Tensor], allowed: float, kind: str) -> tuple[float, float]:
    """Largest difference of two outputs, and the largest plain value, at tokens and where the plain value is finite.

    Args:
        expected, actual: outputs of the plain and of the accelerated model: tensors, in any mappings and sequences.
        keeps: bool masks (B, L), True at tokens. An output (B, L, ...), (L, B, ...) or (B * L, ...) is compared at the
            tokens of a mask at whose padding the accelerated output is 0, else of any mask (B, L), else of one in
            another layout; if there are several, of that with the smallest difference.
        allowed: largest difference, in parts of the largest plain value of an output.
        kind: what the allowance is for, in words.

    Raises:
        FloatingPointError: if an output differs by more; the message has the largest difference.
    """
    plain, ours = dict(_tensors(expected, "")), dict(_tensors(actual, ""))
    if plain.keys() != ours.keys() or any(t.shape != ours[name].shape for name, t in plain.items()):
        described = [", ".join(f"{name} {tuple(t.shape)}" for name, t in some.items()) for some in (plain, ours)]
        raise FloatingPointError(f"measure: the plain model returns {described[0]}, the accelerated one {described[1]}")
    worst = 0.0, 0.0
    for name, t in plain.items():
        if not t.is_floating_point() or not t.numel():
            continue
        difference, largest = min(_difference(t, ours[name], keep) for keep in _masks_of(ours[name], keeps))
        if difference > allowed * max(largest, SMALLEST) or not math.isfinite(difference):
            raise FloatingPointError(
                f"measure: {name} of the accelerated model differs by up to {difference:.3g} from the plain one, whose "
                f"largest value is {largest:.3g}; allowed is {allowed:.3g} times that, or times {SMALLEST} ({kind})"
            )
        worst = max(worst[0], difference), max(worst[1], largest)
    return worst


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of an output by name."""
    if isinstance(value, Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        yield name or "the output", dense
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{name}[{place}]" if name else f"output[{place}]")


def _masks_of(ours: Tensor, keeps: list[Tensor]) -> list[Tensor | None]:
    """Masks in the layout of an output (B, L, ...), (L, B, ...) or (B * L, ...); [None] if none fits."""
    turned = [keep.T for keep in keeps]
    layouts = keeps, turned, [keep.flatten() for keep in keeps], [keep.flatten() for keep in turned]
    fitting = [[keep for keep in layout if keep.shape == ours.shape[: keep.dim()]] for layout in layouts]
    skipped = [keep for layout in fitting for keep in layout if not ours[~keep.to(ours.device)].any()]
    return [*(skipped or next(filter(None, fitting), []))] or [None]


def _difference(expected: Tensor, actual: Tensor, keep: Tensor | None) -> tuple[float, float]:
    """Largest difference and largest plain value at the tokens, where the plain value is finite."""
    if keep is not None:
        keep = keep.to(expected.device)
        expected, actual = expected[keep], actual[keep]
    finite = expected.isfinite()
    return largest_difference(actual[finite].double(), expected[finite].double()) if finite.any() else (0.0, 0.0)
