"""``torch.nn.functional.scaled_dot_product_attention`` in the modules of a model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import ops
from ..layers.attention import packed_attention
from ..layers.devices import left_to_torch
from ..layers.padded_calls import StaysPaddedError
from ..layers.token_mask import OnTokens, call_on_tokens, token_mask
from ..ops.scaled_dot_product_attention import TORCH

NAME = "tfast.scaled_dot_product_attention"


def scaled_dot_product_attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of accelerated modules: our function on a CPU and on a GPU, torch's function on other devices.

    Our function gives calls to torch that its kernels do not take. Both functions have the same arguments.
    """
    if (call := call_on_tokens()) is not None:
        return _on_tokens(call, query, *args, **kwargs)
    ours = isinstance(query, Tensor) and not left_to_torch("attention", query.device)
    return (ops.scaled_dot_product_attention if ours else TORCH)(query, *args, **kwargs)


def _on_tokens(
    call: OnTokens,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend inside a layer that computes tokens alone: (1, heads, T, d) -> (1, heads, T, d)."""
    if is_causal or not query.dim() == key.dim() == value.dim() == 4:
        raise StaysPaddedError("its attention has a mask that is not padding alone")
    token_mask(attn_mask, *(t.transpose(1, 2) for t in (query, key, value)))
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    return packed_attention(q, k, v, call.mask, scale=scale, dropout_p=dropout_p).transpose(0, 1).unsqueeze(0)
