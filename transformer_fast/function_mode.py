"""``functional()``: a block in which torch's functions are computed by the fused ops.

The block is a mode of ``torch.overrides``: while the block runs, torch hands each call of one of its functions in this
thread to the mode. The mode looks the function up in :data:`OURS`, and passes all other functions on.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from inspect import iscoroutinefunction
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._contextlib import context_decorator

P = ParamSpec("P")
R = TypeVar("R")

OURS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {}
"""Our function by torch's, with torch's arguments; the result is None for a call that stays torch's.
``layers/functions.py`` adds them."""

Calls = Counter[tuple[str, bool]]
"""Number of calls by the name of torch's function, and True if the call was ours."""

_calls: ContextVar[Calls | None] = ContextVar("calls", default=None)


class FunctionalMode(TorchFunctionMode):
    """Mode of one block. The C++ extension knows this class: the eager fast path of the ops stays."""

    def __init__(self) -> None:
        self.compiled = torch.compiler.is_compiling()
        self.region = None if self.compiled else _region()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ours = OURS.get(func)
        if ours is None or not self._may_replace(func, args, kwargs or {}):
            if func is Tensor.unflatten and torch.compiler.is_compiling():  # whose super() torch 2.13 does not trace
                return args[0].unflatten(*args[1:], **(kwargs or {}))
            return func(*args, **(kwargs or {}))
        out = ours(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and (calls := _calls.get()) is not None:
            calls[func.__name__, out is not None] += 1
        return func(*args, **(kwargs or {})) if out is None else out

    def _may_replace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if every later computation of this call, as by a checkpoint, would be in a block too."""
        if not torch.compiler.is_compiling():
            return self.region == _region()
        if self.compiled or func is not scaled_dot_product_attention:
            return True
        return not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))  # random bits do not depend on a block


class Functional:
    """Block of :func:`functional`: a context manager without state, which threads may share, and a decorator."""

    def __enter__(self) -> None:
        FunctionalMode().__enter__()

    def __exit__(self, *error: object) -> None:
        _pop_torch_function_stack()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, or a generator function, to run in a block of its own at each call.

        Raises:
            TypeError: for a class, and for a coroutine function, whose block other tasks would share.
        """
        if isinstance(function, type) or iscoroutinefunction(function) or not callable(function):
            raise TypeError(f"functional: expected a function to decorate, got {function!r}")
        return context_decorator(functional, function)


def functional() -> Functional:
    """Compute torch's own functions by the fused ops: a context manager, and a decorator.

    Inside, in the thread that enters the block, ``F.scaled_dot_product_attention``, ``F.dropout``, ``F.layer_norm``,
    ``F.rms_norm`` and ``F.cross_entropy`` are ours wherever ours take the call, and so are ``torch.dropout``,
    ``torch.layer_norm`` and ``torch.rms_norm``. Modules of ``torch.nn`` call these functions too. Every other call is
    torch's own, and so are the errors. Arguments, shapes, dtypes and masks have torch's meaning. Dropout draws other
    masks than torch; ``torch.manual_seed`` governs both. docs/functional.md has the calls that are ours, and the cost
    of a block.

    A checkpoint that begins inside the block, and the ``forward`` of a ``torch.autograd.Function``, compute again
    without the block. So torch's functions are torch's there, unless a block is entered inside the checkpoint too.

    Example:
        >>> import torch.nn.functional as F
        >>> q = torch.randn(2, 4, 10, 64)
        >>> with tfast.functional():
        ...     out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True), atol=1e-5)
        True
    """
    return Functional()


def is_in_block() -> bool:
    """Return True if the innermost mode is a block that was entered where this call runs; in a graph, in the graph."""
    if not (depth := _len_torch_function_stack()):
        return False
    mode = _get_function_stack_at(depth - 1)
    if type(mode) is not FunctionalMode:
        return False
    return mode.compiled if torch.compiler.is_compiling() else mode.region == _region()


def outside_blocks(forward: Callable[P, R]) -> Callable[P, R]:
    """Decorate a ``forward`` that calls no code of a user: it runs without the innermost blocks around it, so its calls
    of torch do not pay for them."""

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        depth = 0 if torch.compiler.is_compiling() else _len_torch_function_stack()
        if not depth or type(_get_function_stack_at(depth - 1)) is not FunctionalMode:
            return forward(*args, **kwargs)
        mode = _pop_torch_function_stack()
        try:
            return call(*args, **kwargs)
        finally:
            _push_on_torch_function_stack(mode)

    return call


@contextlib.contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count the calls of torch's functions in blocks of this context."""
    calls: Calls = Counter()
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def _region() -> tuple[Any, bool, int]:
    """Doings of autograd around a call: hooks of saved tensors, which a checkpoint sets; False inside the forward of an
    ``autograd.Function``; the number of a backward pass, -1 outside."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled(),
        torch._C._current_graph_task_id(),
    )
