"""Tests for models of transformers: does the model call the attention implementation that it is given?

transformers accepts a registered name for every model class. It does not ask whether the class's layers look the name
up: many older models compute attention themselves, and take only their mask from the implementation. Such a model would
add a mask in our form to its scores, and be wrong without a word; so it is refused.

What a layer does is read from its byte code, not from a list of models: that holds for remote code and for models of
tomorrow too. Three questions are asked of a layer's methods and of the functions of its package that they call.

- Does it look an implementation up? Then it names transformers' ``ALL_ATTENTION_FUNCTIONS``.
- Does it take a mask and a softmax, or call a fused attention? Then it uses masks by itself.
- Is its class called an attention? Then it should look an implementation up, if no layer beside it does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from .layer_code import (
    adds_to_its_mask,
    calls_the_interface,
    is_layer,
    keywords_of,
    named_by_init,
    names_of,
    own_arguments,
    uses_masks_by_itself,
)
from .lazy_bias import make_lazy

OWN_ARGUMENTS = "_transformer_fast_own_arguments"
"""Set on the class of a layer: arguments of the eager attention in its file that no other model's attention has."""

# Set on the class of a config, where torch.compile can read them and where they are not saved with the config.
_CHECKED = "_transformer_fast_checked"
_NEEDS_MASKS = "_transformer_fast_needs_masks"

_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # configs and models by id


def refuse(model: nn.Module, names: set[str], asked: dict[int, str] | None = None) -> None:
    """Raise if a part of ``model`` that is to use one of the implementations ``names`` would not.

    A part is a model of transformers together with the layers that belong to no model inside it.

    Args:
        model: with all its layers.
        names: the implementations that are ours.
        asked: the implementation that is wanted, by the id of a config (``asked_of``); for the others, and by default,
            it is what the config says.

    Raises:
        NotImplementedError: it names the model's class, the layer's, the implementation and what to do instead.
    """
    passed = []
    for part, layers in _parts(model):
        name = (asked or {}).get(id(getattr(part, "config", None))) or implementation_of(part)
        if name in names:
            _judge(type(part), layers, name)
            passed.append((part, layers))
    for part, layers in passed:  # only now: two parts may have one config
        prepare(layers, names)
        mark(type(part), part.config)


def prepare(layers: Iterable[type[nn.Module]], names: set[str]) -> None:
    """Make the layers of a part that was not refused ready for the implementations ``names``."""
    for layer in layers:
        if arguments := own_arguments(layer):
            setattr(layer, OWN_ARGUMENTS, arguments)
        if calls_the_interface(layer):
            make_lazy(next((base for base in layer.__mro__ if "compute_bias" in vars(base)), layer), names)


def mark(part: type[nn.Module], config: Any) -> None:
    """Note that a part with a config was not refused."""
    kind = type(config)
    setattr(kind, _CHECKED, kind)
    if not _is_trusted(part):
        setattr(kind, _NEEDS_MASKS, True)
    _checked[id(config)] = config


def obstacle(part: type[nn.Module], layers: Iterable[type[nn.Module]], unsupported: Mapping[str, str]) -> str:
    """Reason not to give a part an implementation that nobody asked for by name; empty where there is none.

    Args:
        part: its class.
        layers: the classes of its layers.
        unsupported: arguments that the implementation refuses when it is called with them, and what they are.
    """
    if (wrong := _wrong_layer(part, layers)) is not None:
        return _reason(wrong)
    for layer in layers:
        if calls_the_interface(layer):
            given = {*own_arguments(layer), *(keywords_of(layer) & unsupported.keys())}
            if given:
                return f"its {layer.__name__} gives {', '.join(sorted(given))} to its attention, which the kernel lacks"
    return ""


def refuse_class(cls: type[nn.Module], name: str) -> None:
    """``refuse`` for a model class, before its layers exist.

    Some classes choose their layers from a table by the implementation's name, and would stop with a bare KeyError.

    Raises:
        NotImplementedError: as ``refuse``.
    """
    from transformers import PreTrainedModel

    layers: dict[type, bool] = {}
    todo = [cls]
    for made in todo:
        for found in named_by_init(made):
            if isinstance(found, dict) and is_layer(found.get("eager")) and name not in found:
                raise NotImplementedError(_message(cls, found["eager"], name))
            if is_layer(found) and not issubclass(found, PreTrainedModel) and found not in layers:
                layers[found] = True
                todo.append(found)
    if not any(calls_the_interface(layer) for layer in layers):  # else only some of them may be made
        _judge(cls, layers, name)


