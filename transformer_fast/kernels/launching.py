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
from . import extension
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
            :func:`.remembered.remembered`, until one of them is written to.
    """
    global _changes_seen
    first = inputs[0]
    if not SHORT_WAY or _must_take_the_long_way():
        return run(prepare(*inputs, *outputs), first)
    active = driver.active
    device = active.get_current_device()
    if first.is_cuda and first.get_device() != device:
        with torch.cuda.device_of(first):
            return run_again(scalars, inputs, outputs, prepare, sources, derived)
    if _changes_seen != Table.changes:
        _changes_seen = Table.changes
        _CALLS.clear()

    layout, pointers, aligned = layouts(inputs, outputs)
    key = (device, scalars, layout)
    stream = active.get_current_stream(device)
    calls = _CALLS.get(key) if aligned and not sources else None
    if calls is None:
        calls, prepared = _find_or_prepare(key, aligned, (*inputs, *outputs), prepare, sources, derived, stream)
        if prepared:
            return None
    for ready in calls:
        if ready.kernel.pre_run_hooks:
            _prepare_and_run((*inputs, *outputs), prepare, derived, device, stream)
            return None
    for ready in calls:
        values = ready.values.copy()
        for place, number in ready.pointers:
            values[place] = pointers[number]
        _start(ready.compiled, ready.grid, stream, values)
    return None


def _find_or_prepare(
    key: tuple,
    aligned: bool,
    tensors: tuple[Tensor | int | None, ...],
    prepare: Callable[..., Iterable[Launch]],
    sources: tuple[Tensor, ...],
    derived: frozenset[str],
    stream: int,
) -> tuple[list[_Ready], bool]:
    """(what is kept on the first source, False); or where there is nothing, prepare the call, run it, keep it where it
    can be repeated, and say so: ([], True)."""
    prepared = False

    def make() -> list[_Ready] | None:
        nonlocal prepared
        prepared = True
        return _prepare_and_run(tensors, prepare, derived, key[0], stream)

    if aligned and sources:
        kept = remembered(sources[0], (*key, Table.changes), sources[1:], make, with_layouts=False)
        if not prepared and kept is None:
            make()
        return kept or [], prepared
    calls = make()
    if aligned and calls is not None:
        if len(_CALLS) >= MOST_CALLS:
            _CALLS.clear()
        _CALLS[key] = calls
    return [], True


def _layouts(inputs: tuple, outputs: tuple) -> tuple[tuple, list[int], bool]:
    """(what tells the inputs' layouts apart, addresses of all, with ints as they are, whether those are aligned)."""
    pointers = [0 if t is None else t if type(t) is int else t.data_ptr() for t in (*inputs, *outputs)]
    bits = 0
    for t, pointer in zip((*inputs, *outputs), pointers, strict=True):
        bits |= pointer if isinstance(t, Tensor) else 0
    layout = tuple((t.dtype, t.shape, t.stride()) if isinstance(t, Tensor) else type(t) for t in inputs)
    return layout, pointers, bits % 16 == 0


def _empties_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised tensors of the same shapes, types and, where they are dense, strides."""
    return tuple(torch.empty_like(t) for t in tensors)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """What attention returns for q (B, H, Lq, D), or packed (T, H, D): out like q, and logsumexp (B, H, Lq) or (H, T)
    in fp32; uninitialised."""
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty_like(q), torch.empty(rows, dtype=torch.float32, device=q.device)


# Of the extension where there is one: these steps, a few dozen a call, cost microseconds in Python.
layouts = getattr(extension.module(), "layouts", _layouts)
empties_like = getattr(extension.module(), "empties_like", _empties_like)
empty_outputs = getattr(extension.module(), "empty_outputs", _empty_outputs)


def _prepare_and_run(
    tensors: tuple[Tensor | int | None, ...],
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
    calls: list[_Ready] | None = []
    for launch in prepare(*faces):
        compiled, values = _run_short(launch, device, stream)
        places, kept = [], []
        for place, parameter in enumerate(launch.kernel.params):
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
