"""A Triton launch as a value: what runs it on a device is also what compiles it ahead of time in the tests.

Triton finds the compiled kernel of a launch anew each time, which costs more than a short kernel runs. Two shorter
ways lead to the same driver call with the same arguments:

* :func:`run` keeps each compiled kernel by what Triton specialises on: constants, types, alignment of pointers.
* :func:`run_again` keeps whole calls by the layouts of their tensors and their scalars: the arguments of all launches,
  in which a call like an earlier one only replaces the pointers.

Both leave the first launch of a kind to Triton, and every launch while a profiler's hooks are set, in the interpreter,
and with a Triton other than those whose compiled kernels are known to be called like this (3.6 to 3.8).
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from ..configs import Table, architecture
from .remembered import remembered

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
SHORT_WAY = (3, 6) <= VERSION <= (3, 8) and not triton.knobs.runtime.interpret and torch.version.hip is None

# Calls remembered. Past that all are forgotten at once: lengths that change with every batch must not fill the memory.
MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel on a 1-D grid.

    Args:
        name: kernel and config, for people.
        kernel: the jitted function.
        grid: number of programs.
        arguments: every argument by name, constants included; more than the kernel takes do no harm.
        num_warps, num_stages: compile options.
        max_registers: compile option, registers a thread may take at most; None leaves it to the compiler.
    """

    name: str
    kernel: object
    grid: int
    arguments: dict[str, object]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self) -> dict[str, int]:
        """The compile options, as Triton takes them."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


def architecture_of(tensor: Tensor) -> str:
    """The architecture class of the tensor's GPU. The interpreter has none, and takes the smallest: sm80."""
    return _architecture(tensor.get_device()) if tensor.is_cuda else "sm80"


@functools.cache
def _architecture(device: int) -> str:
    return architecture(torch.cuda.get_device_capability(device))


def blocks_of(count: int, block: int) -> int:
    """How many blocks cover `count`: triton.cdiv, which on the host costs as much as a launch."""
    return -(-count // block)


def multiprocessors_of(tensor: Tensor) -> int:
    """How many multiprocessors the tensor's GPU has; 2 for the interpreter."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 2


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Kernel:
    """A jitted function and its compiled kernels by what they were specialised on."""

    __slots__ = ("compiled", "function", "parameters")

    def __init__(self, function: JITFunction) -> None:
        self.function = function
        self.parameters = [(p.name, p.is_constexpr, not p.do_not_specialize) for p in function.params]
        self.compiled: dict[tuple, CompiledKernel] = {}

    def bind(self, launch: Launch) -> tuple[tuple, list[object]] | None:
        """(specialisation, arguments in order, pointers as integers) of a launch.

        The specialisation tells apart at least all that Triton does: whether a pointer is a multiple of 16, the width
        of an integer, and for most integers whether it is 1 or a multiple of 16. None for what is none of these.
        """
        facts: list[object] = [launch.num_warps, launch.num_stages, launch.max_registers]
        values = []
        for name, is_constant, specialised in self.parameters:
            value = launch.arguments[name]
            if is_constant or value is None:
                facts.append(value)
            elif isinstance(value, Tensor):
                facts.append(value.dtype)
                value = value.data_ptr()
                facts.append(value % 16 == 0)
            elif type(value) is int:
                facts.append(-(2**31) <= value < 2**31 or ("u64" if value >= 2**63 else "i64"))
                facts.append(not specialised or ("one" if value == 1 else value % 16 == 0))
            elif type(value) is not float:
                return None
            values.append(value)
        return tuple(facts), values


_KERNELS: dict[int, _Kernel] = {}


@dataclass(frozen=True, slots=True)
class _Ready:
    """A launch that needs only its pointers: those of `tensors[number]` for each (place, number) of `pointers`.

    Of the tensors in `kept` the pointers are among the values.
    """

    kernel: JITFunction
    compiled: CompiledKernel
    grid: int
    values: list[object]
    pointers: list[tuple[int, int]]
    kept: list[Tensor]


_CALLS: dict[tuple, list[_Ready]] = {}
_changes_seen = 0


def _must_take_the_long_way() -> bool:
    """Whether someone watches launches or compilations, or asked for debugging checks in kernels."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if runtime.debug or getattr(runtime, "add_stages_inspection_hook", None) is not None:
        return True
    # A chain of hooks is always there, and mostly empty.
    return bool(
        (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True))
    )


def _run_as_triton_does(launch: Launch) -> CompiledKernel | None:
    arguments = {name: launch.arguments[name] for name in launch.kernel.arg_names}
    return launch.kernel[(launch.grid,)](**arguments, **launch.options())


def _start(compiled: CompiledKernel, grid: int, stream: int, values: list[object]) -> None:
    # As JITFunction.run does it last of all: without metadata, which only hooks read, and without hooks.
    compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


def _run_short(launch: Launch, device: int, stream: int) -> tuple[CompiledKernel | None, list[object]]:
    """Run one launch; its compiled kernel and arguments in order, or (None, []) if only Triton can launch it."""
    kernel = _KERNELS.get(id(launch.kernel))
    if kernel is None:
        kernel = _KERNELS[id(launch.kernel)] = _Kernel(launch.kernel)
    bound = None if launch.kernel.pre_run_hooks else kernel.bind(launch)
    if bound is None:
        _run_as_triton_does(launch)
        return None, []
    key, values = (device, *bound[0]), bound[1]
    compiled = kernel.compiled.get(key)
    if compiled is not None:
        _start(compiled, launch.grid, stream, values)
    else:
        compiled = _run_as_triton_does(launch)
        if not isinstance(compiled, CompiledKernel):  # compiled elsewhere and later, or refused by a hook
            return None, []
        kernel.compiled[key] = compiled
    return compiled, values


