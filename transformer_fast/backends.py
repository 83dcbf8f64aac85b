"""Choice of the kernels for a call, and its reason.

================ ===========================================================================================
``"auto"``       native on CPU; on CUDA Triton, but the CUDA extension for embedding
``"native"``     the C++/CUDA extension
``"triton"``     the Triton kernels: CUDA tensors, or CPU tensors under ``TRITON_INTERPRET=1``; embedding, which has no
                 Triton kernel, runs on the extension
``"reference"``  plain eager PyTorch, the same numbers, the same dropout mask
================ ===========================================================================================

On the meta device every op returns shapes and dtypes and computes nothing.

Choose with the context manager ``transformer_fast.backend(name)`` or the environment variable
``TRANSFORMER_FAST_BACKEND``. Only "auto" falls back to another backend; it warns once.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from . import extension
from .tracing import needs_plain_ops, refuse_torchscript

NAMES = ("auto", "native", "triton", "reference")
ON_CUDA: dict[str, str] = {}
"""Backend of CUDA tensors under "auto" by kernels; the records of ops/registry.py say it."""
KERNELS: dict[str, str] = {}
"""Kernels by the name of the public function that calls them, from the same records."""

_default = os.environ.get("TRANSFORMER_FAST_BACKEND", "auto")


class _Chosen(threading.local):
    """Choices of one thread.

    Attributes:
        name: that of the innermost context manager; None outside. torch.compile guards on the attribute.
        entered: those of all context managers, the innermost last; None for one that was left before an inner one.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.entered: list[str | None] = []


_chosen = _Chosen()
_active: list[str] = []  # of all threads


def _constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as ``torch.compiler.assume_constant_result`` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class BackendError(RuntimeError):
    """Error: the requested backend cannot run this call.

    Example:
        >>> try:
        ...     with tfast.backend("triton"):  # on a CPU
        ...         tfast.layer_norm(torch.ones(2, 8), None, None)
        ... except tfast.BackendError as error:
        ...     print(str(error).split(":")[0])
        backend "triton" cannot run norm on cpu in torch.float32
    """


