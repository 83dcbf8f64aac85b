"""PyTorch's attention functions and layers, and its loss."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import shared
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

Array = np.ndarray


def tensors(*arrays: Array | None) -> list[Any]:
    """Return tensors of the arrays; None stays."""
    return [None if a is None else torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]


def sdpa(backends: list[SDPBackend] | None = None, **options: Any) -> Any:
    """Return the function with its options; backends None leaves the choice to PyTorch."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v, mask = tensors(q, k, v, mask)
        if backends is None:
            return F.scaled_dot_product_attention(q, k, v, mask, **options).numpy()
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(q, k, v, mask, **options).numpy()

    return attend


class Bare(torch.nn.Module):
    """nn.MultiheadAttention whose projections are the identity, on heads side by side."""

    def __init__(self, training: bool, weights: bool, p: float = 0.0) -> None:
        super().__init__()
        width = shared.H * shared.D
        self.m = torch.nn.MultiheadAttention(width, shared.H, dropout=p, batch_first=True).train(training)
        self.weights = weights
        with torch.no_grad():
            self.m.in_proj_weight.copy_(torch.eye(width).repeat(3, 1))
            self.m.out_proj.weight.copy_(torch.eye(width))

    def attend(self, q: Array, k: Array, v: Array, mask: Array | None = None, **options: Any) -> Array:
        """Attend; a mask (B, Lk) is given as the padding mask, others as the mask of the scores."""
        q, k, v, mask = tensors(*(a.swapaxes(1, 2).reshape(*a.shape[::2], -1) for a in (q, k, v)), mask)
        names: dict[str, Any] = dict(options)
        if mask is not None and mask.shape == (shared.B, shared.LK):
            names["key_padding_mask"] = mask
        elif mask is not None and mask.dim() == 4:
            names["attn_mask"] = mask.expand(shared.B, shared.H, -1, -1).reshape(-1, *mask.shape[2:])
        elif mask is not None:
            names["attn_mask"] = mask
        with torch.no_grad():
            out = self.m(q, k, v, need_weights=self.weights, **names)[0]
        return out.unflatten(2, (shared.H, shared.D)).transpose(1, 2).numpy()


def of_itself(training: bool) -> str:
    """Say what nn.MultiheadAttention gives for a sentence of padding alone that attends to itself."""
    torch.manual_seed(0)
    m = torch.nn.MultiheadAttention(16, 2, batch_first=True).train(training)
    x, blocked = torch.randn(3, 4, 16), torch.zeros(3, 4, dtype=torch.bool)
    blocked[1] = True
    with torch.no_grad():
        out = m(x, x, x, blocked, need_weights=False)[0][1]
    return word(out - m.out_proj.bias)


def word(out: torch.Tensor) -> str:
    """Name a result."""
    return "NaN" if out.isnan().all() else "zeros" if not out.any() else "finite"


def layer(training: bool) -> str:
    """Say what nn.TransformerEncoderLayer gives for a sentence of padding alone."""
    torch.manual_seed(0)
    m = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    x, blocked = torch.randn(3, 4, 16), torch.zeros(3, 4, dtype=torch.bool)
    blocked[1] = True
    with torch.no_grad():
        return word(m(x, src_key_padding_mask=blocked)[1])


def encoder() -> str:
    """Say what nn.TransformerEncoder gives for a sentence of padding alone, with its defaults."""
    torch.manual_seed(0)
    m = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, blocked = torch.randn(3, 4, 16), torch.zeros(3, 4, dtype=torch.bool)
    blocked[1] = True
    with torch.no_grad():
        return word(m(x, src_key_padding_mask=blocked)[1])


def flex(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Attend with a block mask that reads a mask (Lq, Lk)."""
    q, k, v, mask = tensors(q, k, v, mask)
    blocks = None
    if mask is not None:
        blocks = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, *mask.shape, device="cpu")
    return flex_attention(q, k, v, block_mask=blocks).numpy()


def flex_causal(q: Array, k: Array, v: Array) -> Array:
    """Attend with the function that everybody writes."""
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 2, 4, device="cpu")
    return flex_attention(*tensors(q, k, v), block_mask=blocks).numpy()


def has(function: Any) -> str:
    """Say whether a function has an argument for dropout."""
    return "an argument" if any("dropout" in name for name in inspect.signature(function).parameters) else "no argument"


def loss(logits: Array, targets: Array) -> float:
    """Return the smoothed loss."""
    return float(F.cross_entropy(*tensors(logits, targets), ignore_index=1, label_smoothing=0.1))


train = Bare(True, False)
rows = {
    "`F.scaled_dot_product_attention`": {
        "empty": f"{shared.row_without_keys(sdpa())}; float -inf: {shared.minus_infinity(sdpa())}",
        "mask": shared.meanings(sdpa()),
        "causal": shared.causal(sdpa(is_causal=True)),
        "dropout": f"CPU: fused {shared.dropout(sdpa([SDPBackend.FLASH_ATTENTION], dropout_p=0.5))}, "
        f"default {shared.dropout(sdpa(dropout_p=0.5))}",
    },
    "`nn.MultiheadAttention`": {
        "empty": f"training, `need_weights=True`: {shared.row_without_keys(Bare(True, True).attend, True)}; "
        f"False: {shared.row_without_keys(train.attend, True)}; self-attention in eval: {of_itself(False)}",
        "mask": shared.meanings(train.attend, ["(Lq, Lk)", "(B, Lk)", "(B, H, Lq, Lk)"]),
        "causal": shared.causal(
            lambda q, k, v: train.attend(q, k, v, attn_mask=torch.ones(2, 4).triu(1).bool(), is_causal=True)
        ),
        "dropout": shared.dropout(Bare(True, False, 0.5).attend),
    },
    "`nn.TransformerEncoderLayer`": {
        "empty": f"training: {layer(True)}; eval: {layer(False)}; `nn.TransformerEncoder`, eval: {encoder()}",
        "mask": "as `nn.MultiheadAttention`",
        "causal": "as `nn.MultiheadAttention`",
        "dropout": "as `nn.MultiheadAttention`",
    },
    "`flex_attention`, eager": {
        "empty": shared.row_without_keys(flex),
        "mask": shared.meanings(flex, ["(Lq, Lk)"]).split(".")[0].replace("bool", "the function"),
        "causal": f"i >= j: {shared.causal(flex_causal)}",
        "dropout": has(flex_attention),
    },
    "`varlen_attn`": {"empty": "", "mask": "", "causal": "", "dropout": has(varlen_attn)},
    "`nn.CrossEntropyLoss`": {"smoothing": shared.smoothing(loss)},
}
shared.emit(rows, f"torch {torch.__version__.split('+')[0]}")
