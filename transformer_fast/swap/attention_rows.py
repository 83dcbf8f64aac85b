"""Rows of a report about the modules that attend."""

from __future__ import annotations

import re

from torch import nn

from ..huggingface import interface
from ..layers import torch_modules
from .form import form_of
from .huggingface import Attention
from .rows import ALREADY, OWN_FORWARD, Row
from .swapped import WAY, FunctionalCalls, is_swapped

UNKNOWN = (
    "it keeps its own forward; where its code calls F.scaled_dot_product_attention: accelerate(model, functional=True)"
)
_NAMED = re.compile("attention|attn", re.IGNORECASE)


def attention_rows(model: nn.Module, rows: list[Row], attention: Attention) -> list[Row]:
    """One row per attention module of a swapped model, in order; ``now`` is the way to the kernels, None if there is
    none.

    Attention is a module that looks up transformers' interface, an ``nn.MultiheadAttention``, a module that was swapped
    as attention, and any other module named "attention" without such a module inside.
    """
    reasons = {row.path: row.why for row in rows if row.now is None or row.why}
    parts = {row.path: row.why for row in attention.rows}

    def reason(path: str) -> str:
        why = reasons.get(path, "").partition(";")[0]
        while path not in parts and path:  # the model of transformers around a module
            path = path.rpartition(".")[0]
        if part := parts.get(path):
            return part
        return "an earlier call left it" if why == ALREADY else UNKNOWN if why in ("", OWN_FORWARD) else why

    found: list[Row] = []
    done: str | None = None  # beginning of the paths inside attention that the kernels or torch.nn know
    for path, module in model.named_modules():
        if done is not None and path.startswith(done):
            continue
        kind = type(module)
        now = _way(module, reasons.get(path, ""), attention)
        known = now is not None or isinstance(module, nn.MultiheadAttention) or interface.calls_the_interface(module)
        if not known and not _NAMED.search(kind.__name__):
            continue
        if found and path.startswith(f"{found[-1].path}." if found[-1].path else ""):
            found.pop()  # it was named "attention"; this module inside it attends
        if known:
            done = f"{path}." if path else ""
        elif isinstance(module, FunctionalCalls):
            now = WAY
        of_torch = kind in (nn.MultiheadAttention, torch_modules.MultiheadAttention)
        name = f"nn.{kind.__name__}" if of_torch else kind.__name__
        found.append(Row(path, name, now, reason(path) if now is None else ""))
    return found


def _way(module: nn.Module, why: str, attention: Attention) -> str | None:
    """Way of a module to the kernels; None for any other module."""
    kind, form = type(module), form_of(module)
    if kind is torch_modules.MultiheadAttention:
        return ""
    if isinstance(module, nn.MultiheadAttention):
        return None
    if form is not None and form.attends:
        return "by its structure"
    named = _NAMED.search(kind.__name__)
    if is_swapped(module) and named:
        return "registered"
    if interface.calls_the_interface(module):
        return "through transformers' interface" if id(module) in attention.layers else None
    if why == ALREADY and named and kind.__module__.startswith("transformer_fast."):
        return "of this package"
    return None
