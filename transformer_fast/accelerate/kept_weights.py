"""``accelerate(model, keep_weights=True)``: linear layers with kept copies of their weights."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from .. import extension
from ..layers.linear import Linear
from ..layers.prepacked import LAYOUT, WeightLayout, forget_kept
from ..layers.torch_modules import MultiheadAttention
from .patterns.base import pattern_of
from .patterns.linear import TransposedLinear
from .report import ALREADY, Attribute, Report, Row

NAME = "kept weights"
_TYPES = (torch.float32, torch.bfloat16)


class Kept(Attribute):
    """The layout of a module, as a change of ``accelerate``."""

    def undo(self) -> None:
        """Remove the layout, and free the copies."""
        super().undo()
        forget_kept(self.module)


def give_layout(model: nn.Module, report: Report, layout: WeightLayout) -> None:
    """Give each linear layer of a model on a CPU a layout, and note that in the report."""
    rows = {row.path: place for place, row in enumerate(report.rows)}
    kept = {path: module for path, module in model.named_modules() if takes_layout(module)}
    for path, module in kept.items():
        if module.__dict__.get(LAYOUT) == layout:
            continue
        report._changes.append(change := Kept(module, LAYOUT, layout))
        change.put()
        row = report.rows[rows[path]] if path in rows else Row(path, f"nn.{type(module).__name__}", None)
        now = NAME if row.now is None else f"{row.now}, {NAME}"
        row = dataclasses.replace(row, now=now, why="" if row.why == ALREADY else row.why)
        if path in rows:
            report.rows[rows[path]] = row
        else:
            report.rows.append(row)
            report.plain["Linear"] -= 1
    report.plain += type(report.plain)()  # without the layers that were counted and are no longer plain
    if reason := extension.obstacle():
        report.notes.append(f"keep_weights: {reason}")
    elif not kept:
        report.notes.append("keep_weights: no linear layer in float32 or bfloat16 on a CPU was found")


def takes_layout(module: nn.Module) -> bool:
    """Return True if a module, or the fused module around it, multiplies by a layout."""
    ours = isinstance(module, Linear | MultiheadAttention) or type(module) is nn.Linear
    if not ours and not isinstance(pattern_of(module), TransposedLinear):
        return False
    weights = [p for p in module._parameters.values() if p is not None]
    return bool(weights) and all(_is_kept(p) for p in weights)


def _is_kept(parameter: nn.Parameter) -> bool:
    usual = not isinstance(parameter, UninitializedParameter) and parameter.device.type == "cpu"
    return usual and parameter.dtype in _TYPES
