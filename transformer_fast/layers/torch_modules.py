"""The modules of ``torch.nn`` on the fused ops: the classes that :func:`transformer_fast.accelerate` swaps in.

Each is a subclass of the module it stands for and adds no state, so that ``accelerate`` only changes the class of an
existing module: parameters, hooks, mode, dtype and device stay as they are. Two things differ from ``torch.nn``: a
query with every key blocked attends to nothing (attention output 0), never NaN; and ``is_causal`` needs no
``attn_mask``. Where training and evaluation of ``torch.nn`` disagree, these modules compute the same in both:
docs/models/torch_nn.md has the table. The stacks are in ``torch_stacks``.

A submodule that is not plain (``hooks.is_plain``) is called as ``torch.nn`` calls it; the ops around it are then not
fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..function_mode import outside_blocks
from ..masks.packing import PackedMask
from ..ops.embedding import eager_embed
from ..ops.norm import eager_layer_norm
from ..ops.token_mask import OnTokens, call_on_tokens
from ..ops.weight_layout import LAYOUT
from ..tensors import takes_fused_ops
from . import norm as _norm
from .activated import activated_linear
from .attention import module_attention, packed_attention
from .by_torch import by_torch, norm_by_torch
from .dropout import apply_dropout
from .feed_forward import linear_relu_dropout
from .hooks import LOOKS_UP, TAKES_RESIDUAL, in_role, is_plain
from .linear import apply_linear, is_linear
from .norm import post_norm, pre_norm
from .padded_calls import StaysPaddedError
from .products import product_of
from .torch_masks import TorchMask, encoder_masks, original_masks, torch_mask


@in_role(TAKES_RESIDUAL)
class LayerNorm(_norm.LayerNorm):
    """``nn.LayerNorm``, optionally fused with the dropout and the residual addition before it."""

    def forward(
        self, input: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise input (..., d); with ``residual`` return (norm of s, s), ``s = residual + dropout(input)``, in one
        pass.

        Under autocast on a GPU the norm of a 16-bit input is float32, as in ``torch.nn``.
        """
        one = len(self.normalized_shape) == 1
        if one and type(input) is Tensor and dropout_p == 0.0 and self.weight is not None:
            found = eager_layer_norm(input, self.weight, self.bias, self.eps, "layer", residual)
            if found is not None:
                return found
        if not one or not takes_fused_ops(input, residual, *self._parameters.values()):
            return norm_by_torch(nn.LayerNorm, self, input, residual, dropout_p)
        if residual is None and input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.to(torch.promote_types(input.dtype, torch.float32))
        return super().forward(input, residual=residual, dropout_p=dropout_p)