def run(launches: Iterable[Launch], on: Tensor) -> None:
    """Run launches in order, on the current stream of the device that holds `on`."""
    if not SHORT_WAY or _must_take_the_long_way():
        with torch.cuda.device_of(on) if on.is_cuda else nullcontext():
            for launch in launches:
                _run_as_triton_does(launch)
        return
    active = driver.active
    device = active.get_current_device()
    if on.is_cuda and on.get_device() != device:
        with torch.cuda.device_of(on):
            return run(launches, on)
    stream = active.get_current_stream(device)
    for launch in launches:
        _run_short(launch, device, stream)


def run_again(
    scalars: tuple,
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    sources: tuple[Tensor | None, ...] = (),
    derived: frozenset[str] = frozenset(),
) -> None:
    """Run the launches of a call, which are those of an earlier call but for pointers if all its layouts are.

    Args:
        scalars: hashable; with the inputs' dtypes, shapes and strides it must determine every launch: which kernel,
            its grid, each argument that is not a tensor. Tile tables do not count: changing one forgets all calls.
        inputs: the first is a tensor, on the device to run on.
        outputs: whose layouts follow from the inputs' (and temporaries, which every call needs anew).
        prepare: from the inputs and outputs, in order, the launches. Their tensors should be just those, or views that
            start where one of them does: a call that needs another, such as a copy, is prepared each time.
        sources, derived: for launches that also take tensors computed from the *contents* of some inputs (a tile map):
            those inputs, and the names of the arguments. The call is then kept on the first source, by
            :func:`.remembered.remembered`, until one of them is written to.
    """
    global _changes_seen
    tensors = (*inputs, *outputs)
    if not SHORT_WAY or _must_take_the_long_way():
        return run(prepare(*tensors), inputs[0])
    active = driver.active
    device = active.get_current_device()
    if inputs[0].is_cuda and inputs[0].get_device() != device:
        with torch.cuda.device_of(inputs[0]):
            return run_again(scalars, inputs, outputs, prepare)
    if _changes_seen != Table.changes:
        _changes_seen = Table.changes
        _CALLS.clear()

    key = (device, scalars, *[None if t is None else (t.dtype, t.shape, t.stride()) for t in inputs])
    pointers = [0 if t is None else t.data_ptr() for t in tensors]
    alignment = 0
    for pointer in pointers:
        alignment |= pointer
    stream = active.get_current_stream(device)
    fresh: list[list[_Ready] | None] = []

    def make() -> list[_Ready] | None:
        fresh.append(_prepare_and_run(tensors, prepare, derived, device, stream))
        return fresh[0]

    holder, *others = [t for t in sources if t is not None] or [None]
    if alignment % 16:
        calls = make()
    elif holder is not None:
        calls = remembered(holder, (*key, holder.storage_offset(), Table.changes), tuple(others), make)
    else:
        calls = _CALLS.get(key)
        if calls is None and make() is not None:
            if len(_CALLS) >= MOST_CALLS:
                _CALLS.clear()
            _CALLS[key] = fresh[0]
    if fresh:
        return
    if calls is None or any(ready.kernel.pre_run_hooks for ready in calls):
        make()
        return
    for ready in calls:
        values = ready.values.copy()
        for place, number in ready.pointers:
            values[place] = pointers[number]
        _start(ready.compiled, ready.grid, stream, values)


def _prepare_and_run(
    tensors: tuple[Tensor | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    derived: frozenset[str],
    device: int,
    stream: int,
) -> list[_Ready] | None:
    """Run a call of a new kind; what to keep of it, or None if it cannot be repeated with other pointers."""
    # One tensor given twice (q as k) gets two faces: the next call may give two.
    numbers: dict[int, int] = {}
    at_pointer: dict[int, list[int]] = {}
    faces = []
    for number, t in enumerate(tensors):
        if t is not None and id(t) in numbers:
            t = t.detach()
        faces.append(t)
        if t is not None:
            numbers[id(t)] = number
            at_pointer.setdefault(t.data_ptr(), []).append(number)
    calls: list[_Ready] | None = []
    for launch in prepare(*faces):
        compiled, values = _run_short(launch, device, stream)
        places, kept = [], []
        for place, parameter in enumerate(launch.kernel.params):
            value = launch.arguments[parameter.name]
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
            calls.append(_Ready(launch.kernel, compiled, launch.grid, values, places, kept))
    return calls


def widen_bf16_if_interpreted(results: int):
    """Decorator for launchers. Triton's interpreter computes on the raw bits of bf16: there, and only there, bf16
    inputs are read as fp32, and the first `results` results are rounded back to the type of the first argument."""

    def decorate(launcher):
        if not triton.knobs.runtime.interpret:
            return launcher

        def widen(value):
            return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

        @functools.wraps(launcher)
        def wide(*args, **kwargs):
            outputs = launcher(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
            return tuple(t.to(args[0].dtype) if i < results else t for i, t in enumerate(outputs))

        return wide

    return decorate
