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

# Triton kernels belong to ops, which call their launchers through the module.
extension = module()
launch_cache, LaunchCall = extension.launch_cache, extension.LaunchCall
launch_cache.connect(driver, triton.knobs.runtime, Table)
launch_cache.long_keys = LONG
launch_cache.enabled = is_known(triton.__version__) and not triton.knobs.runtime.interpret and torch.version.hip is None

FIRST_OF_A_KERNEL = 9
"""Arguments that a compiled kernel's ``run`` takes before those of the kernel."""


def run_kept(
    call: Any,
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[[], Iterable[Launch]],
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of an earlier equal call on these outputs, or prepare the launches and keep them with the call.

    Args:
        call: the extension's ``LaunchCall``, the key of the call: its inputs, and scalars that with the inputs' dtypes,
            shapes and strides determine every launch, its kernel, its grid, and each argument that is not a tensor.
            Tile tables are excepted: changing one forgets all calls. None keeps nothing.
        outputs: what the launcher allocated: its results in their order, the first a tensor on the device to run on,
            then temporaries. Layouts of outputs follow from those of the inputs.
        prepare: function that returns the launches. The tensors of a launch should be inputs, outputs, or views with
            the same start: a call with other tensors, such as a copy, is prepared each time. An argument "seed" that is
            an int is the call's.
        derived: names of the arguments that are computed from the contents of the call's sources (a tile map). The call
            is then kept on the first source until one of them is written to.
    """
    if call is not None and launch_cache.replay_into(call, outputs):
        return
    if call is None or not launch_cache.can_replay():
        run(prepare(), outputs[0])
        return
    with torch.cuda.device_of(outputs[0]):
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        launches = _run_and_record(prepare(), call.places(), derived, stream)
        if launches is not None:
            launch_cache.store(call, launches)


def _run_and_record(
    launches: Iterable[Launch], places: dict[int | str, int], derived: frozenset[str], stream: int
) -> list[Any] | None:
    """Run launches; return them as the extension keeps them, or None if they cannot be repeated elsewhere.

    `places` has the place in the call of each address, and of "seed".
    """
    recorded, repeatable = [], True
    for launch in launches:
        compiled = launch_by_triton(launch)
        # The result has another class if a hook refused the launch, or compiles it elsewhere.
        repeatable = repeatable and isinstance(compiled, CompiledKernel) and not launch.kernel.pre_run_hooks
        # From Triton 3.8 on, a kernel's machine code is unloaded once its CompiledKernel is gone.
        arguments, pointers, kept = [], [], [compiled]
        for number, parameter in enumerate(launch.kernel.params, FIRST_OF_A_KERNEL):
            value = launch.arguments[parameter.name]
            if parameter.name == "seed" and type(value) is int:
                pointers.append((number, places["seed"]))
                # Triton passes such a small seed (one in four billion) as int32, which other seeds do not fit.
                repeatable = repeatable and not -(2**31) <= value < 2**31
            elif isinstance(value, Tensor):
                tensor, value = value, value.data_ptr()
                if value in places:
                    pointers.append((number, places[value]))
                elif parameter.name in derived:
                    kept.append(tensor)
                else:
                    repeatable = repeatable and value == 0
            arguments.append(value)
        if repeatable:
            # The last call of JITFunction.run, without hooks and without metadata, which only hooks read.
            leading = launch.grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None
            recorded.append(extension.CachedLaunch(compiled.run, (*leading, *arguments), pointers, launch.kernel, kept))
    return recorded if repeatable else None
