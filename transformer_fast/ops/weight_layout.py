"""Layout of the weights of a module in evaluation; :mod:`transformer_fast.inference` has the products."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

LAYOUT = "_transformer_fast_layout"
"""Attribute of a module whose products, in evaluation, run on kept copies of its weights: a `WeightLayout`."""
FREED = "_transformer_fast_freed"
"""Attribute of a layer whose fp32 weights are freed: a `FreedWeights` of :mod:`transformer_fast.inference.int8`."""


class WeightLayout(NamedTuple):
    """Layout of the copies of weights: `GenerationConfig.quantize` and `GenerationConfig.keep_weights`."""

    quantize: str | None = None
    keep: bool = False


AS_IT_IS = WeightLayout()
"""Layout without quantising and keeping: copied for one call, in the weight's own dtype."""


def has_int8(module: nn.Module) -> bool:
    """Return True for a module whose products are those of int8 weights."""
    layout = module.__dict__.get(LAYOUT)
    return layout is not None and layout.quantize is not None
