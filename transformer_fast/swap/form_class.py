"""Classes for hand-written modules: the ``forward`` of their form, all else of the author's class.

Layers and stacks run without padding, for ``accelerate(model, packed=True)``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..dialects.common import LastWeights
from ..layers.dropout import KINDS as DROPOUTS
from ..layers.hooks import FUSED, PLAIN, TAKES_RESIDUAL, has_its_forward, in_role, is_plain
from ..layers.linear import Linear
from ..layers.padded_calls import StaysPaddedError, layers_of, padded_calls
from ..layers.padder import Padder, without_padding
from ..layers.torch_modules import LayerNorm, RMSNorm
from ..masks.packing import PackedMask, packing_of
from ..models.packed import padder_of, padding_of
from ..ops.token_mask import call_on_tokens
from ..tensors import takes_fused_ops
from .form import Form, any_module, arguments_of, form_of
from .forms import FORMS
from .swapped import Registered, author_class, registered_class

Same = tuple[type[nn.Module] | None, ...]

_PER_TOKEN = (
    nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Sequential, Linear, *DROPOUTS,
    nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm,
)  # fmt: skip
"""Modules that work token by token."""
_NETWORKS = ("FeedForward", "AnnotatedFeedForward", "ActivatedFeedForward", "D2lFeedForward")


class Formed(Registered):
    """First base of such a class.

    Attributes:
        form: the form.
        same, forwards: classes of the children that the form computes and only the trial has seen, and their
            ``forward``.
    """

    form: Form
    same: Same
    forwards: tuple[Any, ...]


def class_of_form(form: Form, module: nn.Module) -> type[nn.Module]:
    """Class for a module of a form."""
    return form_class(type(module), form.name, _classes(form, module))


def form_class(kind: type[nn.Module], name: str, same: Same) -> type[nn.Module]:
    """Class for modules of a class and a form; a pickle calls this function."""
    return _made(kind, kind.forward, name, same, _forwards(same))  # type: ignore[arg-type]


def _classes(form: Form, m: nn.Module) -> Same:
    children = (m._modules.get(name) for name in form.same)
    return tuple(None if child is None else author_class(type(child)) for child in children)


def _forwards(same: Same) -> tuple[Any, ...]:
    return tuple(kind and kind.forward for kind in same)


@functools.cache
def _made(kind: type[nn.Module], plain: Any, name: str, same: Same, forwards: tuple[Any, ...]) -> type[nn.Module]:
    form = FORMS[name]
    parameters = arguments_of(plain)
    keywords = [name for name in form.keywords if name not in inspect.signature(plain).parameters]

    @functools.wraps(plain)  # torch.export reads the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ours = {name: kwargs.pop(name) for name in keywords if name in kwargs} if kwargs else {}
        ordered = _in_order(parameters, args, kwargs) if kwargs else args
        if ordered is not None and isinstance(self, Formed) and _is_served(self, args, kwargs):
            result = compute(form, self, ordered, ours)
            if result is not None:
                return result
        if any(isinstance(value, PackedMask) for value in (*args, *kwargs.values())) or (
            form.attends and call_on_tokens() is not None
        ):
            raise StaysPaddedError(f"a {kind.__name__} runs its own forward")
        if not torch.compiler.is_compiling() and (calls := padded_calls(self)) is not None:
            calls.add(f"a {kind.__name__} runs its own forward: it has a hook, or an unknown submodule or input")
        if form.by_author is not None:
            return form.by_author(self, kind.forward, *args, *kwargs.values(), **ours)
        return kind.forward(self, *args, **kwargs)

    attributes = {"form": form, "same": same, "forwards": forwards, PLAIN: plain, FUSED: forward}
    for stored in form.stored:
        if not isinstance(inspect.getattr_static(kind, stored, None), property):  # it may read the weights of the parts
            attributes[stored] = LastWeights()
    bases: tuple[type, ...] = (Formed, *form.bases, kind)
    made = registered_class(kind, bases, (form_class, name, same), forward, **attributes)
    for role in form.roles:
        in_role(role)(made)
    return made


def _is_served(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the fused ops take the arguments, and nobody has replaced what the trial saw."""
    if not takes_fused_ops(*args, *kwargs.values(), *m._parameters.values()) or not has_its_forward(type(m)):
        return False
    made: Any = type(m)
    if not made.same:
        return True
    children = [m._modules.get(name) for name in made.form.same]
    if not all(child is None or is_plain(child) for child in children) or _classes(made.form, m) != made.same:
        return False
    return _forwards(made.same) == made.forwards