def _checked(name: str, origin: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{origin}: expected one of {', '.join(NAMES)}, got {name!r}")
    return name


def current() -> str:
    """Current backend: that of the innermost context manager, else ``TRANSFORMER_FAST_BACKEND`` at import, else
    "auto"."""
    name = _chosen.name
    if name is None:
        name = _default if torch.compiler.is_compiling() or not _active else _backend_of_forward() or _default
    return name if name in NAMES else _checked(name, "TRANSFORMER_FAST_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the calls inside on one backend: "auto", "native", "triton" or "reference".

    The choice holds for the thread that enters the block, and for backward passes that begin inside the block. Every
    other thread has its own choice, at first that of the environment. Tasks of asyncio and generators share the choice
    of their thread: the block that was entered last decides until it is left, in whatever order blocks are left. So
    await nothing inside of a block where another task may call an op.

    Raises:
        ValueError: for another name.

    Example:
        >>> q = torch.randn(1, 2, 3, 8)
        >>> with tfast.backend("reference"):
        ...     expected = tfast.attention(q, q, q)
        >>> torch.allclose(tfast.attention(q, q, q), expected, atol=1e-5)
        True
    """
    _checked(name, "backend")
    entered, place = _chosen.entered, len(_chosen.entered)
    entered.append(name)
    _active.append(name)
    try:
        _chosen.name = name
        _keep_for_backward(name)
        yield
    finally:
        entered[place] = None
        while entered and entered[-1] is None:
            entered.pop()
        innermost = entered[-1] if entered else None
        _chosen.name = innermost
        _keep_for_backward(innermost)
        _active.remove(name)


def _keep_for_backward(name: str | None) -> None:
    """Hand the choice to the threads that compute this thread's gradients.

    On CUDA, activation checkpointing recomputes layers in those threads. A ContextVar is lost there: torch 2.11 passes
    no context on, and with 2.12 to 2.14 a backward begun in such a thread passes on the thread's own.
    """
    if torch.compiler.is_compiling():  # compiled code has chosen its backend already, for the backward pass too
        return
    if module := extension.module():  # without the extension, every op runs on the reference
        module.keep_for_backward(name)


def _backend_of_forward() -> str | None:
    """Backend of the thread that began a backward pass, read in PyTorch's backward threads."""
    module = extension.module()
    return module.kept_for_backward() if module else None


def choose(op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Backend for a call of ``op``, and the reason as text.

    Args:
        op: "attention", "norm", "dropout", "cross_entropy" or "embedding".

    Raises:
        BackendError: if a backend that was named explicitly cannot run the call; the message says what would help.
    """
    return _choose(current(), op, device, dtype)


@_constant_when_compiled
def _choose(asked: str, op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    if device.type == "meta":
        return "native", "the meta device computes shapes and dtypes, no values"
    if asked == "reference":
        return "reference", "asked for"
    if asked == "auto":
        return _automatic(op, device, dtype)
    if asked == "triton" and ON_CUDA.get(op) == "native":
        asked, granted = "native", f"{op} has no Triton kernel; the extension computes it"
    else:
        granted = "asked for"
    reason = _obstacle(asked, op, device, dtype)
    if reason:
        raise BackendError(f'backend "{asked}" cannot run {op} on {device.type} in {dtype}: {reason}')
    return asked, granted


@_constant_when_compiled
def _kernels_of(function: str) -> str:
    return KERNELS[function]


def resolve(function: str, device: torch.device, dtype: torch.dtype) -> str:
    """Backend from :func:`choose` for a call of a public function, without the reason; warns once if "auto" falls back
    to the reference.

    The result is "plain" if a graph may hold only PyTorch's own operators (``ops/_plain.py``). "plain" cannot be
    requested.
    """
    if needs_plain_ops():
        return "plain"
    refuse_torchscript(function)
    op = _kernels_of(function)
    if torch.compiler.is_compiling():
        return choose(op, device, dtype)[0]
    name = _resolved(current(), op, device, dtype)
    if name != "reference":
        if in_transform():
            refuse_transform(function)
        if forward_ad._current_level >= 0:
            refuse_forward_mode(function)
    return name


def in_transform() -> bool:
    """Return True inside a transform of torch.func (vmap, grad); tensor values cannot be read there."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def refuse_transform(function: str) -> None:
    """Raise because the op of a public function has no rules for torch.func."""
    raise BackendError(
        f"{function} cannot run inside vmap, grad or another transform of torch.func: the kernels take whole batches "
        'and have no rules for it. Add a batch dimension instead, or use transformer_fast.backend("reference")'
    )


def refuse_forward_mode(function: str) -> None:
    """Raise because the op of a public function has no rule for tangents."""
    raise BackendError(
        f"{function} cannot run in forward-mode differentiation: the kernels have no rule, and tangents would be lost. "
        'Differentiate backwards instead, or use transformer_fast.backend("reference")'
    )


@functools.cache
def _resolved(asked: str, op: str, device: torch.device, dtype: torch.dtype) -> str:
    name, reason = _choose(asked, op, device, dtype)
    if name == "reference" and asked == "auto":
        message = f"transformer_fast: {op} on {device.type} in {dtype} runs on the eager reference: {reason}"
        warnings.warn(message, stacklevel=4)
    return name


def _automatic(op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    if device.type == "cpu":
        preferred = "native"
    elif device.type == "cuda":
        preferred = ON_CUDA[op]
    else:
        return "reference", f"there are no kernels for {device.type} devices"
    if preferred == "reference":
        return preferred, f"{op} has no kernel for {device.type} devices"
    reason = _obstacle(preferred, op, device, dtype)
    if reason:
        return "reference", reason
    return preferred, f"the default on {device.type}"


def _obstacle(name: str, op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a backend cannot run a call, or None."""
    if name == "native":
        if not extension.load():
            return extension.obstacle()
        if device.type == "cuda" and ON_CUDA[op] != "native":
            return f'the extension has no CUDA {op}; on CUDA it is a Triton kernel (backend "triton")'
        if device.type == "cuda" and not extension.build_info()["cuda"]:
            return "the extension was built without CUDA; rebuild it with TRANSFORMER_FAST_CUDA=1"
        if device.type not in ("cpu", "cuda"):
            return f"the extension has no kernels for {device.type} devices"
    elif device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton kernels run on a GPU; on CPU tensors only with TRITON_INTERPRET=1 set before the program starts"
    elif not _triton_imports():
        return "triton is not installed; run `pip install 'transformer_fast[gpu]'`"
    elif not extension.load():  # the ops are registered there
        return extension.obstacle()
    if dtype == torch.float64 and device.type == "cuda":
        return "the GPU kernels take float32, float16 and bfloat16"
    if dtype == torch.float64 and name == "triton":
        return "the Triton kernels take float32, float16 and bfloat16"
    return None


@functools.cache
def _triton_imports() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
