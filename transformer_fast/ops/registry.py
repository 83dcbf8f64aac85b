"""One record per op, which the choice of a backend, exports, ``verify`` and the tests read. Each file of an op adds its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, extension

Tensors = dict[str, Tensor]
SEED = 20170612


class Case(NamedTuple):
    """A computation to check: `run` computes a tensor, or several, from the `inputs`, given in fp32 by its names."""

    op: str
    name: str
    inputs: Tensors
    run: Callable[..., Tensor | tuple[Tensor, ...]]


class Draw:
    """Random inputs that are the same on every device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) + shift).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)


@dataclass(frozen=True)
class Op:
    """An op.

    Attributes:
        name: of the public function.
        kernels: name of its kernels, as ``backends.choose`` takes it.
        on_cuda: backend of CUDA tensors under "auto": "triton", "native", or "reference" without kernels for a GPU.
        plain: functions in PyTorch's own operators, with the names and arguments of the operators that the op calls.
        cases: calls with gradients for the parity table. Shapes are odd on purpose: no size is a multiple of a tile.
    """

    name: str
    kernels: str
    on_cuda: str
    plain: tuple[Callable[..., Any], ...]
    cases: Callable[[Draw], Iterable[Case]]


OPS: dict[str, Op] = {}
"""Records by the name of the public function."""
PLAIN: dict[str, Callable[..., Any]] = {}
"""Functions in PyTorch's own operators by operator."""


def register(op: Op) -> None:
    OPS[op.name] = op
    PLAIN.update({function.__name__: function for function in op.plain})
    backends.ON_CUDA[op.kernels] = op.on_cuda
    backends.KERNELS[op.name] = op.kernels


def op_cases(device: torch.device) -> Iterator[Case]:
    """Cases of every op."""
    draw = Draw(device)
    for op in OPS.values():
        yield from op.cases(draw)


def implementation(op: str, backend: str) -> Callable[..., Any]:
    """Function that computes ``transformer_fast::<op>``: for the backend "plain" the function in PyTorch's own
    operators, else the op."""
    if backend == "plain":
        return PLAIN[op]
    return getattr(torch.ops.transformer_fast, op).default


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The ops in PyTorch's own operators, for ``torch.export``: ``program.run_decompositions(decompositions())``.

    The decomposed program consists of ATen operators. The program runs, compiles and converts without this package. The
    table covers every op that a forward pass without dropout can export. The table is empty without the extension,
    because then no program can hold its ops.

    Example:
        >>> inputs = (torch.randn(2, 8),)
        >>> program = torch.export.export(tfast.layers.Norm(8), inputs)
        >>> "transformer_fast" in str(program.graph)
        True
        >>> "transformer_fast" in str(program.run_decompositions(tfast.decompositions()).graph)
        False
    """
    if not extension.load():
        return {}
    ops = {name: getattr(torch.ops.transformer_fast, name).default for name in PLAIN}
    return {op: _by_position(op, PLAIN[name]) for name, op in ops.items()}


def _by_position(op: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """Function of an op that takes positional arguments in the order of the op's schema, as graphs pass them."""
    names = [argument.name for argument in op._schema.arguments]

    def call(*given: Any, **named: Any) -> Any:
        return function(**dict(zip(names, given, strict=False)), **named)

    return call
