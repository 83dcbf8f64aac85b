"""The modules of ``torch.nn`` on the fused ops: what :func:`transformer_fast.accelerate` turns a module into.

Each is a subclass of the module it stands for and adds no state, so that ``accelerate`` only changes the class of an
existing module: parameters, hooks, mode, dtype and device stay as they are. Two things differ from ``torch.nn``: a
query with every key blocked attends to nothing (attention output 0), never NaN; and ``is_causal`` needs no
``attn_mask``. The stacks are in ``torch_stacks``.

A submodule that has hooks is called as ``torch.nn`` calls it, and costs the fusion around it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops._multihead import evaluated_heads
from ..ops.dropout import dropout as fused_dropout
from ..packing import PackedMask
from . import norm as _norm
from .feed_forward import linear_relu_dropout
from .hooks import unwatched
from .norm import active_dropout
from .torch_masks import TorchMask, torch_mask


class LayerNorm(_norm.LayerNorm):
    """``nn.LayerNorm``, which may take the residual addition and the dropout before it along."""

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (..., d) -> its norm; with ``residual`` (norm of s, s), ``s = residual + dropout(x)`` in one pass.

        Under autocast on a GPU the norm of a 16-bit x is float32, as in ``torch.nn``.
        """
        if len(self.normalized_shape) != 1:
            return super(_norm.LayerNorm, self).forward(x)
        if residual is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return super().forward(x, residual=residual, dropout_p=dropout_p)


