"""How an op enters PyTorch: one schema, one implementation, one fake, one autograd rule, one autocast rule.

Every op of the package is defined here in the library ``transformer_fast`` (``torch.ops.transformer_fast``).
Its implementation is registered for every device and chooses the kernel by its last argument, ``backend``,
which the door resolved; so forward and backward of one call always take the same path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import extension

_CPU = torch.device("cpu")

library = torch.library.Library("transformer_fast", "DEF")


def register(
    schema: str,
    *,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
) -> Any:
    """Define one op and return its ``OpOverload``.

    Args:
        schema: the op's schema without namespace, e.g. ``"dropout(Tensor x, ...) -> Tensor"``.
        implementation: computes the result, on any device.
        fake: shapes and dtypes of the result only (for ``torch.compile`` and ``torch.export``).
        autograd: called in place of the op wherever autograd is on; it calls ``Function.apply``, whose
            forward calls the op again under :func:`below_autograd`. ``None`` for an op that only ever
            runs inside a backward: differentiating through it raises.
    """
    name = schema[: schema.index("(")]
    library.define(schema)
    library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"transformer_fast::{name}", fake, lib=library)
    op = getattr(torch.ops.transformer_fast, name).default
    library.impl(name, autograd or _no_second_derivative(op), "Autograd")
    return op


def register_autocast(op: Any, floating_arguments: tuple[str, ...]) -> None:
    """Under autocast, cast the named floating arguments to the autocast dtype before the op runs."""
    names = [argument.name for argument in op._schema.arguments]

    def implementation(device_type: str, key: torch._C.DispatchKey) -> Callable[..., Any]:
        def cast(*args: Any) -> Any:
            dtype = torch.get_autocast_dtype(device_type)
            converted = [
                arg.to(dtype) if name in floating_arguments and _castable(arg) else arg
                for name, arg in zip(names, args, strict=True)
            ]
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return op(*converted)

        return cast

    name = op._schema.name.split("::")[1]
    for device_type in ("cpu", "cuda"):
        key = f"Autocast{device_type.upper()}"
        library.impl(name, implementation(device_type, getattr(torch._C.DispatchKey, key)), key)


def _castable(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.dtype != torch.float64


def autocast_enabled(t: Any) -> bool:
    """Whether autocast is on where a tensor lives; the meta device, which computes nothing, has none."""
    return isinstance(t, Tensor) and not t.is_meta and torch.is_autocast_enabled(t.device.type)


def below_autograd() -> Any:
    """Context in which calling an op reaches its implementation (or fake), not its autograd rule again."""
    return torch._C._AutoDispatchBelowAutograd()


def draw_seed(device: torch.device) -> torch.Tensor:
    """One int64 on ``device`` from torch's own generator there: the seed of one dropout mask.

    ``torch.manual_seed`` governs it, and a replayed CUDA graph draws a fresh one.
    """
    if device == _CPU and not torch.compiler.is_compiling() and (native := extension.module()):
        return native.draw_seed()  # the same number, sooner
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def draw_launch_seed(device: torch.device, as_number: bool) -> int | torch.Tensor:
    """The seed of one dropout mask, for an op whose kernels take it as a number too; ``as_number``: may this call.

    A number is drawn on the host, from torch's generator there (``torch.manual_seed`` governs both), which saves a
    kernel on the device. A CUDA graph under capture must draw a fresh one at each replay: there, as where a call is
    compiled, it is the tensor of :func:`draw_seed`.
    """
    on_cuda = device.type == "cuda"
    captured = on_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or captured or not (as_number or on_cuda):
        return draw_seed(device)
    native = extension.module()
    number = native.draw_number() if native else int(draw_seed(_CPU).item())
    return number if as_number else torch.full((1,), number, dtype=torch.int64, device=device)


def refuse_second_derivative(name: str, gradients: tuple[Tensor | None, ...], inputs: tuple[Tensor | None, ...]) -> Any:
    """The gradients, recorded as functions of the inputs that cannot be differentiated: doing so raises."""
    return _SecondDerivative.apply(name, len(gradients), *gradients, *inputs)


class _SecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.name = name
        return tuple(t if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _raise_no_second_derivative(ctx.name)


def _raise_no_second_derivative(name: str) -> None:
    raise RuntimeError(
        f"{name} cannot be differentiated again: the fused kernels have no second derivative. "
        'Run the forward under transformer_fast.backend("reference") to differentiate twice.'
    )


def _no_second_derivative(op: Any) -> Callable[..., Any]:
    class NoSecondDerivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with below_autograd():
                return op(*args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _raise_no_second_derivative(op._schema.name)

    def call(*args: Any) -> Any:
        needs_grad = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        if torch.is_grad_enabled() and needs_grad:
            return NoSecondDerivative.apply(*args)
        with below_autograd():
            return op(*args)

    return call
