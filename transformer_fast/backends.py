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
``TRANSFORMER_FAST_BACKEND``. The choice is the process's. Only "auto" falls back to another backend; it warns once.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

from . import extension
from .tracing import constant_when_compiled, needs_plain_ops, refuse_torchscript

NAMES = ("auto", "native", "triton", "reference")
ON_CUDA: dict[str, str] = {}
"""Backend of CUDA tensors under "auto" by kernels; the records of ops/registry.py say it."""
KERNELS: dict[str, str] = {}
"""Kernels by the name of the public function that calls them, from the same records."""

_DEFAULT = os.environ.get("TRANSFORMER_FAST_BACKEND", "auto")


class _Block:
    """A ``with backend(name)`` that was entered and not yet left."""

    def __init__(self, name: str) -> None:
        self.name = name


_blocks: list[_Block] = []  # of all threads; the one that was entered last decides
_current = _DEFAULT
_lock = threading.Lock()


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
    """Current backend of the process: that of the context manager that was entered last, else
    ``TRANSFORMER_FAST_BACKEND`` at import, else "auto"."""
    return _current if _current in NAMES else _checked(_current, "TRANSFORMER_FAST_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Run the calls inside on one backend: "auto", "native", "triton" or "reference".

    The choice is the process's, as the flags of ``torch.backends`` are: every thread has it until the block is left,
    those that compute gradients too. Blocks may be left in any order, as generators, tasks of asyncio and threads do:
    of those not left, the one that was entered last decides. So enter a block around threads and tasks, not in them.

    Raises:
        ValueError: for another name.

    Example:
        >>> q = torch.randn(1, 2, 3, 8)
        >>> with tfast.backend("reference"):
        ...     expected = tfast.attention(q, q, q)
        >>> torch.allclose(tfast.attention(q, q, q), expected, atol=1e-5)
        True
    """
    block = _Block(_checked(name, "backend"))
    _change(_blocks.append, block)
    try:
        yield
    finally:
        _change(_blocks.remove, block)


def _change(change: Callable[[_Block], None], block: _Block) -> None:
    """Add or remove a block, and make the last one decide."""
    if torch.compiler.is_compiling():  # the compiler knows no lock, and a graph has chosen its kernels when it runs
        _change_unlocked(change, block)
        return
    with _lock:
        _change_unlocked(change, block)
        if module := extension.module():  # without it, no op runs on Triton
            module.choose_triton(_current == "triton")


def _change_unlocked(change: Callable[[_Block], None], block: _Block) -> None:
    global _current
    change(block)
    _current = _blocks[-1].name if _blocks else _DEFAULT


def choose(op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Backend for a call of ``op``, and the reason as text.

    Args:
        op: "attention", "norm", "dropout", "cross_entropy" or "embedding".

    Raises:
        BackendError: if a backend that was named explicitly cannot run the call; the message says what would help.
    """
    return _choose(current(), op, device, dtype)


@constant_when_compiled
def _choose(requested: str, op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    if device.type == "meta":
        return "native", "the meta device computes shapes and dtypes, no values"
    if requested == "reference":
        return "reference", "requested"
    if requested == "auto":
        return _automatic(op, device, dtype)
    if requested == "triton" and ON_CUDA.get(op) == "native":
        requested, granted = "native", f"{op} has no Triton kernel; the extension computes it"
    else:
        granted = "requested"
    reason = _obstacle(requested, op, device, dtype)
    if reason:
        raise BackendError(f'backend "{requested}" cannot run {op} on {device.type} in {dtype}: {reason}')
    return requested, granted


@constant_when_compiled
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
            raise BackendError(
                f"{function} cannot run in forward-mode differentiation: the kernels have no rule, and tangents would "
                'be lost. Differentiate backwards instead, or use transformer_fast.backend("reference")'
            )
    return name


def in_transform() -> bool:
    """Return True inside a transform of torch.func (vmap, grad); tensor values cannot be read there."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def for_gradient_of_weights(function: str, backend: str) -> str:
    """Backend of a call whose gradient goes through returned weights, which the ops leave to Python: the reference
    where the module of eager calls is missing.

    Raises:
        BackendError: if another backend was named.
    """
    if backend != "native" or not (reason := _module_obstacle()):
        return backend
    if current() == "native":
        raise BackendError(f'backend "native" cannot compute the gradient of the weights of {function}: {reason}')
    return "reference"


@constant_when_compiled
def _module_obstacle() -> str:
    return extension.module_obstacle()


def refuse_transform(function: str) -> None:
    """Raise because the op of a public function has no rules for torch.func."""
    raise BackendError(
        f"{function} cannot run inside vmap, grad or another transform of torch.func: the kernels take whole batches "
        'and have no rules for it. Add a batch dimension instead, or use transformer_fast.backend("reference")'
    )


@functools.cache
def _resolved(requested: str, op: str, device: torch.device, dtype: torch.dtype) -> str:
    name, reason = _choose(requested, op, device, dtype)
    if name == "reference" and requested == "auto":
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
    elif reason := extension.module_obstacle():  # the launches are made there
        return reason
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