class Embedding(nn.Embedding):
    """``nn.Embedding`` without ``max_norm``, ``scale_grad_by_freq`` and ``sparse``."""

    def forward(self, input: Tensor) -> Tensor:
        """ids (..., L), int -> (..., L, embedding_dim). Raises IndexError for an id outside the table (on CPU)."""
        if input.dim() == 0 or self.max_norm is not None or self.sparse or self.scale_grad_by_freq:
            return super().forward(input)
        return ops.embed(input, self.weight, padding_idx=self.padding_idx)


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` without ``add_bias_kv`` and ``add_zero_attn``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | TorchMask | PackedMask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``torch.nn.MultiheadAttention``. Weights are computed beside the fused kernel, after dropout, on request.

        With a PackedMask for ``attn_mask`` query, key and value are packed, (T, embed_dim), and there are no weights.

        Raises:
            TypeError, RuntimeError: for masks that are neither bool nor float, or of another shape.
        """
        nested = query.is_nested or key.is_nested or value.is_nested
        if nested or self.bias_k is not None or self.add_zero_attn:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        same = query is key and key is value
        if isinstance(attn_mask, PackedMask):
            return self._packed(*self._projected(query, key, value, same), attn_mask), None
        if batched := query.dim() == 3:
            batch, length = (0, 1) if self.batch_first else (1, 0)
        else:
            batch, length = 0, 1
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        shape = query.shape[batch], self.num_heads, query.shape[length], key.shape[length]
        mask = torch_mask(attn_mask, key_padding_mask, is_causal, shape)
        dropout_p = self.dropout if self.training else 0.0
        if batched and dropout_p == 0.0 and self._qkv_same_embed_dim:
            found = evaluated_heads(
                (query, key, value),
                (self.in_proj_weight, self.in_proj_bias),
                (self.out_proj.weight, self.out_proj.bias),
                self.num_heads,
                batch_first=batch == 0,
                mask=mask.keys,
                bias=mask.bias,
                need_weights=need_weights,
                average=average_attn_weights,
            )
            if found is not None:
                return found
        q, k, v = (t.permute(batch, 2, length, 3) for t in self._projected(query, key, value, same))
        result = ops.attention(
            q,
            k,
            v,
            mask.keys,
            bias=mask.bias,
            dropout_p=dropout_p,
            empty_rows="zero",
            return_weights="dropped" if need_weights else False,
        )
        heads, weights = result if need_weights else (result, None)
        heads = heads.permute(0, 2, 1, 3) if batch == 0 else heads.permute(2, 0, 1, 3)
        out = F.linear(heads.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            out, weights = out.squeeze(0), weights if weights is None else weights.squeeze(0)
        return out, weights

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> Tensor:
        heads = ops.attention_packed(
            q,
            k,
            v,
            mask.queries.cu_seqlens,
            mask.keys.cu_seqlens,
            max_q=mask.queries.max_length,
            max_k=mask.keys.max_length,
            mask=mask.window,
            causal=mask.causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return F.linear(heads.flatten(-2), self.out_proj.weight, self.out_proj.bias)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, ...]:
        """Queries, keys and values by head, each (*, *, heads, head_dim)."""
        by_head = (self.num_heads, self.head_dim)
        if not self._qkv_same_embed_dim:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            return tuple(
                F.linear(x, w, b).unflatten(-1, by_head) for x, w, b in zip((query, key, value), weights, biases)
            )
        if same:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, *by_head)).unbind(-3)
        parts = [self.embed_dim, 2 * self.embed_dim] if key is value else [self.embed_dim] * 3
        weights = self.in_proj_weight.split(parts)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(parts)
        q = F.linear(query, weights[0], biases[0]).unflatten(-1, by_head)
        if key is value:
            return q, *F.linear(key, weights[1], biases[1]).unflatten(-1, (2, *by_head)).unbind(-3)
        return q, *(F.linear(x, w, b).unflatten(-1, by_head) for x, w, b in zip((key, value), weights[1:], biases[1:]))


class _Layer(nn.Module):
    """What the encoder and the decoder layer share."""

    def _fuses(self, *names: str) -> bool:
        modules = [self._modules[name] for name in names]
        for name, module in zip(names, modules):
            if not isinstance(module, LayerNorm if name.startswith("norm") else nn.Dropout):
                return False
        return unwatched(*modules)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward network up to its second linear layer; the dropout after that is fused into what follows."""
        p, activation = active_dropout(self.dropout), self.activation
        if activation is F.relu or (type(activation) is nn.ReLU and unwatched(activation)):
            return self.linear2(linear_relu_dropout(self.linear1, x, p))
        inner = self.linear1(x)
        if activation is F.gelu and type(inner) is Tensor and not inner.requires_grad and unwatched(self.linear1):
            return self.linear2(fused_dropout(torch.ops.aten.gelu_(inner), p))
        return self.linear2(fused_dropout(activation(inner), p))


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer``; dropout, residual addition and the norm that follows run as one op."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | TorchMask | PackedMask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.TransformerEncoderLayer``."""
        if src.is_nested or not isinstance(self.self_attn, MultiheadAttention):
            if isinstance(src_mask, TorchMask):
                src_mask, src_key_padding_mask, is_causal = src_mask.original
            return nn.TransformerEncoderLayer.forward(self, src, src_mask, src_key_padding_mask, is_causal)
        x = src
        masks = src_mask, src_key_padding_mask, is_causal
        if not self._fuses("norm1", "norm2", "dropout", "dropout1", "dropout2"):
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *masks)
                return x + self._ff_block(self.norm2(x))
            x = self.norm1(x + self._sa_block(x, *masks))
            return self.norm2(x + self._ff_block(x))
        p_1, p_2 = active_dropout(self.dropout1), active_dropout(self.dropout2)
        if self.norm_first:
            x2 = self.norm1(x)
            x2, x = self.norm2(_attend(self.self_attn, x2, x2, *masks), residual=x, dropout_p=p_1)
            return fused_dropout(self._feed_forward(x2), p_2, residual=x)
        x, _ = self.norm1(_attend(self.self_attn, x, x, *masks), residual=x, dropout_p=p_1)
        return self.norm2(self._feed_forward(x), residual=x, dropout_p=p_2)[0]


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """``nn.TransformerDecoderLayer``; dropout, residual addition and the norm that follows run as one op."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | TorchMask | None = None,
        memory_mask: Tensor | TorchMask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.TransformerDecoderLayer``."""
        own = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        cross = memory_mask, memory_key_padding_mask, memory_is_causal
        if not all(isinstance(m, MultiheadAttention) for m in (self.self_attn, self.multihead_attn)):
            own, cross = (m[0].original if isinstance(m[0], TorchMask) else m for m in (own, cross))
            masks = (mask for pair in zip(own, cross) for mask in pair)
            return nn.TransformerDecoderLayer.forward(self, tgt, memory, *masks)
        x = tgt
        if not self._fuses("norm1", "norm2", "norm3", "dropout", "dropout1", "dropout2", "dropout3"):
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *own)
                x = x + self._mha_block(self.norm2(x), memory, *cross)
                return x + self._ff_block(self.norm3(x))
            x = self.norm1(x + self._sa_block(x, *own))
            x = self.norm2(x + self._mha_block(x, memory, *cross))
            return self.norm3(x + self._ff_block(x))
        p_1, p_2, p_3 = (active_dropout(d) for d in (self.dropout1, self.dropout2, self.dropout3))
        if self.norm_first:
            x2 = self.norm1(x)
            x2, x = self.norm2(_attend(self.self_attn, x2, x2, *own), residual=x, dropout_p=p_1)
            x2, x = self.norm3(_attend(self.multihead_attn, x2, memory, *cross), residual=x, dropout_p=p_2)
            return fused_dropout(self._feed_forward(x2), p_3, residual=x)
        x, _ = self.norm1(_attend(self.self_attn, x, x, *own), residual=x, dropout_p=p_1)
        x, _ = self.norm2(_attend(self.multihead_attn, x, memory, *cross), residual=x, dropout_p=p_2)
        return self.norm3(self._feed_forward(x), residual=x, dropout_p=p_3)[0]


def _attend(
    attention: nn.Module,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | TorchMask | PackedMask | None,
    padding: Tensor | None,
    causal: bool,
) -> Tensor:
    return attention(x, memory, memory, attn_mask=mask, key_padding_mask=padding, is_causal=causal, need_weights=False)[
        0
    ]
