"""Rows and notes of a report: the modules that attend, and the layers that keep their padding."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ..huggingface import interface
from ..layers import torch_modules
from .form import form_of
from .huggingface import Attention
from .report import Report
from .rows import ALREADY, OWN_FORWARD, Row
from .swapped import WAY, FunctionalCalls, is_swapped

UNKNOWN = (
    "it keeps its own forward; where its code calls F.scaled_dot_product_attention: accelerate(model, functional=True)"
)
_NAMED = re.compile("attention|attn", re.IGNORECASE)


def attention_rows(model: nn.Module, rows: list[Row], attention: Attention) -> list[Row]:
    """One row per attention module, in order; ``now`` is the way to the kernels, None if there is none.

    Attention is a module that looks up transformers' interface, an ``nn.MultiheadAttention``, a module that was swapped
    as attention, and any other module named "attention" without such a module inside.

    Args:
        model: model after its modules were swapped.
        rows: rows of the report so far.
        attention: outcome for transformers' attention interface.
    """
    return list(_Search(rows, attention).inside(model, ""))


class _Search:
    def __init__(self, rows: list[Row], attention: Attention) -> None:
        self.reasons = {row.path: row.why for row in rows if row.now is None or row.why}
        self.parts = {row.path: row.why for row in attention.rows}
        self.attention = attention
        self.seen: set[int] = set()

    def inside(self, module: nn.Module, path: str) -> Iterator[Row]:
        """Rows of a module and of the modules inside it."""
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        own = self._row(module, path)
        if own is not None:
            yield own
            return
        found = False
        for name, child in module._modules.items():
            if child is not None:
                for row in self.inside(child, f"{path}.{name}" if path else name):
                    found = True
                    yield row
        if not found and _NAMED.search(name := type(module).__name__):
            functional = isinstance(module, FunctionalCalls)
            yield Row(path, name, WAY if functional else None, "" if functional else self._reason(path))

    def _row(self, module: nn.Module, path: str) -> Row | None:
        name, why = type(module).__name__, self.reasons.get(path, "")
        if type(module) is torch_modules.MultiheadAttention:
            return Row(path, f"nn.{name}", "")
        if isinstance(module, nn.MultiheadAttention):
            return Row(path, f"nn.{name}" if type(module) is nn.MultiheadAttention else name, None, self._reason(path))
        form = form_of(module)
        if form is not None and form.attends:
            return Row(path, name, "by its structure")
        if is_swapped(module) and _NAMED.search(name):
            return Row(path, name, "registered")
        if interface.calls_the_interface(module):
            if id(module) in self.attention.layers:
                return Row(path, name, "through transformers' interface")
            return Row(path, name, None, self._part(path))
        ours = type(module).__module__.startswith("transformer_fast.")
        if why == ALREADY and ours and _NAMED.search(name):
            return Row(path, name, "of this package")
        return None

    def _part(self, path: str) -> str:
        """Reason of the model of transformers around a module."""
        while path not in self.parts and path:
            path = path.rpartition(".")[0]
        return self.parts.get(path, "")

    def _reason(self, path: str) -> str:
        why = self.reasons.get(path, "").partition(";")[0]
        if why == ALREADY:
            return "an earlier call left it"
        return self._part(path) or (UNKNOWN if why in ("", OWN_FORWARD) else why)


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