@in_role(TAKES_RESIDUAL)
class RMSNorm(_norm.RMSNorm):
    """``nn.RMSNorm``, optionally fused with the dropout and the residual addition before it."""

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise x (..., d); with ``residual`` return (norm of s, s), ``s = residual + dropout(x)``, in one pass.

        Under autocast on a GPU the norm of a 16-bit x is float32, as in ``torch.nn``.
        """
        one = len(self.normalized_shape) == 1
        if one and type(x) is Tensor and dropout_p == 0.0 and self.weight is not None:
            found = eager_layer_norm(x, self.weight, None, self.eps, "rms", residual)
            if found is not None:
                return found
        if not one or not takes_fused_ops(x, residual, *self._parameters.values()):
            return norm_by_torch(nn.RMSNorm, self, x, residual, dropout_p)
        if residual is None and x.is_cuda and torch.is_autocast_enabled("cuda"):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return super().forward(x, residual=residual, dropout_p=dropout_p)


@in_role(LOOKS_UP)
class Embedding(nn.Embedding):
    """``nn.Embedding`` without ``max_norm``, ``scale_grad_by_freq`` and ``sparse``."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids (..., L), int -> (..., L, embedding_dim). Raises IndexError for an id outside the table (on
        CPU)."""
        usual = self.max_norm is None and not self.sparse and not self.scale_grad_by_freq
        if usual and type(input) is Tensor:
            found = eager_embed(input, self.weight, self.padding_idx)
            if found is not None:
                return found
        if not usual or not takes_fused_ops(input, *self._parameters.values()) or input.dim() == 0:
            return by_torch(nn.Embedding, self, input)
        return ops.embed(input, self.weight, padding_idx=self.padding_idx)


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` without ``add_bias_kv`` and ``add_zero_attn``."""

    @outside_blocks
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
        """See ``torch.nn.MultiheadAttention``. With ``need_weights``, a separate kernel computes the weights after
        dropout.

        If ``attn_mask`` is a PackedMask, query, key and value are packed, (T, embed_dim), and no weights are returned.

        Raises:
            TypeError, RuntimeError: for masks that are neither bool nor float, or of another shape.
        """
        same = query is key and key is value
        given = query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        served = takes_fused_ops(query, key_padding_mask, attn_mask) and (same or takes_fused_ops(key, value))
        if not isinstance(self, MultiheadAttention):  # after undo, a caller may hold this method
            return nn.MultiheadAttention.forward(self, *given)
        served = served and self.bias_k is None and not self.add_zero_attn
        if (call := call_on_tokens()) is not None:
            alone = served and attn_mask is None and not is_causal and query.dim() == key.dim() == value.dim() == 3
            return self._on_tokens(call, query, key, value, need_weights, alone)
        if not served:
            return self._by_torch(*given)
        if isinstance(attn_mask, PackedMask):
            dropout_p = self.dropout if self.training else 0.0
            heads = packed_attention(*self._projected(query, key, value, same), attn_mask, dropout_p=dropout_p)
            return product_of(self, heads.flatten(-2), self.out_proj.weight, self.out_proj.bias), None
        if batched := query.dim() == 3:
            batch, length = (0, 1) if self.batch_first else (1, 0)
        else:
            batch, length = 0, 1
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        shape = query.shape[batch], self.num_heads, query.shape[length], key.shape[length]
        mask = torch_mask(attn_mask, key_padding_mask, is_causal, shape)
        dropout_p = self.dropout if self.training else 0.0
        if batched and not self.training and self._qkv_same_embed_dim and LAYOUT not in self.__dict__:
            from ..inference.multihead import evaluated_heads

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
        if not takes_fused_ops(*self._parameters.values(), *self.out_proj._parameters.values()):
            return self._by_torch(*given)
        q, k, v = (t.permute(batch, 2, length, 3) for t in self._projected(query, key, value, same))
        result = module_attention(
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
        out = product_of(self, heads.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            out, weights = out.squeeze(0), weights if weights is None else weights.squeeze(0)
        return out, weights

    def _on_tokens(
        self, call: OnTokens, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, alone: bool
    ) -> tuple[Tensor, Any]:
        """Attend inside a layer that computes tokens alone. alone: False if more than padding hides a key."""
        if not alone:
            raise StaysPaddedError("its attention has a mask that is not padding alone")
        axis = 0 if self.batch_first else 1
        mask = call.read(*(t.movedim(axis, 0) for t in (query, key, value)))
        q, k, v = (t.squeeze(axis) for t in self._projected(query, key, value, query is key and key is value))
        heads = packed_attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        out = product_of(self, heads.flatten(-2), self.out_proj.weight, self.out_proj.bias).unsqueeze(axis)
        return out, call.weights() if need_weights else None

    def _by_torch(
        self, query: Tensor, key: Tensor, value: Tensor, padding: Any, need_weights: bool, mask: Any, *others: bool
    ) -> tuple[Tensor, Tensor | None]:
        average, is_causal = others
        if isinstance(mask, TorchMask):
            mask, padding, is_causal = mask.original
        given = query, key, value, padding, need_weights, mask, average, is_causal
        return by_torch(nn.MultiheadAttention, self, *given)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, ...]:
        """Project to queries, keys and values, each (*, *, heads, head_dim)."""
        by_head, weight, bias = (self.num_heads, self.head_dim), self.in_proj_weight, self.in_proj_bias
        if self._qkv_same_embed_dim and same:
            return product_of(self, query, weight, bias).view(*query.shape[:-1], 3, *by_head).unbind(-3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if not self._qkv_same_embed_dim:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif key is value:
            q = product_of(self, query, weight[: self.embed_dim], biases[0]).view(*query.shape[:-1], *by_head)
            joined = product_of(self, key, weight[self.embed_dim :], None if bias is None else bias[self.embed_dim :])
            return q, *joined.view(*key.shape[:-1], 2, *by_head).unbind(-3)
        else:
            weights = weight.chunk(3)
        inputs = query, key, value
        return tuple(
            product_of(self, x, w, b).view(*x.shape[:-1], *by_head) for x, w, b in zip(inputs, weights, biases)
        )


class _Layer(nn.Module):
    """Base of the encoder layer and the decoder layer."""

    def _run(self, x: Tensor, *attentions: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the attentions and the feed-forward network, each with its norm, dropout and residual addition.

        A norm or a dropout that is not plain is called as ``torch.nn`` calls it.
        """
        count = 1 + len(attentions)
        norms, dropouts = ([self._modules[f"{kind}{n + 1}"] for n in range(count)] for kind in ("norm", "dropout"))
        sublayers = tuple(zip(norms, dropouts, (*attentions, self._feed_forward)))
        return pre_norm(x, sublayers).summed() if self.norm_first else post_norm(x, sublayers)

    def _feed_forward(self, x: Tensor) -> Tensor:
        activation = self.activation
        if activation is F.relu or (isinstance(activation, nn.Module) and is_plain(activation, nn.ReLU)):
            return apply_linear(self.linear2, linear_relu_dropout(self.linear1, x, self.dropout))
        if (inner := activated_linear(self.linear1, x, activation)) is not None:
            return apply_linear(self.linear2, apply_dropout(self.dropout, inner))
        inner = apply_linear(self.linear1, x)
        # In place only if a plain linear layer made the tensor: any other module may keep its result.
        made_here = is_linear(self.linear1) and type(inner) is Tensor and not inner.requires_grad
        inner = torch.ops.aten.gelu_(inner) if activation is F.gelu and made_here else activation(inner)
        return apply_linear(self.linear2, apply_dropout(self.dropout, inner))


def is_replaced(layer: nn.Module) -> bool:
    """Return True for a layer in which somebody set a method that torch's forward calls, and for one whose class is
    torch's again: a caller may hold a method after ``undo``."""
    own = layer.__dict__
    return not isinstance(layer, _Layer) or "_sa_block" in own or "_mha_block" in own or "_ff_block" in own


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer``; dropout, residual addition and the next norm run as one op."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | TorchMask | PackedMask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.TransformerEncoderLayer``."""
        if is_replaced(self) or not takes_fused_ops(src, src_mask, src_key_padding_mask):
            masks = original_masks(src_mask, src_key_padding_mask, is_causal)
            return by_torch(nn.TransformerEncoderLayer, self, src, *masks)
        masks = src_mask, src_key_padding_mask, is_causal
        if not is_plain(self.self_attn, MultiheadAttention):
            masks = encoder_masks(src, *masks)
        return self._run(src, lambda x: _attend(self.self_attn, x, x, *masks))


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """``nn.TransformerDecoderLayer``; dropout, residual addition and the next norm run as one op."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | TorchMask | PackedMask | None = None,
        memory_mask: Tensor | TorchMask | PackedMask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.TransformerDecoderLayer``."""
        own = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        cross = memory_mask, memory_key_padding_mask, memory_is_causal
        if is_replaced(self) or not takes_fused_ops(tgt, memory, *own, *cross):
            masks = (mask for pair in zip(original_masks(*own), original_masks(*cross)) for mask in pair)
            return by_torch(nn.TransformerDecoderLayer, self, tgt, memory, *masks)
        if not is_plain(self.self_attn, MultiheadAttention):
            own = original_masks(*own)
        if not is_plain(self.multihead_attn, MultiheadAttention):
            cross = original_masks(*cross)
        return self._run(
            tgt,
            lambda x: _attend(self.self_attn, x, x, *own),
            lambda x: _attend(self.multihead_attn, x, memory, *cross),
        )


def _attend(
    attention: nn.Module,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | TorchMask | PackedMask | None,
    padding: Tensor | None,
    causal: bool,
) -> Tensor:
    if isinstance(mask, TorchMask) and not is_plain(attention):  # hooks get the original masks
        mask, padding, causal = mask.original
    return attention(x, memory, memory, attn_mask=mask, key_padding_mask=padding, is_causal=causal, need_weights=False)[
        0
    ]