def compute(form: Form, m: nn.Module, args: tuple[Any, ...], ours: dict[str, Any]) -> Any:
    """Compute a call by a form; None for a call that the author's own forward must compute."""
    if form.embeds is not None:
        if (x := form.embeds(m, args[0])) is None:
            return None
        args = x, *args[1:]
    if padded_calls(m) is None:
        return form.run(m, *args, **ours)
    return _run_without_padding(form, m, args, functools.partial(form.run, **ours))


def _in_order(
    parameters: tuple[inspect.Parameter, ...] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Put keyword arguments in order; None if they do not fit, so that the author's forward raises."""
    if parameters is None:
        return None
    rest, used = [], 0
    for parameter in parameters[len(args) :]:
        used += parameter.name in kwargs
        rest.append(kwargs.get(parameter.name, parameter.default))
        if rest[-1] is inspect.Parameter.empty:
            return None
    return (*args, *rest) if used == len(kwargs) else None


def _run_without_padding(form: Form, m: nn.Module, args: tuple[Any, ...], run: Callable[..., Any]) -> Any:
    """Run a layer or stack, on packed tokens if the batch has padding: ``run(m, *args)`` is (B, L, d), or a tuple of it
    and weights; args are hidden states (B, L, d) and a mask, or for a decoder memory and masks."""
    x, *inputs = args
    inputs = [*inputs, *[None] * 3][: 3 if form.decodes else 1]
    calls = padded_calls(m)
    if calls is None or torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() != 3:
        return run(m, *args)
    if any(isinstance(arg, PackedMask) for arg in inputs):  # a layer inside a stack that is packed already
        return run(m, *args)
    memory, masks = inputs[:-2], inputs[-2:]
    if form.swaps_masks:
        masks = masks[::-1]

    def prepare() -> tuple[Padder, Callable[[], Any]]:
        try:
            normal = [form.normal(m, mask, x.shape[1]) for mask in masks]
            if memory:
                padder = padder_of(memory[0][..., 0], x[..., 0], *normal)
            else:
                batch, length = x.shape[:2]
                padder = Padder(packing_of(padding_of(normal[0], length), batch, length, x.device))
            padder.check_sources()
        except (ValueError, TypeError) as reason:
            raise StaysPaddedError(reason) from reason

        def run_on_tokens() -> Any:
            _check_parts(m)
            tokens = (t.unsqueeze(0) for t in padder.remove(x, *memory))
            result = run(m, *tokens, *(padder.masks if form.swaps_masks else reversed(padder.masks)))
            if result is None:
                raise StaysPaddedError(f"a {type(m).__name__} runs its own forward")
            return result

        return padder, run_on_tokens

    result = without_padding(m, calls, x, prepare)
    return run(m, *args) if result is None else result


def _check_parts(m: nn.Module) -> None:
    for layer in layers_of(m):
        if form_of(layer) is None:
            raise StaysPaddedError(f"a {type(layer).__name__} has another class than when accelerate was called")
    for child in m.modules():
        form, kind = form_of(child), type(child).__name__
        if child is not m and not is_plain(child):
            raise StaysPaddedError(f"a {kind} inside a layer has a hook, which would see tokens without padding")
        if form is None or form.padding is None:
            continue
        for name, test in form.children.items():
            part = child._modules.get(name)
            if test is any_module and part is not None and not _works_per_token(part):
                raise StaysPaddedError(f"its {type(part).__name__} may read several positions")
            if part is None or not test(part):
                raise StaysPaddedError(f"a {kind} has an unknown submodule")


def _works_per_token(m: nn.Module) -> bool:
    """Return True for a norm, a network of a known text, and torch's own modules that work token by token."""
    form = form_of(m)
    if form is not None and form.name not in _NETWORKS:
        return TAKES_RESIDUAL in form.roles
    inside = m.modules() if form is None else m.children()
    return all(type(part) in _PER_TOKEN for part in inside)
