"""Attention of Hugging Face transformers models, redirected to our kernels through transformers' attention interface.

The config of a layer names its attention implementation. Many modules, and other models, may share one config. So the
modules of a model get copies of their configs, and only the copies name our implementation. Other models are not
affected. A copy names the variant whose masks are those of the former implementation: modules that do not use our
attention, also ones put in later, get the mask that the plain model gives them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..huggingface import attention as integration
from ..huggingface import interface
from ..huggingface.interface import NAME, NAMES, is_ours
from .report import Attribute, Report
from .rows import ALREADY, Row

WEIGHTS = 'config.output_attentions is set, which transformers lets no other implementation than "eager" have'
"""Reason to keep a part, since a config of another name could not be saved."""


class _Interface:
    """Mark of a module whose config names our attention: transformers knows the names where a pickle is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, ()


_INTERFACE = _Interface()
MARK = "_transformer_fast_interface"
"""Attribute that holds the mark."""


def _registered() -> _Interface:
    integration.register()
    return _INTERFACE


@dataclasses.dataclass
class Part:
    """A model of transformers with its modules, except those of models inside it.

    Attributes:
        configs: configs of its modules, by id.
        obstacle: reason to keep its implementation, or "".
    """

    path: str
    module: nn.Module
    modules: list[nn.Module]
    configs: dict[int, Any]
    obstacle: str = ""

    @functools.cached_property
    def layers(self) -> list[nn.Module]:
        """Modules that call transformers' attention interface."""
        return [module for module in self.modules if interface.calls_the_interface(module)]

    @functools.cached_property
    def implementations(self) -> set[Any]:
        """Names of the implementations before."""
        return {config._attn_implementation for config in self.configs.values()}


@dataclasses.dataclass
class Attention:
    """Rows of the report, and ids: of the modules with a row, and of those that call our attention."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    parts: set[int] = dataclasses.field(default_factory=set)
    layers: set[int] = dataclasses.field(default_factory=set)


def give_attention(model: nn.Module, obstacle: Callable[[nn.Module], str], report: Report) -> Attention:
    """Make the transformers models inside ``model`` use our attention, except those with an obstacle. The function
    ``obstacle`` returns why the kernels do not serve a part on its device, or ""."""
    parts = list(_parts(model))
    # A model whose code asks for "sdpa" by name, to know that a mask may be left out, takes a missing mask for one that
    # is not needed under another name. So it always gets a mask.
    always = {key for part in parts if interface.asks_for_sdpa(part.modules) for key in part.configs}

    def name_for(config: Any) -> str:
        """Name of our attention in place of a config's implementation."""
        return NAME if id(config) in always else NAMES[config._attn_implementation]

    for part in parts:
        part.obstacle = _obstacle(part, obstacle)
    _share_obstacles(parts)
    is_used = any(part.layers and not part.obstacle for part in parts)
    if is_used:
        try:
            integration.register()
        except ImportError as error:
            is_used = False
            for part in parts:
                if part.layers:
                    part.obstacle = part.obstacle or str(error)
    done = Attention()
    for part in parts:
        if part.layers or part.obstacle:
            was = f"{type(part.module).__name__} ({', '.join(sorted(map(str, part.implementations)))})"
            names = sorted({name_for(c) for c in part.configs.values() if c._attn_implementation in NAMES})
            now = None if part.obstacle else f"attn_implementation={', '.join(names)}"
            done.rows.append(Row(part.path, was, now, part.obstacle))
            done.parts.add(id(part.module))
        if part.obstacle in ("", ALREADY):
            done.layers.update(map(id, part.layers))
    if is_used:
        for change in _changes(model, parts, name_for):
            report._apply(change)
    return done


def _obstacle(part: Part, of_device: Callable[[nn.Module], str]) -> str:
    """Reason of a part to keep its implementation, or ""."""
    if not part.layers:
        own = any(m is not part.module and interface.folder_of(type(m)) for m in part.modules)
        refused = own and _is_model(part.module) and not interface.can_use(type(part.module))
        return interface.OWN_ATTENTION if refused else ""
    if all(map(is_ours, part.implementations)):
        return ALREADY
    if others := {name for name in part.implementations if not is_ours(name)} - {*NAMES, None}:
        return f'attn_implementation="{min(others)}" was chosen for it'
    if any(getattr(config, "output_attentions", False) for config in part.configs.values()):
        return WEIGHTS
    return of_device(part.module) or interface.lacks(part.modules)


def _share_obstacles(parts: list[Part]) -> None:
    """Give parts that share a config the same obstacle, because they share the implementation."""
    again = True
    while again:
        again = False
        stays = {key: part for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
        for part in parts:
            if part.layers and not part.obstacle and (shared := part.configs.keys() & stays.keys()):
                other = stays[min(shared)]
                part.obstacle = f"it shares its config with {other.path or 'the model'}, which stays: {other.obstacle}"
                again = True


def _changes(model: nn.Module, parts: list[Part], name_for: Callable[[Any], str]) -> list[Attribute]:
    """Copy the config of each module, and name our attention in the copies of parts that may use it."""
    stays = {key for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
    memo: dict[int, Any] = {}
    changes = [Attribute(m, name, copy.deepcopy(old, memo)) for m in model.modules() for name, old in _configs_in(m)]
    changes += [Attribute(m, MARK, _INTERFACE) for m in model.modules() if _configs_in(m)]
    # The config of a part without attention of its own names our attention if all parts inside use it.
    ours = [part for part in parts if not part.obstacle and (part.layers or not stays)]
    todo = [config for part in ours for config in part.configs.values()]
    for config in todo:  # the loop adds the configs inside these configs
        if id(config) not in stays:
            if config._attn_implementation in NAMES:
                memo[id(config)]._attn_implementation_internal = name_for(config)
            stays.add(id(config))
            todo.extend(inner for inner in vars(config).values() if _is_config(inner))
    return changes


def _parts(model: nn.Module) -> Iterator[Part]:
    """Parts of ``model``: models of transformers, and modules with a config around or inside such a model."""
    if "transformers.modeling_utils" not in sys.modules:
        return
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    roots = [model]
    for root in roots:
        modules, todo = [], [root]
        while todo:
            module = todo.pop()
            if id(module) in seen:
                continue
            if module is not root and _is_model(module):
                roots.append(module)
                continue
            seen.add(id(module))
            modules.append(module)
            todo.extend(module.children())
        configs = {id(config): config for module in modules for _, config in _configs_in(module)}
        if configs:
            yield Part(paths[id(root)], root, modules, configs)


def _configs_in(module: nn.Module) -> list[tuple[str, Any]]:
    """Attributes of a module that are configs of transformers."""
    return [(name, value) for name, value in module.__dict__.items() if _is_config(value)]


def _is_config(value: Any) -> bool:
    return isinstance(value, sys.modules["transformers.configuration_utils"].PretrainedConfig)


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, sys.modules["transformers.modeling_utils"].PreTrainedModel)
