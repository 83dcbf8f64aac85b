"""Ops that stay torch's on a device, in modules that ``accelerate`` swaps."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.attention_call import MAX_TRITON_HEAD_DIM

ON_GPU = {
    "attention": "",
    "cross_entropy": "",
    "dropout": "dropout alone is not measured on a GPU, and its launch takes the host longer than torch's",
    "embedding": "",
    "norm": "",
}
"""Reason to leave an op to torch on a GPU, by op; "" for an op that was measured there (docs/results/gpu.md)."""

_HEAD_DIMS = (
    "head_dim", "attention_head_size", "head_size", "qk_head_dim", "k_head_dim", "v_head_dim", "values_head_dim",
    "attention_head_dim", "key_value_proj_dim", "dim_head", "d_k",
)  # fmt: skip
"""Attributes that hold the head_dim of an attention, in torch, transformers and hand-written modules."""


def left_to_torch(op: str, device: torch.device, within: nn.Module | None = None) -> str:
    """Reason to leave an op to torch on a device, or "".

    Args:
        op: as ``backends.choose`` takes it.
        device: device of the tensors or of the parameters.
        within: module whose attention the op computes; its heads may be too large for the kernels.
    """
    kind = device.type
    if kind == "cpu":
        return ""
    if kind == "meta":
        return "it is on the meta device; move it to its device before accelerate"
    if kind != "cuda":
        return f"no kernel here: there are no kernels for {kind} devices"
    if op == "attention" and within is not None and (head_dim := _head_dim(within)) > MAX_TRITON_HEAD_DIM:
        return f"its head_dim is {head_dim}, and the kernels take up to {MAX_TRITON_HEAD_DIM} on a GPU"
    return ON_GPU[op]


def _head_dim(module: nn.Module) -> int:
    found = (vars(part).get(name) for part in module.modules() for name in _HEAD_DIMS)
    return max((value for value in found if type(value) is int), default=0)
