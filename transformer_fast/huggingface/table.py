"""Look-up of the fast class of a class of transformers. A class is known because its object is in the table."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..layers.hooks import bases_for
from ..tensors import takes_fused_ops
from . import blocks, heads, sentence_transformers, stacks, supported, whole_layers
from .blocks import Fast, Former
from .door import Stack
from .heads import Head, HeadModel
from .inside import is_original


def fast_class(kind: type[nn.Module]) -> type[Fast] | None:
    """Return the fast class of a class of transformers.

    Returns:
        None for a class that is not in the table, for a user's class, for a class whose ``forward`` was replaced, and
        for a version of transformers that the table does not have.
    """
    name = supported.name_of(kind)
    if name is None or not supported.has_version() or not is_original(kind):
        return None
    return _made(kind, getattr(blocks, name, None) or getattr(whole_layers, name))


def packed_class(kind: type[nn.Module]) -> type[Fast] | None:
    """Return the fast class of a stack, of a table of positions, or of a module of sentence-transformers, for
    ``packed=True``; None as :func:`fast_class`."""
    name = supported.STACKS.get(f"{kind.__module__}.{kind.__qualname__}")
    base = sentence_transformers.base_of(kind) if name is None else getattr(stacks, name)
    if base is None or not supported.has_version() or not is_original(kind):
        return None
    return _made(kind, base, is_named_alike=True)


def model_class(kind: type[nn.Module]) -> type[HeadModel] | None:
    """Return the fast class of a model around stacks; None for a class that transformers does not list by its head, or
    whose file has no stack in the table."""
    if not supported.has_version() or kind.__module__ not in supported.FILES or not is_original(kind):
        return None
    head = heads.head_of(kind.__name__)
    return None if head is None else _model(kind, head)


def is_packed(kind: type[nn.Module]) -> bool:
    """Return True for a class that has a fast one for ``packed=True``, or is one."""
    made = issubclass(kind, Stack | HeadModel | sentence_transformers.Transformer | sentence_transformers.SpladePooling)
    return made or packed_class(kind) is not None or model_class(kind) is not None


def reads_padding(module: nn.Module) -> str:
    """Reason why a model of transformers or sentence-transformers, around a stack, may read what the stack has at
    padding; "" for a model of the table, and for other modules."""
    if reason := sentence_transformers.reads_padding(module):
        return reason
    kind = type(module)
    if not kind.__module__.startswith("transformers.models.") or not hasattr(kind, "get_output_embeddings"):
        return ""
    if issubclass(kind, Fast) or kind.__name__ in supported.WITHOUT_HEAD:
        return ""
    known = packed_class(kind) is not None or model_class(kind) is not None
    return "" if known else f"the head of {kind.__name__} is unknown; it may read padding"


def not_in_the_table(kind: type[nn.Module]) -> str:
    """Reason why a model of transformers keeps its padding."""
    if not supported.has_version():
        return f"its classes are not in the table for transformers {supported.version()}"
    return f"the table of stacks without padding has no class of {kind.__name__}"


def note(model: nn.Module) -> str:
    """Line of a report about a version of transformers that the table does not have; "" if there is none."""
    if supported.has_version() or all(supported.name_of(type(module)) is None for module in model.modules()):
        return ""
    return (
        f"transformers {supported.version()}: its classes are left, since the table is that of versions "
        f"{', '.join('.'.join(map(str, version)) for version in supported.VERSIONS)}; "
        'attn_implementation="transformer_fast" works with each version'
    )


@functools.cache
def _made(kind: type[nn.Module], base: type[Fast], *, is_named_alike: bool = False, **more: Any) -> type[Fast]:
    _, _, stem = kind.__module__.rpartition(".")
    attributes = {"__module__": __name__, "__qualname__": f"{kind.__qualname__}_of_{stem}", "__doc__": kind.__doc__}
    if is_named_alike:  # transformers finds what a model records by the full name of its class
        attributes |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced}
    methods = tuple((name, getattr(kind, name)) for name in base.methods if hasattr(kind, name))
    attributes["_former"] = Former(kind, kind.forward, _names(kind.forward), methods=methods, **more)
    return type(kind.__name__, bases_for(kind, base), {**attributes, "forward": _forward(kind, base.compute)})


def _reduced(self: Fast, protocol: int) -> tuple[Any, ...]:
    _, _, *rest = super(type(self), self).__reduce_ex__(protocol)
    return _remade, (self._former.kind,), *rest


def _remade(kind: type[nn.Module]) -> nn.Module:
    """New module of the fast class, for a pickle; in a version that the table does not have, of the class itself."""
    made = packed_class(kind) or model_class(kind) or kind
    return made.__new__(made)


@functools.cache
def _model(kind: type[nn.Module], head: Head) -> type[HeadModel]:
    kinds = [getattr(stacks, name) for path, name in supported.STACKS.items() if path.startswith(f"{kind.__module__}.")]
    made = {
        "reads_last": any(issubclass(k, stacks.Model) and k is not stacks.BidirectionalModel for k in kinds),
        "makes_masks": any(getattr(k, "makes_masks", False) for k in kinds),
    }
    return _made(kind, HeadModel, is_named_alike=True, head=head, **made)  # type: ignore[return-value]


def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a method that have a place, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _forward(kind: type[nn.Module], compute: Callable[..., Any]) -> Callable[..., Any]:
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # After undo, a caller may hold this method; and somebody may replace the methods of transformers.
        original = isinstance(self, Fast) and not self._former.is_changed(self)
        if original and takes_fused_ops(*args, *kwargs.values(), *self._parameters.values()):
            result = compute(self, *args, **kwargs)
            if result is not None:
                return result
        return kind.forward(self, *args, **kwargs)

    return forward


def __getattr__(name: str) -> type[nn.Module]:
    """Find a fast class by its name in a pickle; in a version that the table does not have, the class itself."""
    own, _, stem = name.partition("_of_")
    for path in supported.CLASSES if stem else ():
        place, _, known = path.rpartition(".")
        if known == own and place.endswith(f".{stem}"):
            kind = getattr(importlib.import_module(place), own)
            return fast_class(kind) or kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
