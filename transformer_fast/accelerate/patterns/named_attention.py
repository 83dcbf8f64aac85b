"""Attention whose projections, dropouts and norms have usual names, as in models of vision, of BERT by hand and of
speech.

Names give the roles of the children and of forward's arguments (attention_names.py). What they leave open - heads,
scale, layout, meaning of masks, result - is found by comparing formulas with the module's own on random input
(attention_search.py). The trial then proves the formula, with gradients and dropouts, as for any pattern. Where weights
are asked for, and for a mask of another kind than those compared, the module's own forward runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...dialects.common import leave_weights
from ...layers.attention import attend, packed_attention
from ...layers.dropout import apply_dropout, fused_p
from ...layers.linear import apply_linear, apply_linears
from ...layers.norm import norm_and_sum
from ...layers.padded_calls import StaysPaddedError
from ...layers.token_mask import token_mask
from ...masks import AttentionMask
from ...masks.packing import PackedMask
from .attention import padded_weights
from .attention_names import LAYOUTS, LISTS, Reading, fits, is_default, kind_of, reading_of, scores_of, table_of
from .attention_search import calls_of, search
from .base import Pattern
from .blocks import unsummed
from .d2l import D2lHeads
from .tensorflow import TensorflowLayer

_BEFORE = D2lHeads, TensorflowLayer  # attention of the texts is tried first: it runs packed too


class NamedAttention(Pattern):
    """Multi-head attention with usual names. Without a reading it stands for all such modules."""

    attends = on_tokens = True
    reads = True

    def __init__(self, reading: Reading | None = None) -> None:
        if reading is None:
            super().__init__()
            return
        self.name, self.reading = type(self).__name__, reading
        self.key = self.name, reading
        self.parts = reading.children
        self.weights = (reading.stored,) if reading.stored else ()
        self.dropouts = (reading.probability,) if reading.probability else ()
        self._masks = {kind: rest for kind, *rest in reading.masks}
        self._names = dict(reading.parts)

    def matches(self, m: Any) -> bool:
        reading = reading_of(m)
        return reading is not None and pattern_of_reading(reading).members(m) is not None

    def read(self, trial: nn.Module) -> Pattern | None:
        reading = reading_of(trial)
        found = None if reading is None else search(trial, reading, pattern_of_reading)
        return None if found is None else pattern_of_reading(found)

    def of(self, reading: Reading) -> Pattern:
        return pattern_of_reading(reading)

    def calls(self, m: Any) -> Iterable[tuple[Any, ...]]:
        return calls_of(m, self.reading)

    def fused_forward(self, m: Any, *args: Any) -> Any:
        reading = self.reading
        if len(args) < reading.required:
            return None
        args = (*args, *reading.defaults[len(args) :])
        if not all(is_default(*pair) for place, pair in enumerate(zip(args, reading.defaults, strict=True))
                   if place not in reading.places):  # fmt: skip
            return None
        query, key, value, mask, flag = (None if place < 0 else args[place] for place in reading.places)
        axes = LAYOUTS[reading.layout]
        if flag or not isinstance(query, Tensor) or query.dim() != axes:
            return None
        if axes == 4:
            if key is not None or value is not None or mask is not None:
                return None
            leading = query.shape[: 2 if reading.layout == "(B, N, L, d)" else 1]
            flat = query.flatten(0, 1) if len(leading) == 2 else query.flatten(1, 2)
            out = self._output(m, flat, self._attend(m, *self._heads(m, flat, None, None), *self._unmasked(m)))
            return out.unflatten(0, leading) if len(leading) == 2 else out.unflatten(1, query.shape[1:3])
        if any(t is not None and not (isinstance(t, Tensor) and t.dim() == axes) for t in (key, value)):
            return None
        length, batch = (0, 1) if reading.layout == "(L, B, d)" else (1, 0)
        given = [t for t in (query, key, value) if t is not None]
        sequences = query.shape[batch]
        if any(t.shape[batch] != sequences for t in given):  # broadcast by the module's own code
            return None
        keys = given[min(1, len(given) - 1)].shape[length]
        if mask is not None and not self._knows(mask, query, sequences, query.shape[length], keys):
            return None  # before a child is called
        q, k, v = self._heads(m, query, key, value)
        mask = token_mask(mask, *(t.transpose(1, 2) for t in (q, k, v)))
        if isinstance(mask, PackedMask):
            return self._output(m, query, self._attend_on_tokens(m, q, k, v, mask))
        return self._output(m, query, self._attend(m, q, k, v, *self._meaning(m, mask, q.shape[1])))

    def _knows(self, mask: Any, query: Tensor, batch: int, queries: int, keys: int) -> bool:
        """Return True for a mask whose meaning was read."""
        if not isinstance(mask, Tensor) or (known := self._masks.get(kind_of(mask))) is None:
            return False
        if not fits(mask, known[1], batch, queries, keys):
            return False
        return known[0] != "added" or mask.dtype in (query.dtype, torch.float32)

    def _heads(self, m: Any, query: Tensor, key: Tensor | None, value: Tensor | None) -> list[Tensor]:
        """Queries, keys and values (B, heads, L, d)."""
        reading, names = self.reading, self._names
        key = query if key is None else key
        value = key if value is None else value
        if "norm" in names and not reading.residual:
            normed = getattr(m, names["norm"])(query)
            if key is query:
                key = value = normed
            elif reading.norms_memory:
                key = value = getattr(m, names["norm"])(key)
            query = normed
        if "memory_norm" in names:
            key = value = getattr(m, names["memory_norm"])(key)
        linears = [getattr(m, name) for name in reading.linears]
        linears = list(linears[0])[:3] if reading.linears[0] in LISTS else linears
        if len(linears) == 1:
            axis, order = reading.order.index("3") - 3, [reading.heads if axis == "h" else -1 for axis in reading.order]
            order[axis] = 3
            split = list(apply_linear(linears[0], query).unflatten(-1, order).unbind(axis))
        else:
            made = apply_linears(linears, (query, key, value)[: len(linears)])
            made = [made[0], *made[1].chunk(2, -1)] if len(made) == 2 else made
            width = made[0].shape[-1] // reading.heads
            split = [t.unflatten(-1, (-1, width)) for t in made[:2]]
            split.append(made[2].unflatten(-1, (split[1].shape[-2], -1)))
        heads = [t.permute(1, 2, 0, 3) if reading.layout == "(L, B, d)" else t.transpose(1, 2) for t in split]
        for place, role in enumerate(("q_norm", "k_norm")):
            if role in names:
                heads[place] = getattr(m, names[role])(heads[place])
        return heads

    def _unmasked(self, m: Any) -> tuple[int, Tensor | None, None, str]:
        return 1, table_of(m) if self.reading.table else None, None, "zero"

    def _meaning(self, m: Any, mask: Any, heads: int) -> tuple[int, Tensor | None, AttentionMask | None, str]:
        """Number of windows, bias, keep mask, and result of a query without a key."""
        unmasked = self._unmasked(m)
        if mask is None:
            return unmasked
        (meaning, axis, empty), bias = self._masks[kind_of(mask)], unmasked[1]
        meant = scores_of(mask, meaning, axis)
        if isinstance(meant, AttentionMask):
            return 1, bias, meant, "uniform" if empty == "uniform" else "zero"
        meant = meant if bias is None else meant + bias
        if axis != "windows":
            return 1, meant, None, "zero"
        return meant.shape[0], meant.expand(-1, heads, -1, -1).flatten(0, 1).unsqueeze(0), None, "zero"

    def _attend(
        self, m: Any, q: Tensor, k: Tensor, v: Tensor, windows: int, bias: Tensor | None, keep: Any, empty: str
    ) -> Tensor:
        """Attend, (B, L, heads * d); windows of a batch are computed as heads."""
        reading, names = self.reading, self._names
        if windows > 1:
            q, k, v = (t.unflatten(0, (-1, windows)).flatten(1, 2) for t in (q, k, v))
        options: dict[str, Any] = {"scale": reading.scale, "empty_rows": empty}
        if reading.probability:
            p = float(getattr(m, reading.probability)) if m.training else 0.0
            out = ops.attention(q, k, v, keep, bias=bias, dropout_p=p, **options)
        else:
            drop = m._modules[names["dropout"]] if "dropout" in names else None
            out = attend(None if isinstance(drop, nn.Identity) else drop, q, k, v, keep, bias=bias, **options)
        if reading.stored:

            def weights(q: Tensor, k: Tensor, *bias: Tensor) -> Tensor:
                added = bias[0] if bias else None
                made = ops.attention(q, k, k, keep, bias=added, return_weights=True, **options)[1]
                return made.unflatten(1, (windows, -1)).flatten(0, 1) if windows > 1 else made

            leave_weights(m, weights, q, k, *(() if bias is None else (bias,)))
        if windows > 1:
            out = out.unflatten(1, (windows, -1)).flatten(0, 1)
        return self._merged(out)

    def _attend_on_tokens(self, m: Any, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> Tensor:
        """Attend with the tokens of a layer without padding (1, heads, T, d); result as of :meth:`_attend`."""
        reading, names = self.reading, self._names
        if reading.table:
            raise StaysPaddedError("its attention has a bias by distance")
        if reading.probability:
            p: float | None = float(getattr(m, reading.probability)) if m.training else 0.0
        else:
            p = fused_p(m._modules[names["dropout"]]) if "dropout" in names else 0.0
        if p is None:
            raise StaysPaddedError("its dropout of weights is of another class")
        if reading.stored:
            leave_weights(m, lambda q, k: padded_weights(q, k, mask, scale=reading.scale), q, k)
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        return self._merged(packed_attention(q, k, v, mask, scale=reading.scale, dropout_p=p)[None].transpose(1, 2))

    def _merged(self, heads: Tensor) -> Tensor:
        """Heads (B, heads, L, d) side by side, in the layout of the inputs."""
        return (heads.permute(2, 0, 1, 3) if self.reading.layout == "(L, B, d)" else heads.transpose(1, 2)).flatten(2)

    def _output(self, m: Any, query: Tensor, out: Tensor) -> Any:
        """Result of the module."""
        reading, names = self.reading, self._names
        if reading.linears[0] in LISTS and len(m._modules[reading.linears[0]]) == 4:
            out = apply_linear(m._modules[reading.linears[0]][3], out)
        if "out" in names:
            out = apply_linear(getattr(m, names["out"]), out)
        drop = getattr(m, names["out_dropout"]) if "out_dropout" in names else 0.0
        if reading.residual:
            out = norm_and_sum(getattr(m, names["norm"]), unsummed(query, out, drop))[0]
        else:
            out = apply_dropout(drop, out) if drop else out
        return {"tensor": out, "one": (out,), "none": (out, None)}[reading.returned]


pattern_of_reading = functools.cache(NamedAttention)

PATTERNS = (NamedAttention(),)
KNOWS = (
    (
        "attention: `to_qkv`, or `to_q` and `to_kv`, `attend`, `to_out`; `qkv`, `attn_drop`, `proj`, `proj_drop`, "
        "with a bias by relative position or without",
        "vit-pytorch, perceiver, older timm, Swin",
    ),
    (
        "attention: three linear layers, such as `query`, `key`, `value`; `linear_q`...; `q_proj`...; `q_layer`..., "
        "over masks that keep, block or are added",
        "BERT by hand, ESPnet, JoeyNMT, RecBole",
    ),
)
