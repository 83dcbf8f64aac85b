"""Whole calls of Triton launchers, prepared for the extension's cache of launches (csrc/triton/launch_cache.h).

Two equal calls start the same kernels with the same arguments, except the pointers. The extension replays the launches
of an earlier call; Python prepares only new calls. Triton itself looks up the compiled kernel of each launch, which
takes longer than a short kernel runs.

Launches go through Triton while a profiler's hooks are set, in the interpreter, and with versions of Triton whose
compiled kernels may need other calls (:mod:`.versions`).
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
from .versions import is_known

# Triton kernels belong to ops, and the ops are in the extension.
extension = module()
launch_cache, LaunchCall = extension.launch_cache, extension.LaunchCall
launch_cache.connect(driver, triton.knobs.runtime, Table)
launch_cache.long_keys = LONG
launch_cache.enabled = is_known(triton.__version__) and not triton.knobs.runtime.interpret and torch.version.hip is None


def run_cached(
    scalars: tuple[str | bool | int | float | None, ...],
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
) -> None:
    """Run the launches of a call; those of an earlier call with equal layouts are reused with new pointers.

    Args:
        scalars: with the inputs' dtypes, shapes and strides they must determine every launch: its kernel, its grid, and
            each argument that is not a tensor. Tile tables are excepted: changing one forgets all calls. Which outputs
            are None is added here.
        inputs, outputs, prepare: as for :func:`run_kept`.
    """
    wanted = "".join("01"[t is not None] for t in outputs)
    run_kept(extension.LaunchCall((*scalars, wanted), inputs), inputs, outputs, prepare)


def run_kept(
    call: Any,
    inputs: tuple[Tensor | int | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of an earlier equal call, or prepare the launches and keep them with the call.

    Args:
        call: the extension's ``LaunchCall``, the key of the call; None keeps nothing.
        inputs: inputs of the call, in its order. The first is a tensor, on the device to run on. One may be an int that
            changes from call to call like a pointer: the argument "seed". If an input is a copy, nothing is kept.
        outputs: outputs and temporaries of the call, whose layouts follow from those of the inputs.
        prepare: function of the inputs and outputs, in order, that returns the launches. Tensors of the launches should
            be inputs, outputs, or views with the same start: a call with other tensors, such as a copy, is prepared
            each time.
        derived: names of the arguments that are computed from the contents of the call's sources (a tile map). The call
            is then kept on the first source until one of them is written to.
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
    """Run a new call; return its launches, or None if they cannot be repeated with other pointers."""
    # A tensor that is given twice (q as k) gets a view, because the next call may give two tensors.
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
        # The result has another class if a hook refused the launch, or compiles it elsewhere.
        repeatable = isinstance(compiled, CompiledKernel) and not launch.kernel.pre_run_hooks
        # From Triton 3.8 on, a kernel's machine code is unloaded once its CompiledKernel is gone.
        arguments, pointers, kept = [], [], [compiled]
        for place, parameter in enumerate(launch.kernel.params, FIRST_OF_A_KERNEL):
            value = launch.arguments[parameter.name]
            if parameter.name == "seed" and type(value) is int:
                pointers.append((place, seed))
                # Triton passes such a small seed (one in four billion) as int32, which other seeds do not fit.
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
            # The last call of JITFunction.run, without hooks and without metadata, which only hooks read.
            leading = launch.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None
            launches.append(extension.CachedLaunch(compiled.run, (*leading, *arguments), pointers, launch.kernel, kept))
    return launches


FIRST_OF_A_KERNEL = 9
"""Arguments that a compiled kernel's ``run`` takes before those of the kernel."""
