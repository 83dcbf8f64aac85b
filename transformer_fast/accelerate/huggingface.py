"""Models of Hugging Face transformers: their attention runs on ours, through transformers' own interface.

Which implementation a layer calls stands in its config. One config may be held by many modules, and by other models. So
the modules of a model get copies of their configs, and the name is set in these: it holds inside of this model alone.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..integrations import dispatch
from ..integrations import transformers as integration
from .report import ALREADY, Attribute, Row

NOW = f"attn_implementation={integration.NAME}"
_REPLACED = ("eager", "sdpa")
"""Implementations that ours stands for; one of another name was chosen by somebody."""


@dataclasses.dataclass
class Part:
    """A model of transformers, with the modules that belong to no model inside it.

    Attributes:
        configs: those that its modules hold, by id.
        calls: whether one of its layers calls transformers' attention interface.
        obstacle: why it keeps its implementation; empty where it need not.
    """

    path: str
    module: nn.Module
    modules: list[nn.Module]
    configs: dict[int, Any]
    calls: bool = False
    obstacle: str = ""

    @property
    def implementations(self) -> set[Any]:
        return {config._attn_implementation for config in self.configs.values()}

    @property
    def kinds(self) -> list[type[nn.Module]]:
        """The classes of its layers."""
        return list(dict.fromkeys(type(m) for m in self.modules if m is not self.module or not _is_model(m)))

    def row(self) -> Row | None:
        """Row of the report; None for a model without such attention."""
        if not self.calls and not self.obstacle:
            return None
        used = ", ".join(sorted(map(str, self.implementations)))
        was = f"{type(self.module).__name__} ({used})"
        return Row(self.path, was, None if self.obstacle else NOW, self.obstacle)


@dataclasses.dataclass
class Attention:
    """Result for the attention of a model.

    Attributes:
        rows: for the report.
        parts: the modules that have a row, by id.
        layers: the modules that call our attention through the interface, by id.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    parts: set[int] = dataclasses.field(default_factory=set)
    layers: set[int] = dataclasses.field(default_factory=set)


def give_attention(model: nn.Module, obstacle: Callable[[nn.Module], str], changes: list[Any]) -> Attention:
    """Make the models of transformers in ``model`` use our attention, each unless it would be refused.

    Args:
        model: any module; one without a model of transformers, or a layer of one, stays as it is.
        obstacle: why the kernels do not serve a part where it is; empty where they do.
        changes: to which each :class:`~.report.Attribute` is added before it is made.
    """
    done = Attention()
    parts = list(_parts(model))
    for part in parts:
        _judge(part, obstacle)
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
            done.layers.update(id(m) for m in part.modules if dispatch.calls_the_interface(type(m)))
    if any(part.calls for part in ours):
        changes += _changes(model, parts)
        for change in changes:
            change.put()
        for part in ours:
            dispatch.prepare(part.kinds, {integration.NAME})
            # The part around a model that stays holds the same config, and is no word on that model.
            if _is_model(part.module) and part.module.config._attn_implementation == integration.NAME:
                dispatch.mark(type(part.module), part.module.config)
    return done


def _judge(part: Part, obstacle: Callable[[nn.Module], str]) -> None:
    kinds = part.kinds
    part.calls = any(map(dispatch.calls_the_interface, kinds))
    others = part.implementations - {*_REPLACED, integration.NAME, None}
    refused = dispatch.obstacle(type(part.module), kinds, integration.SPARSE)
    if not part.calls:
        part.obstacle = refused if _is_model(part.module) else ""
    elif part.implementations == {integration.NAME}:
        part.obstacle = ALREADY
    elif others:
        part.obstacle = f'attn_implementation="{min(others)}" was chosen for it'
    else:
        part.obstacle = obstacle(part.module) or refused


def _share_obstacles(parts: list[Part]) -> None:
    """Parts that hold one config have one implementation."""
    again = True
    while again:
        again = False
        stays = {key: part for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
        for part in parts:
            if part.calls and not part.obstacle and (shared := part.configs.keys() & stays.keys()):
                other = stays[min(shared)]
                part.obstacle = f"it shares its config with {other.path or 'the model'}, which stays: {other.obstacle}"
                again = True


def _changes(model: nn.Module, parts: list[Part]) -> list[Attribute]:
    """Copy the config of each module. In the copies of parts that may use our attention, its name is set."""
    stays = {key for part in parts if part.obstacle not in ("", ALREADY) for key in part.configs}
    memo: dict[int, Any] = {}
    changes = [Attribute(m, name, copy.deepcopy(old, memo)) for m in model.modules() for name, old in _held(m)]
    # A part without attention of its own, which holds others, says what they all use.
    todo = [c for part in parts if not part.obstacle and (part.calls or not stays) for c in part.configs.values()]
    for config in todo:  # it grows by the configs inside of them
        if id(config) not in stays:
            if config._attn_implementation in _REPLACED:
                memo[id(config)]._attn_implementation_internal = integration.NAME
            stays.add(id(config))
            todo.extend(filter(_is_config, vars(config).values()))
    return changes


def _parts(model: nn.Module) -> Iterator[Part]:
    """The models of transformers in ``model``, and what holds them or is a piece of one, if it has a config."""
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
        configs = {id(config): config for module in modules for _, config in _held(module)}
        if configs:
            yield Part(paths[id(root)], root, modules, configs)


def _held(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module that are configs of transformers."""
    return [(name, value) for name, value in module.__dict__.items() if _is_config(value)]


def _is_config(value: Any) -> bool:
    return isinstance(value, sys.modules["transformers.configuration_utils"].PretrainedConfig)


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, sys.modules["transformers.modeling_utils"].PreTrainedModel)
