"""Modules of any structure that call ``torch.nn.functional.scaled_dot_product_attention``: they call ours."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from .. import ops
from ..ops.scaled_dot_product_attention import TORCH
from .rebinding import Obstacle, Rebinding

NAME = "tfast.scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What accelerated modules call: ours on the CPU, where it is faster (docs/accelerate.md has the measurements);
    torch's on other devices, where nothing was measured yet."""
    attend = ops.scaled_dot_product_attention if isinstance(query, Tensor) and query.device.type == "cpu" else TORCH
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


_REBINDING = Rebinding(TORCH, scaled_dot_product_attention)


class CallsOurs:
    """The first base of a class whose methods call our function; the last is the class that the module had."""

    original_and_held: tuple[type[nn.Module], tuple[tuple[str, Any], ...]]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made when the program runs, so a pickle says how to make it again.
        _, _, *rest = super().__reduce_ex__(protocol)
        return _rebuild, type(self).original_and_held, *rest


def calling_ours(module: nn.Module) -> tuple[type[nn.Module] | None, str]:
    """The class of a module on our function, and the methods and attributes that call it, or why they cannot.

    (None, "") for a module that does not call torch's.
    """
    original = type(module)
    try:
        held = tuple((name, value) for name, value in module.__dict__.items() if _REBINDING.value(value) is not None)
        found = sorted({*dict(held), *_methods(original)})
    except Obstacle as obstacle:
        return None, str(obstacle)
    return (_class(original, held), ", ".join(found)) if found else (None, "")


@functools.cache
def _methods(original: type[nn.Module]) -> dict[str, Any]:
    return _REBINDING.methods(original)


@functools.cache
def _class(original: type[nn.Module], held: tuple[tuple[str, Any], ...]) -> type[nn.Module]:
    return type(original.__name__, (CallsOurs, original), {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "original_and_held": (original, held),
        **_methods(original),
        **{name: _attribute(name, value) for name, value in held},
    })  # fmt: skip


def _attribute(name: str, held: Any) -> property:
    """An attribute that holds a function which calls torch's, or is it; who reads it gets one that calls ours."""
    copy = _REBINDING.value(held)

    def get(self: nn.Module) -> Any:
        value = self.__dict__[name]
        return copy if value is held else value

    def put(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    return property(get, put)


def _rebuild(original: type[nn.Module], held: tuple[tuple[str, Any], ...]) -> nn.Module:
    made = _class(original, held)
    return made.__new__(made)
