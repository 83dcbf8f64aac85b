"""Notes of a report about ``packed=True`` for layers that keep their padding: the place, and what to do."""

from __future__ import annotations

from torch import nn

from .functional import WAY
from .report import Report
from .row import ALREADY


def padding_notes(model: nn.Module, report: Report, reasons: dict[str, str] | None) -> list[str]:
    """One note per list of layers that keeps its padding.

    Args:
        model: model after its stacks were packed.
        report: its report; the row of a stack that keeps its padding has a reason.
        reasons: if no stack can skip padding, what to do about lists of layers, by path; else None.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    stacks = [row for row in report.rows if row.is_stack and row.why not in ("", ALREADY)]
    notes = {row.path: (row.was, row.why) for row in stacks}
    for row in report.attention if reasons is not None else ():
        path = _list_around(row.path, modules)
        layers = _layers(modules[path])
        kind = type(layers[0]).__name__
        reason = (reasons or {}).get(path) or f"no list of layers is around it, and {kind} may read padding"
        if row.now in (None, WAY):
            reason = f"the attention of {row.was} is {'not fused' if row.now is None else 'its own code'}"
        if row.now is None or path not in notes:
            notes[path] = f"{len(layers)} {kind}", reason
    said = [f"packed: padding stays in {path or 'the model'} ({was}): {why}" for path, (was, why) in notes.items()]
    return said if said or reasons is None else ["packed: padding stays: no attention was found in this model"]


def _list_around(path: str, modules: dict[str, nn.Module]) -> str:
    """Path of the outermost list of layers of one class around a module; else of the module."""
    names = path.split(".")
    parents = [".".join(names[:count]) for count in range(len(names))]
    return next((parent for parent in parents if len(_layers(modules[parent])) > 1), path)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Layers of a list; any other module itself."""
    layers = list(module.children())
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(layer) for layer in layers}) == 1
    return layers if alike else [module]
