"""``Form``: names of a hand-written module of a known text, and the forward of ``dialects`` that computes it.

A module is recognised by the names of its children, parameters, buffers and attributes. Names do not prove a formula,
so ``check_form.py`` tries each module. A module with an attribute that its text lacks is left, because its code may
read that attribute.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..dialects import annotated
from ..dialects.common import LAST_WEIGHTS
from ..layers import dropout, hooks
from ..layers.embedding import is_lookup
from ..layers.padded_calls import WITHOUT_PADDING
from ..layers.torch_modules import Embedding, LayerNorm, RMSNorm
from . import form_calls as calls
from .form_calls import Size

Test = Callable[[nn.Module], bool]

SIZES = frozenset((
    "d_model", "d_k", "d_v", "d_ff", "h", "heads", "num_heads", "n_heads", "nhead", "size", "N", "num_layers",
    "n_layers", "num_blks", "depth", "vocab", "vocab_size", "max_len", "hidden", "d_hid", "features", "embed_size",
    "num_hiddens", "dim", "dff",
))  # fmt: skip
"""Attributes that any text may keep: numbers of features, heads and layers."""
HPARAMS = "hparams"
"""Attribute in which a base class keeps the arguments of a constructor."""
_OF_TORCH = frozenset(nn.Module().__dict__)
OURS = ("_transformer_fast_", LAST_WEIGHTS, WITHOUT_PADDING)
"""Beginnings of names of attributes that this package sets."""


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """Names of a hand-written module, and its forward on the fused ops.

    Attributes:
        name: name in a report.
        run: function (module, *args) -> result; None for a call that the author's own forward must compute.
        calls: function (module, size) -> calls for the trial.
        children: tests of the children, by name.
        optional: children that may be missing.
        parameters: names of the module's own parameters, all of them.
        attributes: names of buffers and attributes that the module may have.
        fits: further condition on the module.
        arguments: number of the arguments of the author's forward; None for any.
        keywords: arguments of ``run`` that the author's forward lacks; modules of this package pass them.
        saved: arguments of a constructor that a base class may keep as attributes and in a dict ``hparams``.
        stored: attributes that hold attention weights of the last call.
        roles: roles of ``layers.hooks``.
        bases: further base classes of a swapped module.
        same: children that ``run`` computes. Only the trial has seen their class.
        embeds: function (module, ids) of a stack, which gives ``run`` its first argument.
        padding: reason why a layer or stack keeps padding; "" if it may skip padding; None for any other module.
        normal: function (module, mask, length) that converts a mask of a layer or stack to normal form.
        decodes: the arguments after the first are (memory, its mask, own mask), and not (own mask).
        swaps_masks: the masks of a decoder are (own, memory's).
        attends: True for attention itself.
        by_author: function (module, author's forward, args, **keywords) for calls that ``run`` does not compute.
        adds_masks: the text adds its mask to the scores, so that a row without keys has another gradient.
        exact: the trial computes in float64.
    """

    name: str
    run: Callable[..., Any]
    calls: Callable[[Any, Size], calls.Calls]
    children: Mapping[str, Test] = dataclasses.field(default_factory=dict)
    optional: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    fits: Callable[[Any], bool] = lambda m: True
    arguments: int | None = None
    keywords: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    bases: tuple[type[nn.Module], ...] = ()
    same: tuple[str, ...] = ()
    embeds: Callable[..., Any] | None = None
    padding: str | None = None
    normal: Callable[[Any, Any, int], Any] = lambda m, mask, length: annotated.keep_mask(mask)
    decodes: bool = False
    swaps_masks: bool = False
    attends: bool = False
    by_author: Callable[..., Any] | None = None
    adds_masks: bool = False
    exact: bool = False

    def has_names(self, m: nn.Module) -> bool:
        """Return True for a module with the children and parameters of this form."""
        names = {name for name, child in m._modules.items() if child is not None}
        required = self.children.keys() - {*self.optional}
        if not (required <= names <= self.children.keys()):
            return False
        if {name for name, p in m._parameters.items() if p is not None} != {*self.parameters}:
            return False
        try:
            if self.arguments is not None and len(arguments_of(type(m).forward) or ()) != self.arguments:
                return False
            return all(self.children[name](m._modules[name]) for name in names) and self.fits(m)  # type: ignore[arg-type]
        except Exception:  # an unrelated attribute of this name
            return False

    def obstacle(self, m: nn.Module) -> str:
        """Reason against a module with these names: something that its code may read and the text lacks; or ""."""
        for name, buffer in m._buffers.items():
            if buffer is not None and name not in self.attributes:
                return f"it has a buffer {name}, which its text lacks"
        for name, value in own_attributes(m):
            known = name in self.attributes or name in self.stored or self._is_saved(name, value)
            if not known and name == HPARAMS and self.saved and type(value) is dict:
                known = all(self._is_saved(key, saved) for key, saved in value.items())
            if not known:
                return f"it has an attribute {name}, which its text lacks"
        return ""

    def _is_saved(self, name: str, value: Any) -> bool:
        """Return True for a size that any text may keep, or an argument that this text may keep."""
        return name in self.saved or (name in SIZES and type(value) in (int, float))


def own_attributes(m: nn.Module) -> list[tuple[str, Any]]:
    """Attributes of a module beside those that each ``nn.Module`` and this package have."""
    return [(k, v) for k, v in m.__dict__.items() if k not in _OF_TORCH and not k.startswith(OURS)]


@functools.cache
def arguments_of(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    """Arguments of a method without ``self``; None if one of them is ``*``, ``**`` or keyword only."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        return None
    return tuple(parameters)


def form_of(module: nn.Module) -> Form | None:
    """Return the form that a module was swapped by; None for any other module, also for a parametrized one."""
    form = vars(type(module)).get("form")
    return form if isinstance(form, Form) else None


def width_of(norm: nn.Module) -> int | None:
    """Width of a norm that can fuse the residual addition; None for other modules."""
    form = form_of(norm)
    if form is not None and hooks.TAKES_RESIDUAL in form.roles:
        return int(getattr(norm, form.parameters[0]).shape[0])
    swapped = type(norm) in (LayerNorm, RMSNorm)
    return norm.normalized_shape[0] if swapped and len(norm.normalized_shape) == 1 else None  # type: ignore


def of_form(*names: str) -> Test:
    """Test for modules that were swapped by one of these forms."""
    return lambda m: (form := form_of(m)) is not None and form.name in names


def list_of(test: Test) -> Test:
    """Test for a list of such modules."""
    return lambda m: isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 0 and all(map(test, m))


def any_module(m: nn.Module) -> bool:
    """Take any child; it is called."""
    return True


def is_linear(m: nn.Module) -> bool:
    """Return True for ``nn.Linear`` or a replacement by another library; it is called."""
    return hasattr(m, "in_features") and hasattr(m, "out_features")


def is_dropout(m: nn.Module) -> bool:
    """Return True for a dropout that a parent may compute."""
    return type(m) in dropout.KINDS


def is_embedding(m: nn.Module) -> bool:
    """Return True for a swapped embedding that only looks rows up."""
    return isinstance(m, Embedding) and is_lookup(m)


def is_norm(m: nn.Module) -> bool:
    """Return True for a norm that can fuse the residual addition."""
    return width_of(m) is not None


def layer_children(
    attentions: tuple[str, ...], heads: str, network: str, norm: str, dropout_name: str
) -> dict[str, Test]:
    """Children of a layer: attentions of the form ``heads``, a network, and a numbered norm and dropout for each."""
    children = {**dict.fromkeys(attentions, of_form(heads)), network: any_module}
    for number in range(1, 2 + len(attentions)):
        children |= {f"{norm}{number}": is_norm, f"{dropout_name}{number}": is_dropout}
    return children


def has_table(axis: int, name: str) -> Callable[[Any], bool]:
    """Condition that a module has a table of positions, along an axis of three."""

    def fits(m: Any) -> bool:
        table = getattr(m, name, None)
        return isinstance(table, Tensor) and table.dim() == 3 and table.shape[1 - axis] == 1

    return fits
