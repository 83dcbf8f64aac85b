"""Tensors that are made when something reads them: what lazy logits and their gradient have in common.

A :class:`Lazy` is a tensor without memory, and a part of the graph as any other. Its :class:`Node` can make the value.
Operations that only need the shape give lazy tensors again. For every other, ``__torch_dispatch__`` makes the value,
below autograd, so also for C++ and functions of ``torch.autograd``; it is kept, and operations in place write to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..tensors import made_when_read

_aten = torch.ops.aten


class Node:
    """A tensor (*rows, V) that is made of its parent when it is read.

    Attributes:
        rows: what stands for it in the products, (*rows, d): hidden states, or their gradient (None: not asked for).
        keeps: whether the value is kept. That of a view is made of its parent's each time, so that both share memory.
        added: what was added to the output of the linear layer since, each (V,).
    """

    def __init__(self, rows: Tensor | None, parent: Node | None, make: Callable[[Tensor], Tensor], keeps: bool) -> None:
        self.rows, self.parent, self.make, self.keeps = rows, parent, make, keeps
        self.value: Tensor | None = None
        self.added: tuple[Tensor, ...] = () if parent is None else parent.added
        self._copies: weakref.WeakSet[Node] = weakref.WeakSet()

    @property
    def root(self) -> Any:
        """Source of the tensor, as long as it is not read."""
        return self if self.parent is None else self.parent.root

    def read(self) -> Tensor:
        """The value, a plain tensor that is not part of a graph."""
        if self.value is not None:
            return self.value
        base = None if self.parent is None else self.parent.read()
        if self.value is None:  # it may have been made as a copy of its parent
            with plain_arithmetic():
                value = self.computed(base)
            if not self.keeps:
                return value
            self.value, self.parent = value, None
            for copy in list(self._copies):  # from now on anybody may write to the memory of which they are copies
                copy.read()
        assert self.value is not None
        return self.value

    def computed(self, base: Tensor | None) -> Tensor:
        """The value, made of the parent's."""
        assert base is not None
        return self.make(base)

    def is_read(self) -> bool:
        """Return True where the value exists somewhere, and so may have been written to."""
        return self.value is not None or (self.parent is not None and self.parent.is_read())

    def derived(self, rows: Tensor | None, make: Callable[[Tensor], Tensor], keeps: bool) -> Node:
        """The node of a view, or of a copy."""
        made = Node(rows, self, make, keeps)
        if keeps:
            self._memory()._copies.add(made)
        return made

    def _memory(self) -> Node:
        """The node whose value has the memory of this one's."""
        return self if self.keeps or self.parent is None else self.parent._memory()


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Materialise under no_grad and without autocast: others read the value too."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def make_nothing(value: Tensor) -> Tensor:
    """For a node without a parent, which computes its value in its own way."""
    return value


@made_when_read
class Lazy(Tensor):
    """A tensor that is made when it is read."""

    node: Any

    @staticmethod
    def __new__(cls, node: Node, like: Tensor) -> Any:
        """Make one with the shape, strides and dtype of a tensor on the meta device."""
        lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype, device=torch.device("cpu")
        )
        lazy.node = node
        return lazy

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _OUTSIDE:
            args, kwargs = tree_map_only(Lazy, Lazy._outside, (args, kwargs))
        elif function in _DETACHED:  # which may be read when the weights are others
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
                f"{function} of logits that accelerate left out: use the form that is not in place"
            )
        plain: dict[int, tuple[Lazy, Tensor]] = {}
        plain_args, plain_kwargs = tree_map_only(
            Lazy, lambda t: plain.setdefault(id(t), (t, t.node.read()))[1], (args, kwargs)
        )
        result = function(*plain_args, **plain_kwargs)
        return next((lazy for lazy, value in plain.values() if result is value), result)

    def _outside(self) -> Tensor:
        """The tensor without its history, for what reads memory and not through PyTorch's operators."""
        return self.node.read().detach().requires_grad_(self.requires_grad)

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operation that does not need the values; None for every other."""
        raise NotImplementedError

    def _like(self, function: Any = None, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        return like if function is None else function(like, *args, **(kwargs or {}))

    def as_derived(
        self, function: Any, args: tuple, kwargs: dict[str, Any], rows: Tensor | None, keeps: bool
    ) -> Tensor:
        """The result of an operation, which is made when it is read."""
        make = self.node.derived(rows, lambda value: function(value, *args, **kwargs), keeps)
        return type(self)(make, self._like(function, args, kwargs))

    def reshaped(self, function: Any, args: tuple, kwargs: dict[str, Any], keeps: bool = False) -> Tensor | None:
        """Return one of another shape with the same last dimension."""
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
"""Functions that read memory, and not through PyTorch's operators."""


def cast(kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a ``_to_copy`` that changes nothing else."""
    rest = {name: value for name, value in kwargs.items() if value is not None and value is not False}
    dtype = rest.pop("dtype", None)
    same = {"device": torch.device("cpu"), "layout": torch.strided}
    return dtype if all(name in same and value == same[name] for name, value in rest.items()) else None
