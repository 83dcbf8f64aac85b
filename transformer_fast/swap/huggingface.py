"""Attention of Hugging Face transformers models, redirected to our kernels through transformers' attention interface.

The config of a layer names its attention implementation. Many modules, and other models, may share one config. So the
modules of a model get copies of their configs, and only the copies name our implementation. Other models are not
affected. A copy names the variant whose masks are those of the former implementation: modules that do not use our
attention, also ones put in later, get the mask that the plain model gives them.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..huggingface import attention as integration
from ..huggingface import interface
from ..huggingface.interface import NAME, NAMES, is_ours
from .report import Attribute
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
        calls: True if one of its layers calls transformers' attention interface.
        obstacle: reason to keep its implementation, or "".
        always: configs, by id, of models whose code asks for "sdpa" by name, to know that a mask may be left out. Under
            another name it takes a missing mask for one that is not needed, so these models always get a mask.
    """

    path: str
    module: nn.Module
    modules: list[nn.Module]
    configs: dict[int, Any]
    calls: bool = False
    obstacle: str = ""
    always: set[int] = dataclasses.field(default_factory=set)

    @property
    def implementations(self) -> set[Any]:
        return {config._attn_implementation for config in self.configs.values()}

    def name_for(self, config: Any) -> str:
        """Name of our attention in place of a config's implementation."""
        return NAME if id(config) in self.always else NAMES[config._attn_implementation]

    def row(self) -> Row | None:
        """Row of the report; None for a model without attention through the interface."""
        if not self.calls and not self.obstacle:
            return None
        used = ", ".join(sorted(map(str, self.implementations)))
        was = f"{type(self.module).__name__} ({used})"
        names = sorted({self.name_for(c) for c in self.configs.values() if c._attn_implementation in NAMES})
        now = f"attn_implementation={', '.join(names)}"
        return Row(self.path, was, None if self.obstacle else now, self.obstacle)


@dataclasses.dataclass
class Attention:
    """Result of redirecting the attention of a model.

    Attributes:
        rows: rows of the report.
        parts: modules that have a row, by id.
        layers: modules that call our attention through the interface, by id.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    parts: set[int] = dataclasses.field(default_factory=set)
    layers: set[int] = dataclasses.field(default_factory=set)


def give_attention(model: nn.Module, obstacle: Callable[[nn.Module], str], changes: list[Any]) -> Attention:
    """Make the transformers models inside ``model`` use our attention, except those with an obstacle.

    Args:
        model: any module; without a model or a layer of transformers inside, nothing changes.
        obstacle: function that returns why the kernels do not serve a part on its device, or "".
        changes: list to which each :class:`~.report.Attribute` is added before the change is made.
    """
    done = Attention()
    parts = list(_parts(model))
    always = {key for part in parts if interface.asks_for_sdpa(part.modules) for key in part.configs}
    for part in parts:
        part.always = always
        _set_obstacle(part, obstacle)
    _share_obstacles(parts)
    ours = [part for part in parts if not part.obstacle]
    if any(part.calls for part in ours):
        try:
            integration.register()
        except ImportError as error:
            for part in ours:
                part.obstacle = str(error) if part.calls else ""
            ours = []
    for part in parts:
        if (row := part.row()) is not None:
            done.rows.append(row)
            done.parts.add(id(part.module))
        if part.calls and part.obstacle in ("", ALREADY):
            done.layers.update(id(m) for m in part.modules if interface.calls_the_interface(m))
    if any(part.calls for part in ours):
        for change in _changes(model, parts):
            changes.append(change)
            change.apply()
    return done


def _set_obstacle(part: Part, obstacle: Callable[[nn.Module], str]) -> None:
    part.calls = any(map(interface.calls_the_interface, part.modules))
    others = {name for name in part.implementations if not is_ours(name)} - {*NAMES, None}
    if not part.calls:
        own = any(m is not part.module and interface.folder_of(type(m)) for m in part.modules)
        refused = own and _is_model(part.module) and not interface.can_use(type(part.module))
        part.obstacle = interface.OWN_ATTENTION if refused else ""
    elif all(map(is_ours, part.implementations)):
        part.obstacle = ALREADY
    elif others:
        part.obstacle = f'attn_implementation="{min(others)}" was chosen for it'
    elif any(getattr(config, "output_attentions", False) for config in part.configs.values()):
        part.obstacle = WEIGHTS
    else:
        part.obstacle = obstacle(part.module) or interface.lacks(part.modules)


def _share_obstacles(parts: list[Part]) -> None:
    """Give parts that share a config the same obstacle, because they share the implementation."""
    again = True
    while again:
        again = False
        stays = {key: part for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
        for part in parts:
            if part.calls and not part.obstacle and (shared := part.configs.keys() & stays.keys()):
                other = stays[min(shared)]
                part.obstacle = f"it shares its config with {other.path or 'the model'}, which stays: {other.obstacle}"
                again = True


def _changes(model: nn.Module, parts: list[Part]) -> list[Any]:
    """Copy the config of each module, and name our attention in the copies of parts that may use it."""
    stays = {key for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
    memo: dict[int, Any] = {}
    changes: list[Any] = [
        Attribute(m, name, copy.deepcopy(old, memo)) for m in model.modules() for name, old in _configs_in(m)
    ]
    changes += [Attribute(m, MARK, _INTERFACE) for m in model.modules() if _configs_in(m)]
    # The config of a part without attention of its own names our attention if all parts inside use it.
    ours = [part for part in parts if not part.obstacle and (part.calls or not stays)]
    todo = [(config, part) for part in ours for config in part.configs.values()]
    for config, part in todo:  # the loop adds the configs inside these configs
        if id(config) not in stays:
            if config._attn_implementation in NAMES:
                memo[id(config)]._attn_implementation_internal = part.name_for(config)
            stays.add(id(config))
            todo.extend((inner, part) for inner in vars(config).values() if _is_config(inner))
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
