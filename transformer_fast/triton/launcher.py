"""A Triton launch as a value: what runs it on a device is also what compiles it ahead of time in the tests.

Triton finds the compiled kernel of a launch anew each time, which costs more than a short kernel runs. :func:`run`
keeps each by what Triton specialises on: constants, types, alignment of pointers; :mod:`.launch_cache` keeps whole
calls. Either leads to the same driver call with the same arguments.

Both leave the first launch of a kind to Triton, and every launch while a profiler's hooks are set, in the interpreter,
and with a Triton other than those whose compiled kernels are known to be called like this (3.6 to 3.8).
"""

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from ..attention_params import AttentionParams
from ..extension import module
from .configs import Table, architecture

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# A Triton kernel is part of an op, and the ops are in the extension.
extension = module()
launch_cache = extension.launch_cache
launch_cache.connect(driver, triton.knobs.runtime, Table)
launch_cache.enabled = (3, 6) <= VERSION <= (3, 8) and not triton.knobs.runtime.interpret and torch.version.hip is None


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel on a 1-D grid.

    Args:
        name: kernel and config, for people.
        kernel: the jitted function.
        grid: number of programs.
        arguments: every argument by name, constants included; more than the kernel takes do no harm.
        num_warps, num_stages: compile options.
        max_registers: compile option, most registers per thread; None leaves it to the compiler.
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
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


def architecture_of(tensor: Tensor) -> str:
    """The architecture class of the tensor's GPU. The interpreter has none, and takes the smallest: sm80."""
    return _architecture(tensor.get_device()) if tensor.is_cuda else "sm80"


@functools.cache
def _architecture(device: int) -> str:
    return architecture(torch.cuda.get_device_capability(device))


def blocks_of(count: int, block: int) -> int:
    """Number of blocks that cover `count`: triton.cdiv, which on the host costs as much as a launch."""
    return -(-count // block)


def multiprocessors_of(tensor: Tensor) -> int:
    """Number of multiprocessors of the tensor's GPU; 2 for the interpreter."""
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


def _launch_by_triton(launch: Launch) -> CompiledKernel | None:
    arguments = {name: launch.arguments[name] for name in launch.kernel.arg_names}
    return launch.kernel[(launch.grid,)](**arguments, **launch.options())


def launch_arguments(compiled: CompiledKernel, grid: int, stream: int) -> tuple:
    """Arguments that `compiled.run` takes before the kernel's own."""
    # As JITFunction.run does it last of all: without metadata, which only hooks read, and without hooks.
    return grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None


def launch_compiled(launch: Launch, device: int, stream: int) -> tuple[CompiledKernel | None, list[object]]:
    """Run one launch; its compiled kernel and arguments in order, or (None, []) if only Triton can launch it."""
    kernel = _KERNELS.get(id(launch.kernel))
    if kernel is None:
        kernel = _KERNELS[id(launch.kernel)] = _Kernel(launch.kernel)
    bound = None if launch.kernel.pre_run_hooks else kernel.bind(launch)
    if bound is None:
        _launch_by_triton(launch)
        return None, []
    key, values = (device, *bound[0]), bound[1]
    compiled = kernel.compiled.get(key)
    if compiled is not None:
        compiled.run(*launch_arguments(compiled, launch.grid, stream), *values)
    else:
        compiled = _launch_by_triton(launch)
        if not isinstance(compiled, CompiledKernel):  # compiled elsewhere and later, or refused by a hook
            return None, []
        kernel.compiled[key] = compiled
    return compiled, values


def run(launches: Iterable[Launch], on: Tensor) -> None:
    """Run launches in order, on the current stream of the device that holds `on`."""
    if not launch_cache.can_replay():
        with torch.cuda.device_of(on) if on.is_cuda else nullcontext():
            for launch in launches:
                _launch_by_triton(launch)
        return
    active = driver.active
    device = active.get_current_device()
    if on.is_cuda and on.get_device() != device:
        with torch.cuda.device_of(on):
            return run(launches, on)
    stream = active.get_current_stream(device)
    for launch in launches:
        launch_compiled(launch, device, stream)


def empties_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised tensors of the same shapes, types and, where they are dense, strides."""
    return tuple(torch.empty_like(t) for t in tensors)


def empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised outputs for q (B, H, Lq, D), or packed (T, H, D): out like q, logsumexp (B, H, Lq) or (H, T) in
    fp32."""
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    return torch.empty_like(q), torch.empty(rows, dtype=torch.float32, device=q.device)


def without_keys(logsumexp: Tensor, sinks: Tensor | None) -> Tensor:
    """Fills the logsumexp (B, H, Lq), or (H, T), of queries that have no keys."""
    return logsumexp.fill_(float("-inf")) if sinks is None else logsumexp.copy_(sinks.unsqueeze(-1))


def widen_bf16_if_interpreted(results: int):
    """Decorator for launchers. Triton's interpreter computes on the raw bits of bf16: there, and only there, bf16
    inputs are read as fp32, and the first `results` results are rounded back to the type of the first argument."""

    def decorate(launcher):
        if not triton.knobs.runtime.interpret:
            return launcher

        def widen(value):
            if isinstance(value, AttentionParams):
                return replace(value, bias=widen(value.bias))
            return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

        @functools.wraps(launcher)
        def wide(*args, **kwargs):
            outputs = launcher(*map(widen, args), **{name: widen(value) for name, value in kwargs.items()})
            if isinstance(outputs, Tensor):
                return outputs.to(args[0].dtype) if results > 0 else outputs
            return tuple(t.to(args[0].dtype) if i < results else t for i, t in enumerate(outputs))

        return wide

    return decorate
