"""Refuse transformers models that do not call the attention implementation that they are given.

transformers accepts a registered name for every model class. transformers does not check that the layers look the name
up. Many older models compute attention themselves and take only their mask from the implementation. Such a model would
add our bool mask to its scores and silently compute wrong results. So such a model is refused.

The test reads the byte code of a layer, not a list of models, so it also covers remote code and future models. The test
asks three questions about the layer's methods and the functions of its package that the methods call.

- Does the layer look an implementation up? Then its code names transformers' ``ALL_ATTENTION_FUNCTIONS``.
- Does the layer take a mask and a softmax, or call a fused attention? Then the layer uses masks by itself.
- Does its class name contain "attention"? Then the layer should look an implementation up, unless another layer does.
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
"""Attribute of a layer's class: arguments that only the eager attention in the layer's file has."""

# Attributes of a config's class: torch.compile can read them there, and they are not saved with the config.
_CHECKED = "_transformer_fast_checked"
_NEEDS_MASKS = "_transformer_fast_needs_masks"

_checked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # configs and models by id


def refuse(model: nn.Module, names: set[str], asked: dict[int, str] | None = None) -> None:
    """Raise if a part of ``model`` is set to an implementation in ``names`` but would not use it.

    A part is a transformers model with its layers, except the layers of models inside it.

    Args:
        model: model with all its layers.
        names: names of this package's implementations.
        asked: requested implementation by id of a config (``asked_of``); configs that are missing here keep their own.

    Raises:
        NotImplementedError: the message names the classes of model and layer, the implementation, and an alternative.
    """
    passed = []
    for part, layers in _parts(model):
        name = (asked or {}).get(id(getattr(part, "config", None))) or implementation_of(part)
        if name in names:
            _judge(type(part), layers, name)
            passed.append((part, layers))
    for part, layers in passed:  # after all checks: two parts may share a config
        prepare(layers, names)
        mark(type(part), part.config)


def prepare(layers: Iterable[type[nn.Module]], names: set[str]) -> None:
    """Prepare the layers of an accepted part for the implementations ``names``."""
    for layer in layers:
        if arguments := own_arguments(layer):
            setattr(layer, OWN_ARGUMENTS, arguments)
        if calls_the_interface(layer):
            make_lazy(next((base for base in layer.__mro__ if "compute_bias" in vars(base)), layer), names)


def mark(part: type[nn.Module], config: Any) -> None:
    """Record on the config that its part was accepted."""
    kind = type(config)
    setattr(kind, _CHECKED, kind)
    if not _is_trusted(part):
        setattr(kind, _NEEDS_MASKS, True)
    _checked[id(config)] = config


def obstacle(part: type[nn.Module], layers: Iterable[type[nn.Module]], unsupported: Mapping[str, str]) -> str:
    """Reason not to give a part an implementation that the user did not request; empty if there is none.

    Args:
        part: class of the part.
        layers: classes of its layers.
        unsupported: arguments that the implementation refuses, with a description.
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
    """Apply ``refuse`` to a model class, before its layers exist.

    Some classes choose their layers from a table by the implementation's name, and would raise a bare KeyError.

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
    if not any(calls_the_interface(layer) for layer in layers):  # else only some of the layers may be made
        _judge(cls, layers, name)


def refuse_caller(config: Any, names: set[str]) -> None:
    """Apply ``refuse`` to the model whose running ``forward`` requested a mask, once per config.

    The check covers models whose config got the name after construction.

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
    """Return True if the models of a config do not declare support of "sdpa".

    The layers of such models may lack ``is_causal``, so they always need a mask.
    """
    return getattr(config, _NEEDS_MASKS, False)


def implementation_of(model: nn.Module) -> str | None:
    """Name of the attention implementation in a model's config."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def configs_of(model: nn.Module) -> list[Any]:
    """Configs of the models in ``model``, and the configs inside these configs."""
    configs = [part.config for part, _ in _parts(model)]
    for config in configs:
        inner = (getattr(config, key, None) for key in getattr(config, "sub_configs", ()))
        configs.extend(other for other in inner if other is not None)
    return configs


def asked_of(model: nn.Module, wanted: str | dict[str, Any]) -> dict[int, str]:
    """Implementations that ``model.set_attn_implementation(wanted)`` requests, by id of the config."""
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
    """Raise if a layer of a part computes attention by itself.

    A part without any attention (a convolutional backbone, Mamba) passes: there is nothing to replace. A class with
    ``_supports_sdpa`` may have layers that use masks by themselves, because our masks are those of "sdpa". Such a class
    is refused if all its attention layers use masks and compare the implementation's name themselves.
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
    """Pairs for each transformers model in ``model``: the model, and the classes of its layers."""
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
