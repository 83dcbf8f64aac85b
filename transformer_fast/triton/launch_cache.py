"""Whole calls of Triton launchers, prepared for the extension's cache of launches (csrc/triton/launch_cache.h).

A call like an earlier one starts the same kernels with the same arguments but for the pointers. The extension then
replays those launches; Python only prepares what is not there yet. Triton finds the compiled kernel of a launch anew
each time, which costs more than a short kernel runs.

Triton launches by itself while a profiler's hooks are set, in the interpreter, and with a Triton other than those whose
compiled kernels are known to be called like this (3.6 to 3.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ..extension import module
from .configs import LONG, Table
from .launcher import Launch, launch_by_triton, run

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# A Triton kernel is part of an op, and the ops are in the extension.
extension = module()
launch_cache = extension.launch_cache
launch_cache.connect(driver, triton.knobs.runtime, Table)
launch_cache.long_keys = LONG
launch_cache.enabled = (3, 6) <= VERSION <= (3, 8) and not triton.knobs.runtime.interpret and torch.version.hip is None


def run_cached(
    scalars: tuple[str | bool | int | float | None, ...],
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
) -> None:
    """Run the launches of a call, which are those of an earlier call but for pointers if all its layouts are.

    Args:
        scalars: with the inputs' dtypes, shapes and strides they must determine every launch: which kernel, its grid,
            each argument that is not a tensor. Tile tables do not count: changing one forgets all calls.
        inputs, outputs, prepare: as :func:`run_kept` takes them.
    """
    run_kept(extension.LaunchCall(scalars, inputs), inputs, outputs, prepare)


def run_kept(
    call: Any,
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of an earlier call like this one, or prepare them and keep them with the call.

    Args:
        call: the extension's ``LaunchCall``: what tells this call from others; None keeps nothing.
        inputs: those of the call, in its order. The first is a tensor, on the device to run on. One may be an int,
            which changes from call to call like a pointer: the argument "seed". Where one is a copy, nothing is kept.
        outputs: whose layouts follow from the inputs' (and temporaries, which every call needs anew).
        prepare: from the inputs and outputs, in order, the launches. Their tensors should be just those, or views that
            start where one of them does: a call that needs another, such as a copy, is prepared each time.
        derived: names of the arguments that were computed from the *contents* of the call's sources (a tile map). The
            call is then kept on the first source until one of them is written to.
    """
    is_kept = call is not None and call.add_outputs(inputs, outputs)
    if is_kept and launch_cache.replay(call):
        return
    if not is_kept or not launch_cache.can_replay():
        run(prepare(*inputs, *outputs), inputs[0])
        return
    with torch.cuda.device_of(inputs[0]):
        if launch_cache.replay(call):  # kept by the device that is current now
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        launches = _prepare_and_run((*inputs, *outputs), prepare, derived, stream)
        if launches is not None:
            launch_cache.store(call, launches)


def _prepare_and_run(
    tensors: tuple[Tensor | int | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str],
    stream: int,
) -> list[Any] | None:
    """Run a call of a new kind; its launches to keep, or None if they cannot be repeated with other pointers."""
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
        compiled = launch_by_triton(launch)
        # Another kind comes from a hook that refused the launch, or that compiles it elsewhere and later.
        repeatable = isinstance(compiled, CompiledKernel) and not launch.kernel.pre_run_hooks
        arguments, pointers, kept = [], [], []
        for place, parameter in enumerate(launch.kernel.params, FIRST_OF_A_KERNEL):
            value = launch.arguments[parameter.name]
            if parameter.name == "seed" and type(value) is int:
                pointers.append((place, seed))
                # Triton took it for an int32, as it does one in four billion.
                repeatable = repeatable and not -(2**31) <= value < 2**31
            if not isinstance(value, Tensor):
                arguments.append(value)
                continue
            arguments.append(value.data_ptr())
            number = numbers.get(id(value))
            views = at_pointer.get(value.data_ptr(), [])
            if number is None and len(views) == 1 and value.data_ptr() != 0:
                number = views[0]
            if number is not None:
                pointers.append((place, number))
            elif parameter.name in derived:
                kept.append(value)
            else:
                repeatable = False
        if not repeatable:
            launches = None
        elif launches is not None:
            # As JITFunction.run calls it last of all: without metadata, which only hooks read, and without hooks.
            leading = launch.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None
            launches.append(extension.CachedLaunch(compiled.run, (*leading, *arguments), pointers, launch.kernel, kept))
    return launches


FIRST_OF_A_KERNEL = 9
"""Arguments that a compiled kernel's ``run`` takes before those of the kernel."""
