"""Test that a pattern computes a module's output: both run on random input, in fp64 on the CPU."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.dropout import KINDS as DROPOUTS
from ..layers.hooks import HOOKS
from .made import former_classes, names_read_by, own_attributes
from .patterns.base import Accelerated, Keywords, Part, Pattern, accelerated_class, pattern_of
from .surroundings import DrawsNumbersError, quiet
from .witness import Witness

_ROWS = 16


def probe(module: nn.Module, pattern: Pattern) -> str | None:
    """Compare a module with its pattern: outputs and gradients in evaluation and in training without dropout, and
    outputs with each single dropout dropping everything.

    The module itself is not run: a copy with random parameters is used (with only a few rows of embeddings). A second
    copy has other values in buffers and in tensors among its attributes, since these may change later.

    Returns:
        None if module and pattern agree; else the difference as text.
    """
    difference = _compare(module, pattern)
    if difference or not any(t.is_floating_point() for t in _other_tensors(module, pattern)):
        return difference
    return _compare(module, pattern, disturb=True)


def _compare(module: nn.Module, pattern: Pattern, disturb: bool = False) -> str | None:
    with quiet():
        try:
            trial = _copy(module, pattern, disturb)
            calls = [_trainable(call) for call in pattern.calls(trial)]
            made = accelerated_class(pattern, module)
        except Exception as error:
            return f"a copy for the trial could not be made: {first_line(error)}"
        tried = 0
        for setting, dropping in _settings(trial, pattern):
            for call in calls[:1] if dropping else calls:
                setting()
                try:
                    expected = _run(trial, call, gradients=not dropping)
                except DrawsNumbersError as error:
                    return str(error)
                except Exception as error:
                    if call is calls[0]:
                        return f"a trial call failed: {first_line(error)}"
                    continue
                trial.__class__, original = made, type(trial)
                try:
                    actual = _run(trial, call, gradients=not dropping)
                except Exception as error:
                    return f"it has the structure of {pattern.name}, but its fused form failed: {first_line(error)}"
                finally:
                    trial.__class__ = original
                if not _agree(actual, expected):
                    return "it has the names of a known module, but computes something else"
                tried += 1
        return None if tried else "no trial call succeeded"


def signature(module: nn.Module, pattern: Pattern) -> Any:
    """Cache key of a probe's outcome: classes, the attributes that their code reads, shapes of parameters, values of
    buffers."""
    boxes = {child for child, _ in _black_boxes(module, pattern)}
    described: list[Any] = [type(child) for child, _ in _black_boxes(module, pattern)]
    inside = list(module.named_modules(boxes))  # without the black boxes
    names = names_read_by(child for _, child in inside)
    for name, child in inside:
        read = [(k, v) for k, v in own_attributes(child) if names is None or k in names]
        attributes = tuple((k, type(v) if k in pattern.weights else _described(v)) for k, v in read)
        shapes = tuple((k, None if t is None else tuple(t.shape)) for k, t in child._parameters.items())
        shapes += tuple((k, _described(t)) for k, t in child._buffers.items())
        described.append((name, type(child), former_classes(type(child)), attributes, shapes))
    return tuple(described)


def _described(value: Any, depth: int = 4) -> Any:
    """Value as part of a cache key: equal only for values of the same type."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, _content(value)
    if depth and isinstance(value, dict):
        return dict, tuple((_described(k, depth - 1), _described(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, list | tuple):
        return type(value), tuple(_described(inner, depth - 1) for inner in value)
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _content(tensor: Tensor) -> int:
    """Hash of the values of a tensor, or its identity if they cannot be read."""
    try:
        return hash(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    except Exception:  # a quantised or a meta tensor
        return id(tensor)


def _black_boxes(module: nn.Module, pattern: Pattern) -> Iterator[tuple[nn.Module, Part]]:
    """Modules that a pattern calls as black boxes: children, and children of the parts that it fuses."""
    for part, member in pattern.members(module) or ():
        if part.returns:
            yield member, part
        elif part.fused and (inner := pattern_of(member)):
            yield from _black_boxes(member, inner)


def _other_tensors(module: nn.Module, pattern: Pattern) -> list[Tensor]:
    """Buffers, and tensors stored by earlier calls or in other attributes."""
    inside = module.named_modules({child for child, _ in _black_boxes(module, pattern)})
    return _tensors([[v for name, v in child.__dict__.items() if name != "_parameters"] for _, child in inside])


def _copy(module: nn.Module, pattern: Pattern, disturb: bool) -> nn.Module:
    memo: dict[int, Any] = {id(child): Witness(child, part.returns) for child, part in _black_boxes(module, pattern)}
    for _, child in module.named_modules({child for child, _ in _black_boxes(module, pattern)}):
        memo |= no_hooks(child)
        for parameter in child._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                shape = list(parameter.shape)
                if isinstance(child, nn.Embedding):
                    shape[0] = min(shape[0], max(_ROWS, 1 + (child.padding_idx or 0)))
                memo[id(parameter)] = nn.Parameter(0.3 * torch.randn(shape))
    for tensor in _other_tensors(module, pattern):
        if id(tensor) not in memo:
            value = tensor.detach().to("cpu", copy=True)
            if value.is_floating_point():
                value = value.double()
                value = value * (1 + torch.rand(value.shape)) + torch.rand(value.shape) if disturb else value
            memo[id(tensor)] = value
    return copy.deepcopy(module, memo)


def _settings(trial: nn.Module, pattern: Pattern) -> Iterator[tuple[Callable[[], None], bool]]:
    """Yield settings: evaluation; training without dropout; training with one dropout that drops everything (True)."""
    dropouts: list[tuple[nn.Module, str]] = [(child, "p") for child in trial.modules() if type(child) in DROPOUTS]
    dropouts += [(trial, name) for name in pattern.dropouts]

    def setting(training: bool, everything: tuple[nn.Module, str] | None = None) -> Callable[[], None]:
        def apply() -> None:
            trial.train(training)
            for module, name in dropouts:  # in the dictionary: a made class would note a change
                module.__dict__[name] = float((module, name) == everything)

        return apply

    yield setting(False), False
    yield setting(True), False
    fused = [member for part, member in pattern.members(trial) or () if part.fused]
    for dropout in _dropouts_to_test(trial, fused):
        yield setting(True, (dropout, "p")), True
    for name in pattern.dropouts:
        yield setting(True, (trial, name)), True


def _dropouts_to_test(module: nn.Module, fused: list[nn.Module]) -> Iterator[nn.Dropout]:
    """Dropouts of a module, without those inside parts that were swapped earlier, unless the pattern fuses these
    parts."""
    for child in module.children():
        if type(child) in DROPOUTS:
            yield child
        elif not isinstance(child, Accelerated) or child in fused:
            yield from _dropouts_to_test(child, fused)


def _trainable(call: tuple[Any, ...]) -> tuple[Any, ...]:
    # Activations have three dimensions; a float of another rank is a mask.
    for tensor in _tensors(call):
        tensor.requires_grad_(tensor.is_floating_point() and tensor.dim() == 3)
    return call


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for inner in values for tensor in _tensors(inner)]


def _fresh(value: Any) -> Any:
    """Copy nested lists (not their tensors), because a call may change its state."""
    return [_fresh(inner) for inner in value] if isinstance(value, list) else value


def _run(trial: nn.Module, call: tuple[Any, ...], *, gradients: bool) -> tuple[bool, list[Tensor]]:
    """Run a call; return True for a single tensor, the outputs, and the gradients of a weighted sum of the first
    output."""
    args = [_fresh(value) for value in call]
    kwargs = args.pop() if isinstance(args[-1], Keywords) else {}
    returned = trial(*args, **kwargs)
    alone, outs = isinstance(returned, Tensor), _tensors(returned)
    trained = [t for t in (*_tensors(call), *trial.parameters()) if t.requires_grad]
    weights = torch.linspace(-1.0, 2.0, outs[0].numel()).view(outs[0].shape)
    if not (gradients and outs[0].requires_grad):
        return alone, outs
    grads = torch.autograd.grad((outs[0] * weights).sum(), trained, allow_unused=True)
    return alone, [*outs, *(torch.zeros(()) if grad is None else grad for grad in grads)]


def _agree(actual: tuple[bool, list[Tensor]], expected: tuple[bool, list[Tensor]]) -> bool:
    if actual[0] != expected[0] or len(actual[1]) != len(expected[1]):
        return False
    for a, b in zip(actual[1], expected[1]):
        if a.dim() == 0 or b.dim() == 0:  # a missing gradient equals a zero gradient
            a, b = torch.broadcast_tensors(a, b)
        if a.shape != b.shape or not (torch.equal(a, b) or torch.allclose(a, b, rtol=1e-6, atol=1e-9)):
            return False
    return True


def no_hooks(module: nn.Module) -> dict[int, Any]:
    """Memo for ``copy.deepcopy`` that leaves the hooks of the module itself out of the copy."""
    return {id(getattr(module, name)): collections.OrderedDict() for name in HOOKS}


def first_line(error: Exception) -> str:
    """Class name of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]
