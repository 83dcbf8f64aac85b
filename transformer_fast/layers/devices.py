"""Ops that stay torch's on a device, in modules that ``accelerate`` swaps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import backends
from ..masks import AttentionMask
from ..masks.arguments import parts_beside
from ..ops.attention_call import MAX_TRITON_HEAD_DIM
from ..ops.token_mask import call_on_tokens

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


def attends_by_torch(
    query: Tensor, mask: AttentionMask | Tensor | None, bias: Tensor | None = None, dropout_p: float = 0.0
) -> bool:
    """Return True for a call of attention that is left to torch: on a GPU, with neither mask nor dropout.

    cuDNN is 1.2 to 1.8 times as fast there (docs/results/gpu.md). A look-ahead mask alone is torch's ``is_causal``. A
    backend that was chosen by name computes every call. In a layer on tokens each call has the boundaries as a mask.
    """
    if not query.is_cuda or dropout_p != 0.0 or bias is not None or call_on_tokens() is not None:
        return False
    if backends.current() != "auto":
        return False
    if isinstance(mask, AttentionMask):
        return mask.causal_offset in (None, 0) and not parts_beside(mask, "causal_offset")
    return mask is None


def _head_dim(module: nn.Module) -> int:
    found = (vars(part).get(name) for part in module.modules() for name in _HEAD_DIMS)
    return max((value for value in found if type(value) is int), default=0)
