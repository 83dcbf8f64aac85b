"""Layers of transformers that use the attention implementation that they are given, and those that do not.

transformers accepts a registered name for every model class. transformers does not check that the layers look the name
up: many older models compute attention themselves, and take only their mask from the implementation. Such a model would
be right, because our masks are those of transformers, but would not use the attention that was asked for by name. So it
is refused.

The test reads the byte code of a layer, not a list of models, so it also covers remote code and future models. Flags of
transformers do not answer: ``_supports_attention_backend`` and ``_supports_sdpa`` are missing in many models whose
layers look the name up.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from .layer_code import calls_the_interface, keywords_of, names_of, own_arguments, strings_of, uses_masks_by_itself

_prepared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Configs and models by id."""


def obstacle(model: type[nn.Module], layers: Iterable[type[nn.Module]], unsupported: Mapping[str, str]) -> str:
    """Reason not to give a model an implementation that the user did not request; empty if there is none.

    Args:
        model: class of the model.
        layers: classes of its layers.
        unsupported: arguments that the implementation refuses, with a description.
    """
    alone = _attention_of_its_own(layers)
    # A model with sdpa may call that itself, as some encoders of images and sound do.
    if alone is not None and ("_attn_implementation" in names_of(alone) or not getattr(model, "_supports_sdpa", False)):
        return _reason(alone)
    for layer in layers:
        if calls_the_interface(layer):
            given = {*own_arguments(layer), *(keywords_of(layer) & unsupported.keys())}
            if given:
                return f"its {layer.__name__} gives {', '.join(sorted(given))} to its attention, which the kernel lacks"
    return ""


def prepare_caller(config: Any) -> None:
    """Check the model whose running ``forward`` requested a mask, and prepare its layers; once per model and config.

    Args:
        config: the config for which the mask was requested.

    Raises:
        NotImplementedError: if the model has attention, but none of its layers looks an implementation up. The message
            names the classes of model and layer, the implementation, and an alternative.
    """
    if config is None or _prepared.get(id(config)) is config:
        return
    if models := _running_models():
        model = models[0]
        layers = dict.fromkeys(type(m) for m in model.modules() if not hasattr(m, "post_init"))  # without models
        if (layer := _attention_of_its_own(layers)) is not None:
            raise NotImplementedError(_message(type(model), layer, config._attn_implementation))
        _prepared[id(config)] = config


def _running_models() -> list[nn.Module]:
    """Models of transformers whose methods are running, from the innermost on."""
    from transformers import PreTrainedModel

    frame, models = sys._getframe(1), []
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), PreTrainedModel):
            models.append(caller)
        frame = frame.f_back
    return models


@functools.cache
def _supports_sdpa(config: type) -> bool:
    from transformers import PreTrainedModel

    found, todo = [], [PreTrainedModel]
    for kind in todo:
        todo.extend(kind.__subclasses__())
        if getattr(kind, "config_class", None) is config:
            found.append(kind)
    # The second question is there since transformers 4.54.
    can = [kind._supports_sdpa and getattr(kind, "_can_set_attn_implementation", lambda: True)() for kind in found]
    return bool(can) and all(can)


def supports_sdpa(config: type) -> bool:
    """Return True if all models of a class of configs have layers that take the masks of "sdpa"."""
    return _supports_sdpa(config)


supports_sdpa._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py


def asks_for(kind: str, modules: Iterable[nn.Module]) -> bool:
    """Return True if the code of a model compares something, such as the name of its attention, with a name."""
    return any(kind in strings_of(type(module)) for module in modules)


def _attention_of_its_own(layers: Iterable[type[nn.Module]]) -> type[nn.Module] | None:
    """First layer that computes attention by itself, if none looks an implementation up.

    None for layers without any attention (a convolutional backbone, Mamba): there is nothing to replace.
    """
    if any(map(calls_the_interface, layers)):
        return None
    alone = (layer for layer in layers if uses_masks_by_itself(layer) or "attention" in layer.__name__.lower())
    return next(alone, None)


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
