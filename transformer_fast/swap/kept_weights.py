"""``accelerate(model, keep_weights=True)``: linear layers with kept copies of their weights."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from .. import extension
from ..huggingface.blocks import TransposedLinear
from ..inference.prepacked import forget_kept
from ..layers.linear import Linear
from ..layers.torch_modules import MultiheadAttention
from ..ops.weight_layout import LAYOUT, WeightLayout
from .report import Attribute, Report
from .rows import ALREADY, Row

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
    if reason := extension.module_obstacle():
        report.notes.append(f"keep_weights: {reason}")
        return
    kept = {path: module for path, module in model.named_modules() if takes_layout(module)}
    for path, module in kept.items():
        give_one_layout(report, path, module, layout, NAME)
    report.plain += type(report.plain)()  # without the layers that were counted and are no longer plain
    if not kept:
        report.notes.append("keep_weights: no linear layer in float32 or bfloat16 on a CPU was found")


def give_one_layout(report: Report, path: str, module: nn.Module, layout: WeightLayout, name: str) -> None:
    """Give a layer a layout, and note that in the report, with the layout's name."""
    if module.__dict__.get(LAYOUT) == layout:
        return
    report._apply(Kept(module, LAYOUT, layout))
    row = next((row for row in report.rows if row.path == path), None)
    if row is None:
        report.rows.append(row := Row(path, f"nn.{type(module).__name__}", None))
        report.plain["Linear"] -= 1
    now = name if row.now is None else f"{row.now}, {name}"
    changed = dataclasses.replace(row, now=now, why="" if row.why == ALREADY else row.why)
    report.rows[report.rows.index(row)] = changed


def takes_layout(module: nn.Module) -> bool:
    """Return True if a module, or the fused module around it, multiplies by a layout."""
    if not isinstance(module, Linear | MultiheadAttention | TransposedLinear) and type(module) is not nn.Linear:
        return False
    weights = [p for p in module._parameters.values() if p is not None]
    known = not any(isinstance(p, UninitializedParameter) for p in weights)
    return bool(weights) and known and all(p.device.type == "cpu" and p.dtype in _TYPES for p in weights)
