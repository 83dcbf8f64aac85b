"""Rows of a report about attention: the modules of a model that attend, and whether the kernels compute them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ..integrations import interface
from ..layers import torch_modules
from ..swap.form import form_of
from .functional import WAY, FunctionalCalls
from .huggingface import Attention
from .registered import is_swapped
from .row import ALREADY, OWN_FORWARD, Row

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
