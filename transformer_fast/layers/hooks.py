"""``is_plain``: the test that lets a fused parent compute a child module without calling it; bases of made classes."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules import module as _module

from ..tracing import constant_when_compiled

Kind = TypeVar("Kind", bound=nn.Module)

PLAIN, FUSED = "_transformer_fast_plain", "_transformer_fast_fused"
"""Attributes of a class that was made from an author's class: the author's ``forward``, and the class's own."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes that hold the hooks of a module."""


def bases_for(kind: type[nn.Module], *others: type) -> tuple[type, ...]:
    """Bases of a class that modules of ``kind`` can get. An abstract class must be the first one: Python lets an object
    change to a class of the same layout alone."""
    if any(issubclass(other, kind) for other in others):
        return others
    return (kind, *others) if isinstance(kind, abc.ABCMeta) else (*others, kind)


def is_plain(module: nn.Module, *kinds: type[Kind]) -> TypeGuard[Kind]:
    """Return True if calling a module would only run the forward of its class, so that a parent need not call it.

    A plain module has no hooks, its ``forward`` was not replaced on the instance, and it was not compiled in place. No
    global hook is set. If kinds are given, the module's class must be exactly one of them; a subclass, a parametrized
    module and an adapter are then not plain.
    """
    if (kinds and type(module) not in kinds) or "forward" in module.__dict__:
        return False
    if module._compiled_call_impl is not None or _module._has_any_global_hook():
        return False
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooked


TAKES_RESIDUAL = "takes_residual"
"""Role of a norm whose ``forward`` takes ``residual`` and ``dropout_p``."""
LOOKS_UP = "looks_up"
"""Role of an embedding that returns rows of its ``weight``."""
TAKES_NEED_WEIGHTS = "takes_need_weights"
"""Role of an attention module or attention layer whose ``forward`` takes ``need_weights``."""
SCALED_DOT_PRODUCT = "scaled_dot_product"
"""Role of an attention module without projections, which the parent may compute for all heads at once."""
TAKES_MASKS = "takes_masks"
"""Role of an attention module whose ``forward`` takes an AttentionMask in place of its author's mask."""
PRE_NORM = "pre_norm"
"""Role of a module ``x + dropout(f(norm(x)))`` with children ``norm`` and ``dropout``."""
SCALED_LOOKUP = "scaled_lookup"
"""Role of an embedding ``lut(ids) * sqrt(d_model)``."""
ADDS_POSITIONS = "adds_positions"
"""Role of a module ``dropout(x + table[:, :L])`` with a table (1, max_len, d) named ``pe`` or ``P``."""
ANNOTATED_ENCODER, ANNOTATED_DECODER = "annotated_encoder_layer", "annotated_decoder_layer"
"""Roles of the layers of The Annotated Transformer."""


def in_role(role: str) -> Callable[[type[Kind]], type[Kind]]:
    """Mark a class as one that a fused parent may compute in a role. Subclasses do not inherit the mark."""

    def mark(kind: type[Kind]) -> type[Kind]:
        setattr(kind, role, kind)
        return kind

    return mark


def has_role(module: nn.Module, role: str) -> bool:
    """Return True for a plain module whose class, not a base class, was marked by :func:`in_role`."""
    kind = type(module)
    return getattr(kind, role, None) is kind and is_plain(module) and has_its_forward(kind)


@constant_when_compiled
def has_its_forward(kind: type[nn.Module]) -> bool:
    """Return True unless somebody set another ``forward`` on a made class, or on the author's class.

    A compiled graph holds the answer of the time at which it was compiled.
    """
    own = vars(kind)
    return FUSED not in own or (own["forward"] is own[FUSED] and own["former"].forward is own[PLAIN])
