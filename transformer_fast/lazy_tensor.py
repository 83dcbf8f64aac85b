"""Lazy tensors, computed when something reads them: the common part of lazy logits and their gradient.

A :class:`Lazy` is a tensor without memory that is part of the autograd graph. The tensor's :class:`Node` computes the
value. Operations that only need the shape return lazy tensors. For every other operation ``__torch_dispatch__``
computes the value, below autograd, so this also holds for C++ code and for ``torch.autograd``. The value is kept, and
in-place operations write to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .tensors import made_when_read

_aten = torch.ops.aten


class Node:
    """Recipe of a tensor (*rows, V): computes the value from the parent when the tensor is read.

    Attributes:
        rows: factor of the value, (*rows, d): hidden states, or their gradient (None: not requested).
        keeps: True if the value is kept. A view is computed from its parent's value each time, so that both share
            memory.
        added: tensors (V,) added to the output of the linear layer since.
    """

    def __init__(self, rows: Tensor | None, parent: Node | None, make: Callable[[Tensor], Tensor], keeps: bool) -> None:
        self.rows, self.parent, self.make, self.keeps = rows, parent, make, keeps
        self.value: Tensor | None = None
        self.added: tuple[Tensor, ...] = () if parent is None else parent.added
        self._copies: weakref.WeakSet[Node] = weakref.WeakSet()

    @property
    def root(self) -> Any:
        """Node without a parent that this node is computed from; this node itself once it was read."""
        return self if self.parent is None else self.parent.root

    def read(self) -> Tensor:
        """The value, a plain tensor that is not part of a graph."""
        if self.value is not None:
            return self.value
        base = None if self.parent is None else self.parent.read()
        if self.value is None:  # the value may be a copy of the parent's value
            with plain_arithmetic():
                value = self.computed(base)
            if not self.keeps:
                return value
            self.value, self.parent = value, None
            for copy in list(self._copies):  # after this, other code may write to the memory of the originals
                copy.read()
        assert self.value is not None
        return self.value

    def computed(self, base: Tensor | None) -> Tensor:
        """The value, computed from the parent's value."""
        assert base is not None
        return self.make(base)

    def is_read(self) -> bool:
        """Return True if the value exists, so that it may have been written to."""
        return self.value is not None or (self.parent is not None and self.parent.is_read())

    def derived(self, rows: Tensor | None, make: Callable[[Tensor], Tensor], keeps: bool) -> Node:
        """Node of a view or of a copy."""
        made = Node(rows, self, make, keeps)
        if keeps:
            self._memory()._copies.add(made)
        return made

    def _memory(self) -> Node:
        """Node whose value owns the memory of this node's value."""
        return self if self.keeps or self.parent is None else self.parent._memory()


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Materialise under no_grad and without autocast: others read the value too."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def make_nothing(value: Tensor) -> Tensor:
    """Placeholder for nodes without a parent, which override the computation."""
    return value


@made_when_read
class Lazy(Tensor):
    """Tensor that is computed when it is read."""

    node: Any

    @staticmethod
    def __new__(cls, node: Node, like: Tensor, device: torch.device | str = "cpu") -> Any:
        """Make a lazy tensor with the shape, strides and dtype of a tensor on the meta device."""
        lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=torch.device(device)
        )
        lazy.node = node
        return lazy

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _OUTSIDE:
            args, kwargs = tree_map_only(Lazy, Lazy._detached_value, (args, kwargs))
        elif function in _DETACHED:  # a copy may be read after the weights have changed
            args[0].node.read()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = args and isinstance(args[0], Lazy) and not args[0].node.is_read()
        if waits and (kept := args[0].kept(function, args[1:], kwargs)) is not None:
            return kept
        if torch.Tag.inplace_view in function.tags:
            raise NotImplementedError(
                f"{function}: logits of accelerate(fused_loss=True) have no in-place views; use the out-of-place form"
            )
        plain: dict[int, tuple[Lazy, Tensor]] = {}
        plain_args, plain_kwargs = tree_map_only(
            Lazy, lambda t: plain.setdefault(id(t), (t, t.node.read()))[1], (args, kwargs)
        )
        result = function(*plain_args, **plain_kwargs)
        return next((lazy for lazy, value in plain.values() if result is value), result)

    def _detached_value(self) -> Tensor:
        """The detached value, for functions that read memory without PyTorch's operators."""
        return self.node.read().detach().requires_grad_(self.requires_grad)

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Lazy result of an operation that does not need the values; None for other operations."""
        raise NotImplementedError

    def _like(self, function: Any = None, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return like if function is None else function(like, *args, **(kwargs or {}))

    def as_derived(
        self, function: Any, args: tuple, kwargs: dict[str, Any], rows: Tensor | None, keeps: bool
    ) -> Tensor:
        """Lazy result of an operation."""
        make = self.node.derived(rows, lambda value: function(value, *args, **kwargs), keeps)
        return type(self)(make, self._like(function, args, kwargs))

    def reshaped(self, function: Any, args: tuple, kwargs: dict[str, Any], keeps: bool = False) -> Tensor | None:
        """Return a lazy tensor of another shape with the same last dimension."""
        shape = self._like(function, args, kwargs).shape
        if len(shape) < 2 or shape[-1] != self.shape[-1]:
            return None
        rows = self.node.rows
        return self.as_derived(
            function, args, kwargs, None if rows is None else rows.reshape(*shape[:-1], rows.shape[-1]), keeps
        )


VIEWS: set[Any] = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.alias.default,
    _aten.detach.default,
}
_DETACHED = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_OUTSIDE = {
    Tensor.numpy,
    Tensor.tolist,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.share_memory_,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    Tensor.__repr__,
    Tensor.__format__,
}
"""Functions that read memory without PyTorch's operators."""


def cast(kwargs: dict[str, Any]) -> torch.dtype | None:
    """Dtype of a ``_to_copy`` that changes only the dtype; else None."""
    rest = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    dtype = rest.pop("dtype", None)
    same = {"device": torch.device("cpu"), "layout": torch.strided}
    return dtype if all(name in same and value == same[name] for name, value in rest.items()) else None
