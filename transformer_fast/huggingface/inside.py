"""Code inside of a stack that computes tokens alone: it must compute each position by itself.

A class is known because a module of transformers or torch holds this very object, with the ``forward`` that it was
first seen with. All others, hooks included, may read padding.
"""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ..layers.hooks import HOOKS
from .blocks import Fast, Former
from .interface import is_ours
from .logits import TokensHead

_PER_POSITION = {
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Embedding, nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU,
    nn.SiLU, nn.LeakyReLU, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList,
    nn.CrossEntropyLoss,
}  # fmt: skip
"""Modules of torch that compute each position by itself."""
_PEFT = {"peft.tuners.lora.layer.Linear"}
"""Adapters that compute each position by itself."""
_RECORDING = ("transformers.utils.output_capturing",)
_HARMLESS = ("torch.distributed.", "torch.utils.module_tracker", "transformers.modeling_utils", *_RECORDING)
"""Python modules whose hooks may see tokens without padding."""

_seen: dict[type, tuple[type, Any, Former | None]] = {}
"""Classes that are known: the class that computes, its ``forward`` when it was first seen, and for a class that
computes more than that the class before."""


def obstacle_inside(module: nn.Module) -> str:
    """Reason why a module, or one inside it, may read padding, or ""."""
    if torch_module._has_any_global_hook() and any(_is_foreign(hook, _HARMLESS) for hook in _global_hooks()):
        return "a hook of all modules is set; it may read padding"
    return _obstacle(module, _HARMLESS)


def is_plain_inside(module: nn.Module) -> bool:
    """Return True if the modules inside a module need not be called: they are known, and have no hooks but those with
    which transformers records outputs."""
    return not torch_module._has_any_global_hook() and not any(
        _obstacle(child, _RECORDING) for child in module._modules.values() if child is not None
    )


def _obstacle(module: nn.Module, harmless: tuple[str, ...]) -> str:
    own, kind = module.__dict__, type(module)
    known = "forward" not in own and _is_known(kind)
    if not known or ((former := _seen[kind][2]) is not None and former.is_changed(module)):
        return f"a {kind.__name__} inside is not known; it may read padding"
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if hooked and _has_foreign_hook(module, harmless):
        return f"a {kind.__name__} has a hook, which may read padding"
    if (config := own.get("config")) is not None and not is_ours(config._attn_implementation):
        return f"a {kind.__name__} has another attention"
    for child in own["_modules"].values():
        if child is not None and (reason := _obstacle(child, harmless)):
            return reason
    return ""


def _has_foreign_hook(module: nn.Module, harmless: tuple[str, ...]) -> bool:
    own = module.__dict__
    return any(_is_foreign(hook, harmless) for name in HOOKS for hook in own[name].values())


def _is_known(kind: Any) -> bool:
    if (seen := _seen.get(kind)) is not None:
        return seen[0].forward is seen[1]
    base = kind
    if kind.__module__.startswith("torch.distributed.") and not is_held(kind):  # FSDP's subclass of a class
        known, base = _is_known(kind.__bases__[-1]), kind.__bases__[-1]
    elif getattr(kind, "computes_as_former", False) and "recipe" in vars(kind):
        known, base = _is_known(kind.former), kind.former
    elif issubclass(kind, Fast | TokensHead):  # a class that a user derived from one of these has no such attribute
        former = vars(kind).get("_former")
        known = "recipe" in vars(kind) if former is None else former.kind.forward is former.forward
    elif kind.__module__.startswith("transformers."):
        known = is_original(kind)
    elif kind.__module__.startswith("transformer_fast.layers."):
        known = is_held(kind)
    else:
        known = kind in _PER_POSITION or (f"{kind.__module__}.{kind.__qualname__}" in _PEFT and is_held(kind))
    if known:
        former = getattr(base, "_former", None)
        base = base if former is None else former.kind
        _seen[kind] = base, base.forward, former if former is not None and former.methods else None
    return known


def is_held(kind: type) -> bool:
    """Return True for a class that a Python module holds under the class's name."""
    try:
        return operator.attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    except (AttributeError, KeyError):
        return False


def is_original(kind: type[nn.Module]) -> bool:
    """Return True if transformers' modules hold this very class, and the one that defines its ``forward``."""
    definer = next(base for base in kind.__mro__ if "forward" in vars(base))
    if not (is_held(kind) and is_held(definer)):
        return False
    forward: Any = kind.forward
    while (inner := getattr(forward, "__wrapped__", None)) is not None:  # checkpointing, renamed arguments
        if not _is_transformers(forward):
            return False
        forward = inner
    own = isinstance(forward, types.FunctionType) and forward.__globals__ is vars(sys.modules[definer.__module__])
    return own and forward.__qualname__ == f"{definer.__qualname__}.forward"


def _is_transformers(function: Any) -> bool:
    """Return True for a function that a module of transformers defines, and for torch's ``no_grad`` around one."""
    of: dict[str, Any] = getattr(function, "__globals__", {})
    name = of.get("__name__", "")
    known = name.partition(".")[0] == "transformers" or name == "torch.utils._contextlib"
    return known and of is getattr(sys.modules.get(name), "__dict__", None)


def has_code_of_a_user(kind: type[nn.Module]) -> bool:
    """Return True for a class whose calls run code that is not a library's."""
    definers = (next(base for base in kind.__mro__ if name in vars(base)) for name in ("forward", "__call__"))
    return not all(base.__module__.startswith(_LIBRARIES) for base in definers)


_LIBRARIES = ("torch.", "transformers.", "transformer_fast.", "sentence_transformers.", "peft.", "accelerate.")


def _is_foreign(hook: Any, harmless: tuple[str, ...]) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith(harmless)


def _global_hooks() -> list[Any]:
    return [hook for name in HOOKS for hook in getattr(torch_module, f"_global{name}").values()]
