"""Whole calls of Triton launchers, kept by the layouts of their tensors and their scalars.

A call like an earlier one starts the same kernels with the same arguments but for the pointers, which is all that
:func:`run_again` then replaces. The extension does it from its own rules of autograd, with :func:`find`: Python then
only looks the call up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime import JITFunction, driver

from .. import extension
from ..tensor_cache import recall_by_key, remembered
from . import launcher
from .configs import Table
from .launcher import Launch, launch_arguments, must_take_the_long_way, run, run_short

# Calls remembered. Past that all are forgotten at once: lengths that change with every batch must not fill the memory.
MOST_CALLS = 4096


class Ready(NamedTuple):
    """A launch that needs only its stream and its pointers.

    Args:
        run: the launcher of the compiled kernel.
        arguments: all that `run` takes: the stream at STREAM, and from FIRST on those of the kernel.
        pointers: for each (place, number), `arguments[place]` is to be the address of the call's tensor `number`.
        kernel: the jitted function.
        kept: tensors whose addresses are among the arguments.
    """

    run: Callable[..., object]
    arguments: tuple
    pointers: tuple[tuple[int, int], ...]
    kernel: JITFunction
    kept: list[Tensor]


STREAM, FIRST = 3, 9

_CALLS: dict[tuple, list[Ready]] = {}
_changes_seen = 0


def find(scalars: tuple, layout: object, sources: tuple[Tensor, ...], device: int) -> tuple[list[Ready], int] | None:
    """The launches kept of an earlier call like this one, and the stream to run them on; None where the call must be
    prepared, or somebody watches launches.

    Args:
        scalars, sources: see :func:`run_again`.
        layout: what :func:`layouts` told of the inputs, all pointers being multiples of 16.
        device: number of the tensors' GPU; -1 on the CPU.
    """
    if not launcher.SHORT_WAY or must_take_the_long_way() or _changes_seen != Table.changes:
        return None
    active = driver.active
    current = active.get_current_device()
    if device not in (current, -1):
        return None
    key = current, scalars, layout
    calls = recall_by_key(sources[0], (*key, Table.changes), sources[1:]) if sources else _CALLS.get(key)
    if calls is None:
        return None
    for ready in calls:
        if ready.kernel.pre_run_hooks:
            return None
    return calls, active.get_current_stream(current)


def run_again(
    scalars: tuple,
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    sources: tuple[Tensor, ...] = (),
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of a call, which are those of an earlier call but for pointers if all its layouts are.

    Args:
        scalars: hashable; with the inputs' dtypes, shapes and strides it must determine every launch: which kernel,
            its grid, each argument that is not a tensor. Tile tables do not count: changing one forgets all calls.
        inputs: the first is a tensor, on the device to run on. One may be an int, which changes from call to call like
            a pointer: the argument "seed".
        outputs: whose layouts follow from the inputs' (and temporaries, which every call needs anew).
        prepare: from the inputs and outputs, in order, the launches. Their tensors should be just those, or views that
            start where one of them does: a call that needs another, such as a copy, is prepared each time.
        sources, derived: for launches that also take tensors computed from the *contents* of some inputs (a tile map):
            those inputs, and the names of the arguments. The call is then kept on the first source, by
            :func:`..tensor_cache.remembered`, until one of them is written to.
    """
    global _changes_seen
    first = inputs[0]
    if not launcher.SHORT_WAY or must_take_the_long_way():
        return run(prepare(*inputs, *outputs), first)
    device = driver.active.get_current_device()
    if first.is_cuda and first.get_device() != device:
        with torch.cuda.device_of(first):
            return run_again(scalars, inputs, outputs, prepare, sources, derived)
    layout, pointers, aligned = layouts(inputs, outputs)
    found = find(scalars, layout, sources, first.get_device()) if aligned else None
    if found is not None:
        return start(found[0], pointers, found[1])
    if _changes_seen != Table.changes:
        _changes_seen = Table.changes
        _CALLS.clear()
    calls = _prepare_and_run((*inputs, *outputs), prepare, derived, device)
    if calls is None or not aligned:
        return
    key = device, scalars, layout
    if sources:
        remembered(sources[0], (*key, Table.changes), sources[1:], lambda: calls, with_layouts=False)
        return
    if len(_CALLS) >= MOST_CALLS:
        _CALLS.clear()
    _CALLS[key] = calls


def _prepare_and_run(
    tensors: tuple[Tensor | int | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str],
    device: int,
) -> list[Ready] | None:
    """Run a call of a new kind; what to keep of it, or None if it cannot be repeated with other pointers."""
    stream = driver.active.get_current_stream(device)
    # One tensor given twice (q as k) gets two faces: the next call may give two.
    numbers: dict[int, int] = {}
    at_pointer: dict[int, list[int]] = {}
    faces = []
    seed = None
    for number, t in enumerate(tensors):
        if isinstance(t, Tensor) and id(t) in numbers:
            t = t.detach()
        faces.append(t)
        if type(t) is int:
            seed = number
        elif t is not None:
            numbers[id(t)] = number
            at_pointer.setdefault(t.data_ptr(), []).append(number)
    calls: list[Ready] | None = []
    for launch in prepare(*faces):
        compiled, values = run_short(launch, device, stream)
        places, kept = [], []
        for place, parameter in enumerate(launch.kernel.params, FIRST):
            value = launch.arguments[parameter.name]
            if parameter.name == "seed" and type(value) is int:
                places.append((place, seed))
                # Triton took it for an int32, as it does one in four billion.
                compiled = None if -(2**31) <= value < 2**31 else compiled
            if not isinstance(value, Tensor):
                continue
            number = numbers.get(id(value))
            views = at_pointer.get(value.data_ptr(), [])
            if number is None and len(views) == 1 and value.data_ptr() != 0:
                number = views[0]
            if number is not None:
                places.append((place, number))
            elif parameter.name in derived:
                kept.append(value)
            else:
                compiled = None
        if compiled is None or launch.kernel.pre_run_hooks:
            calls = None
        elif calls is not None:
            arguments = (*launch_arguments(compiled, launch.grid, stream), *values)
            calls.append(Ready(compiled.run, arguments, tuple(places), launch.kernel, kept))
    return calls


def _layouts(inputs: tuple, outputs: tuple) -> tuple[tuple, list[int], bool]:
    """(what tells the inputs' layouts apart, addresses of all, with ints as they are, whether those are aligned)."""
    pointers = [0 if t is None else t if type(t) is int else t.data_ptr() for t in (*inputs, *outputs)]
    bits = 0
    for t, pointer in zip((*inputs, *outputs), pointers, strict=True):
        bits |= pointer if isinstance(t, Tensor) else 0
    layout = tuple((t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else type(t) for t in inputs)
    return layout, pointers, bits % 16 == 0


def _start(calls: list[Ready], pointers: list[int], stream: int) -> None:
    """Start the launches with these pointers."""
    for ready in calls:
        arguments = list(ready.arguments)
        arguments[STREAM] = stream
        for place, number in ready.pointers:
            arguments[place] = pointers[number]
        ready.run(*arguments)


# Of the extension where there is one: these steps, a few dozen a call, cost microseconds in Python.
layouts = getattr(extension.module(), "layouts", _layouts)
start = getattr(extension.module(), "start", _start)
