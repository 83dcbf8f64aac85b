"""``torch.nn.functional.scaled_dot_product_attention`` in the modules of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import ops
from ..layers.devices import left_to_torch
from ..ops.scaled_dot_product_attention import TORCH

NAME = "tfast.scaled_dot_product_attention"


def scaled_dot_product_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of accelerated modules: our function on a CPU and on a GPU, torch's function on other devices.

    Our function gives calls to torch that its kernels do not take. Both functions have the same arguments.
    """
    ours = isinstance(query, Tensor) and not left_to_torch("attention", query.device)
    return (ops.scaled_dot_product_attention if ours else TORCH)(query, *args, **kwargs)
