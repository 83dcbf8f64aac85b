"""The stacks of ``torch.nn`` on the fused ops: see ``torch_modules``.

In evaluation without gradients, ``torch.nn``'s encoder removes padding by a nested tensor. This encoder removes padding
in the same cases.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..masks.packing import PackedMask, Packing, packings_of, take, unpack
from ..tensors import takes_fused_ops
from .by_torch import by_torch
from .hooks import is_plain
from .padder import check_reads, held_packing
from .torch_masks import TorchMask, encoder_masks, is_look_ahead, torch_mask
from .torch_modules import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer
from .torch_packed import encoder_read_by, packed_stack, takes_packed


class TransformerEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder``; the masks are converted once for all layers."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """See ``torch.nn.TransformerEncoder``."""
        if not isinstance(self, TransformerEncoder) or not takes_fused_ops(src, mask, src_key_padding_mask):
            return by_torch(nn.TransformerEncoder, self, src, mask, src_key_padding_mask, is_causal)
        packed = packed_stack(self, (src, (mask, src_key_padding_mask, bool(is_causal))))
        if packed is not None:
            return packed
        if packing := self._packing(src, mask, src_key_padding_mask):
            own, src = PackedMask(packing, packing, bool(is_causal)), take(src, packing)
        else:
            own = _stack_mask(self, "self_attn", src, src, mask, src_key_padding_mask, is_causal)
        causal: bool | None = None  # read once, and only for layers that get the original masks
        for layer in self.layers:
            if own is not None and is_plain(layer, TransformerEncoderLayer):
                src = layer(src, src_mask=own)
                continue
            causal = is_look_ahead(mask, is_causal) if causal is None else causal
            given, padding, _ = encoder_masks(src, mask, src_key_padding_mask, causal)
            src = layer(src, src_mask=given, is_causal=causal, src_key_padding_mask=padding)
        src = unpack(src, packing) if packing else src
        return src if self.norm is None else self.norm(src)

    def _packing(self, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> Packing | None:
        """Packing of the batch if ``torch.nn`` would make a nested tensor; else None.

        As with the nested tensor, the result is 0 at padded positions, before the last norm.
        """
        if padding is None or mask is not None or padding.dtype != torch.bool or src.dim() != 3:
            return None
        if torch.compiler.is_compiling() or type(src) is not Tensor or src.is_meta:
            return None
        if padding.shape != src.shape[:2]:  # not read in a trace, which would hold the sizes
            return None
        first = self.layers[0]
        if not getattr(self, "use_nested_tensor", False) or first.training or not first.self_attn.batch_first:
            return None
        if not all(map(takes_packed, self.layers)) or not takes_fused_ops(*self.layers.parameters()):
            return None
        if torch.is_autocast_enabled(src.device.type) or not torch.backends.mha.get_fastpath_enabled():
            return None
        if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
            return None
        if src.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        between = (padding[:, :-1] & ~padding[:, 1:]).any()
        (packing,), (is_between,) = packings_of([((~padding).sum(1), *padding.shape, src.device)], [between])
        return None if is_between or packing.is_full else packing


class TransformerDecoder(nn.TransformerDecoder):
    """``nn.TransformerDecoder``; the masks are converted once for all layers."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.TransformerDecoder``."""
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        if not isinstance(self, TransformerDecoder) or not takes_fused_ops(tgt, memory, *masks):
            return by_torch(nn.TransformerDecoder, self, tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        if memory_mask is None and memory_key_padding_mask is None:
            check_reads(self, held_packing(memory), None)
        own_masks = tgt_mask, tgt_key_padding_mask, bool(tgt_is_causal)
        cross_masks = memory_mask, memory_key_padding_mask, memory_is_causal
        packed = packed_stack(self, (tgt, own_masks), (memory, cross_masks))
        if packed is not None:
            return packed
        own = _stack_mask(self, "self_attn", tgt, tgt, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = _stack_mask(self, "multihead_attn", tgt, memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        causal: tuple[bool, bool] | None = None  # read once, and only for layers that get the original masks
        for layer in self.layers:
            if own is not None and cross is not None and is_plain(layer, TransformerDecoderLayer):
                tgt = layer(tgt, memory, tgt_mask=own, memory_mask=cross)
                continue
            if causal is None:
                causal = is_look_ahead(tgt_mask, tgt_is_causal), is_look_ahead(memory_mask, memory_is_causal)
            tgt = layer(
                tgt,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=causal[0],
                memory_is_causal=causal[1],
            )
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(nn.Transformer):
    """``nn.Transformer`` of stacks that skip padding: padding of the source that the decoder reads stays."""

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """See ``torch.nn.Transformer``."""
        paddings = src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask
        arguments = src, tgt, src_mask, tgt_mask, memory_mask, *paddings, src_is_causal, tgt_is_causal, memory_is_causal
        if torch.compiler.is_compiling() or not takes_fused_ops(*arguments) or not isinstance(self, Transformer):
            return by_torch(nn.Transformer, self, *arguments)
        with encoder_read_by(memory_key_padding_mask, src_key_padding_mask):
            return nn.Transformer.forward(self, *arguments)


def _stack_mask(
    stack: nn.Module,
    name: str,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    causal: bool | None,
) -> TorchMask | None:
    """Return the masks of the attentions of this name in normal form; None if none of these attentions is plain."""
    found = (layer._modules.get(name) for layer in stack.layers)
    attention = next((m for m in found if m is not None and is_plain(m, MultiheadAttention)), None)
    if attention is None:
        return None
    length = 1 if attention.batch_first and x.dim() == 3 else 0
    N = x.shape[1 - length] if x.dim() == 3 else 1
    return torch_mask(mask, padding, causal, (N, attention.num_heads, x.shape[length], memory.shape[length]))
