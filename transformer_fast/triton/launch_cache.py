"""Whole calls of Triton launchers, prepared for the extension's cache of launches (csrc/triton/launch_cache.h).

A call like an earlier one starts the same kernels with the same arguments but for the pointers. The extension then
replays those launches; Python only prepares what is not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from .launcher import Launch, extension, launch_arguments, launch_cache, launch_compiled, run


def run_cached(
    scalars: tuple[str | bool | int | float | None, ...],
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    sources: tuple[Tensor, ...] = (),
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of a call, which are those of an earlier call but for pointers if all its layouts are.

    Args:
        scalars: with the inputs' dtypes, shapes and strides they must determine every launch: which kernel, its grid,
            each argument that is not a tensor. Tile tables do not count: changing one forgets all calls.
        inputs: the first is a tensor, on the device to run on. One may be an int, which changes from call to call like
            a pointer: the argument "seed".
        outputs: whose layouts follow from the inputs' (and temporaries, which every call needs anew).
        prepare: from the inputs and outputs, in order, the launches. Their tensors should be just those, or views that
            start where one of them does: a call that needs another, such as a copy, is prepared each time.
        sources, derived: for launches that also take tensors computed from the *contents* of some inputs (a tile map):
            those inputs, and the names of the arguments. The call is then kept on the first source until one of them is
            written to.
    """
    call = extension.LaunchCall(scalars, inputs, outputs, sources)
    if launch_cache.replay(call):
        return
    first = inputs[0]
    if not launch_cache.can_replay():
        return run(prepare(*inputs, *outputs), first)
    device = driver.active.get_current_device()
    if first.is_cuda and first.get_device() != device:
        with torch.cuda.device_of(first):
            return run_cached(scalars, inputs, outputs, prepare, sources, derived)
    launches = _prepare_and_run((*inputs, *outputs), prepare, derived, device)
    if launches is not None:
        launch_cache.store(call, launches)


def _prepare_and_run(
    tensors: tuple[Tensor | int | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str],
    device: int,
) -> list[Any] | None:
    """Run a call of a new kind; its launches to keep, or None if they cannot be repeated with other pointers."""
    stream = driver.active.get_current_stream(device)
    # One tensor given twice (q as k) is told apart by a view: the next call may give two.
    numbers: dict[int, int] = {}
    at_pointer: dict[int, list[int]] = {}
    distinct = []
    seed = None
    for number, t in enumerate(tensors):
        if isinstance(t, Tensor) and id(t) in numbers:
            t = t.detach()
        distinct.append(t)
        if type(t) is int:
            seed = number
        elif t is not None:
            numbers[id(t)] = number
            at_pointer.setdefault(t.data_ptr(), []).append(number)
    launches: list[Any] | None = []
    for launch in prepare(*distinct):
        compiled, values = launch_compiled(launch, device, stream)
        leading = () if compiled is None else launch_arguments(compiled, launch.grid, stream)
        pointers, kept = [], []
        for place, parameter in enumerate(launch.kernel.params, len(leading)):
            value = launch.arguments[parameter.name]
            if parameter.name == "seed" and type(value) is int:
                pointers.append((place, seed))
                # Triton took it for an int32, as it does one in four billion.
                compiled = None if -(2**31) <= value < 2**31 else compiled
            if not isinstance(value, Tensor):
                continue
            number = numbers.get(id(value))
            views = at_pointer.get(value.data_ptr(), [])
            if number is None and len(views) == 1 and value.data_ptr() != 0:
                number = views[0]
            if number is not None:
                pointers.append((place, number))
            elif parameter.name in derived:
                kept.append(value)
            else:
                compiled = None
        if compiled is None or launch.kernel.pre_run_hooks:
            launches = None
        elif launches is not None:
            arguments = (*leading, *values)
            launches.append(extension.CachedLaunch(compiled.run, arguments, pointers, launch.kernel, kept))
    return launches
