"""``torch.nn.functional.scaled_dot_product_attention`` in the modules of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import ops
from ..ops.scaled_dot_product_attention import TORCH

NAME = "tfast.scaled_dot_product_attention"


def scaled_dot_product_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of accelerated modules: our function on a CPU, torch's function on other devices.

    Ours is faster on a CPU (docs/accelerate.md has the measurements). Other devices were not measured yet. Both
    functions have the same arguments.
    """
    attend = ops.scaled_dot_product_attention if isinstance(query, Tensor) and query.device.type == "cpu" else TORCH
    return attend(query, *args, **kwargs)
