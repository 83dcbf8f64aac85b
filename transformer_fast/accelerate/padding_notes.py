"""Notes of a report about ``packed=True`` for a model that keeps its padding: the layers, and the reasons."""

from __future__ import annotations

from torch import nn

from .functional import WAY
from .row import Row


def padding_notes(model: nn.Module, attention: list[Row], reasons: dict[str, str]) -> list[str]:
    """One note per list of layers with attention.

    Args:
        model: any model without a stack that can skip padding.
        attention: its attention modules.
        reasons: why lists of layers keep their padding, by path.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: dict[str, list[Row]] = {}
    for row in attention:
        groups.setdefault(_list_around(row.path, modules), []).append(row)
    notes = []
    for path, rows in groups.items():
        layers = _layers(modules[path])
        kind = type(layers[0]).__name__
        not_fused = next((row for row in rows if row.now is None), None)
        if rows[0].now == WAY:
            reason = f"the attention of {rows[0].was} is its own code"
        elif not_fused is not None:
            reason = f"the attention of {not_fused.was} is not fused"
        else:
            reason = reasons.get(path) or f"no list of layers is around it, and {kind} may read padding"
        notes.append(f"packed: padding stays in {path or 'the model'} ({len(layers)} {kind}): {reason}")
    return notes or ["packed: padding stays: no attention was found in this model"]


def _list_around(path: str, modules: dict[str, nn.Module]) -> str:
    """Path of the outermost list of layers of one class around a module; else of the module."""
    names = path.split(".")
    parents = [".".join(names[:count]) for count in range(len(names))]
    return next((parent for parent in parents if len(_layers(modules[parent])) > 1), path)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Layers of a list; any other module itself."""
    layers = list(module.children())
    if isinstance(module, nn.ModuleList | nn.Sequential) and layers and len({type(layer) for layer in layers}) == 1:
        return layers
    return [module]
