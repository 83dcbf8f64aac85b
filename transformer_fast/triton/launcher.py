"""Triton launches as values, which run on a device, or are compiled ahead of time in tests."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from ..attention_params import AttentionParams
from .configs import architecture


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel on a 1-D grid.

    Args:
        name: kernel and config, as text for reports.
        kernel: the jitted function.
        grid: number of programs.
        arguments: every argument by name, constants included; arguments that the kernel does not have are ignored.
        num_warps, num_stages: compile options.
        max_registers: compile option, largest number of registers per thread; None lets the compiler choose.
    """

    name: str
    kernel: object
    grid: int
    arguments: dict[str, object]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def options(self) -> dict[str, int]:
        """The compile options, as Triton takes them.

        Products and sums are fused, as all versions of Triton up to 3.9 do by default. 3.9 warns if that is left open,
        because 3.10 is to have another default.
        """
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
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
    """Number of blocks that cover `count`. On the host triton.cdiv takes as long as a launch."""
    return -(-count // block)


def multiprocessors_of(tensor: Tensor) -> int:
    """Number of multiprocessors of the tensor's GPU; 2 for the interpreter."""
    return _multiprocessors(tensor.get_device()) if tensor.is_cuda else 2


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_by_triton(launch: Launch) -> CompiledKernel | None:
    """Launch on the current stream of the current device, and return the compiled kernel."""
    arguments = {name: launch.arguments[name] for name in launch.kernel.arg_names}
    return launch.kernel[(launch.grid,)](**arguments, **launch.options())


def run(launches: Iterable[Launch], on: Tensor) -> None:
    """Run launches in order, on the current stream of the device that holds `on`."""
    with torch.cuda.device_of(on):
        for launch in launches:
            launch_by_triton(launch)


def contiguous(t: Tensor | None) -> Tensor | None:
    """The tensor, contiguous; None for None."""
    return None if t is None else t.contiguous()


def empties_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised tensors with the same shapes and dtypes and, if dense, the same strides."""
    return tuple(torch.empty_like(t) for t in tensors)


def without_keys(logsumexp: Tensor, sinks: Tensor | None) -> Tensor:
    """Fill the logsumexp (B, H, Lq), or (H, T), of queries that have no keys."""
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
            if not isinstance(outputs, tuple):
                return outputs.to(args[0].dtype) if results > 0 else outputs
            return tuple(t if t is None or i >= results else t.to(args[0].dtype) for i, t in enumerate(outputs))

        return wide

    return decorate
