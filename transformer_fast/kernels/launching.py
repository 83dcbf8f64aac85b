"""A Triton launch as a value: what runs it on a device is also what compiles it ahead of time in the tests."""

import functools
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..configs import architecture


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel on a 1-D grid.

    Args:
        name: kernel and config, for people.
        kernel: the jitted function.
        grid: number of programs.
        arguments: every argument by name, constants included.
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
    return architecture(torch.cuda.get_device_capability(tensor.device)) if tensor.is_cuda else "sm80"


def run(launches: Iterable[Launch], on: Tensor) -> None:
    """Run launches in order, on the current stream of the device that holds `on`."""
    with torch.cuda.device_of(on) if on.is_cuda else nullcontext():
        for launch in launches:
            launch.kernel[(launch.grid,)](**launch.arguments, **launch.options())


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
