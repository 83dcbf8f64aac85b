"""The table of swaps of ``torch.nn``: the class that each module gets, and the reason to leave it.

Hand-written modules are recognised by their names: see forms.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from ..layers import torch_modules, torch_stacks
from ..layers.dropout import Dropout


def _norm_obstacle(module: nn.LayerNorm | nn.RMSNorm) -> str:
    dimensions = len(module.normalized_shape)
    return "" if dimensions == 1 else f"it normalises {dimensions} dimensions, the kernel only the last one"


def _embedding_obstacle(module: nn.Embedding) -> str:
    used = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
    return f"it uses {', '.join(used)}, which the kernel does not have" if used else ""


def _attention_obstacle(module: nn.MultiheadAttention) -> str:
    if module.bias_k is not None:
        return "it uses add_bias_kv, which the kernel does not have"
    return "it uses add_zero_attn, which the kernel does not have" if module.add_zero_attn else ""


def _dropout_obstacle(module: nn.Dropout) -> str:
    return "it works in place, which the kernel does not" if module.inplace else ""


def _stack_obstacle(module: nn.Module) -> str:
    if not isinstance(module.layers, nn.ModuleList) or len(module.layers) == 0:
        return "it has no nn.ModuleList of layers"
    heads = {getattr(getattr(layer, "self_attn", None), "num_heads", None) for layer in module.layers}
    return "its layers have different numbers of heads" if len(heads - {None}) > 1 else ""


@dataclasses.dataclass(frozen=True)
class Swap:
    """Rule for a class of ``torch.nn``: its fast class, the op whose kernels compute it, and a function that returns
    the reason to leave a module, or ""."""

    fast: type[nn.Module]
    op: str
    obstacle: Callable[[Any], str] = lambda module: ""


SWAPS: dict[type[nn.Module], Swap] = {
    nn.LayerNorm: Swap(torch_modules.LayerNorm, "norm", _norm_obstacle),
    nn.RMSNorm: Swap(torch_modules.RMSNorm, "norm", _norm_obstacle),
    nn.Embedding: Swap(torch_modules.Embedding, "embedding", _embedding_obstacle),
    nn.Dropout: Swap(Dropout, "dropout", _dropout_obstacle),
    nn.MultiheadAttention: Swap(torch_modules.MultiheadAttention, "attention", _attention_obstacle),
    nn.TransformerEncoderLayer: Swap(torch_modules.TransformerEncoderLayer, "attention"),
    nn.TransformerDecoderLayer: Swap(torch_modules.TransformerDecoderLayer, "attention"),
    nn.TransformerEncoder: Swap(torch_stacks.TransformerEncoder, "attention", _stack_obstacle),
    nn.TransformerDecoder: Swap(torch_stacks.TransformerDecoder, "attention", _stack_obstacle),
}