def refuse_caller(config: Any, names: set[str]) -> None:
    """``refuse`` for the model whose ``forward`` is running and asked for a mask, once for each config.

    This finds a model whose config was given the name after the model was made.

    Raises:
        NotImplementedError: as ``refuse``.
    """
    if _checked.get(id(config)) is config:
        return
    from transformers import PreTrainedModel

    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), PreTrainedModel):
        frame = frame.f_back
    if frame is not None and _checked.get(id(model := frame.f_locals["self"])) is not model:
        refuse(model, names)
        _checked[id(model)] = model
    if config is not None:
        _checked[id(config)] = config


def is_checked(config: Any) -> bool:
    """Return True if a model with a config of this class was made with one of our implementations."""
    return getattr(config, _CHECKED, None) is type(config)


def needs_masks(config: Any) -> bool:
    """Return True if the models of a config were never tried with "sdpa".

    Their layers may not say whether they are causal, so that a mask must not be left out for them.
    """
    return getattr(config, _NEEDS_MASKS, False)


def implementation_of(model: nn.Module) -> str | None:
    """The name of the attention implementation in a model's config."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of the models in ``model``, and the configs inside them."""
    configs = [part.config for part, _ in _parts(model)]
    for config in configs:
        inner = (getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
        configs.extend(other for other in inner if other is not None)
    return configs


def asked_of(model: nn.Module, wanted: str | dict[str, Any]) -> dict[int, str]:
    """The implementation that ``model.set_attn_implementation(wanted)`` asks for, by the id of each config."""
    if isinstance(wanted, str):
        return {id(config): wanted for config in configs_of(model)}
    names, todo = {}, [(model.config, wanted)]
    for config, asked in todo:
        if isinstance(asked, str):
            names[id(config)] = asked
            continue
        for key, value in asked.items():
            inner = getattr(config, key, None) if key else config
            if inner is not None:
                todo.append((inner, value))
    return names


def _judge(part: type[nn.Module], layers: Iterable[type[nn.Module]], name: str) -> None:
    """Raise if one of the layers of a part does what the implementation should do.

    A part without any attention (a convolutional backbone, Mamba) passes: there is nothing to replace. A class that
    says ``_supports_sdpa`` is trusted with layers of its own, since our masks are those of "sdpa"; but not where those
    layers are all it has and compare the implementation's name themselves.
    """
    if (wrong := _wrong_layer(part, layers)) is not None:
        raise NotImplementedError(_message(part, wrong, name))


def _wrong_layer(part: type[nn.Module], layers: Iterable[type[nn.Module]]) -> type[nn.Module] | None:
    alone = not any(calls_the_interface(layer) for layer in layers)
    trusted = _is_trusted(part)
    for layer in layers:
        by_itself = uses_masks_by_itself(layer)
        if trusted:
            wrong = alone and by_itself and "_attn_implementation" in names_of(layer)
        else:
            wrong = by_itself or adds_to_its_mask(layer) or (alone and "attention" in layer.__name__.lower())
        if wrong:
            return layer
    return None


def _reason(layer: type) -> str:
    return (
        f"its {layer.__name__} computes attention or uses masks by itself, and does not call transformers' attention "
        "interface"
    )


def _message(model: type, layer: type, name: str) -> str:
    return (
        f'{model.__name__} cannot use attn_implementation="{name}": {_reason(layer)}. Use attn_implementation="eager"; '
        "tfast.accelerate(model) still swaps the norms and embeddings it knows. Where it is a part of a larger model, "
        f'name one for each part, such as attn_implementation={{"text_config": "{name}", "vision_config": "eager"}}'
    )


def _parts(model: nn.Module) -> Iterator[tuple[nn.Module, list[type[nn.Module]]]]:
    """(model of transformers, classes of the layers that belong to it) for each of those in ``model``."""
    from transformers import PreTrainedModel

    parts = [model]
    for part in parts:
        layers, todo = {}, list(part.children())
        while todo:
            module = todo.pop()
            if isinstance(module, PreTrainedModel):
                parts.append(module)
                continue
            layers[type(module)] = True
            todo.extend(module.children())
        yield part, list(layers)


def _is_trusted(part: type[nn.Module]) -> bool:
    return getattr(part, "_supports_sdpa", False)
