"""The stacks of ``torch.nn`` computed without padding, for ``accelerate(model, packed=True)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..masks.packing import PackedMask, Packing, packing_of, take, unpack
from ..tracing import is_traced
from .dropout import KINDS as DROPOUTS
from .hooks import TAKES_RESIDUAL, has_role, is_plain
from .linear import is_linear
from .padded_calls import NO_TOKEN, PaddedCalls, StaysPaddedError, padded_calls, record, stays_padded
from .torch_masks import TorchMasks, is_look_ahead
from .torch_modules import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, is_replaced


def packed_encoder(stack: nn.TransformerEncoder, src: Tensor, masks: TorchMasks) -> Tensor | None:
    """Output of an encoder, zero at padded positions; None if the encoder must run with the padding.

    Args:
        src, masks: as ``nn.TransformerEncoder`` takes them.
    """
    if (calls := _can_pack(stack, src)) is None:
        return None
    try:
        keep, causal = _padding(stack, src, masks)
        if keep is None:
            return None
        own = _packing(keep, src, stack)
        if own.is_full:
            return None
        _check_parts(stack)
    except StaysPaddedError as reason:
        stays_padded(stack, calls, src, reason)
        return None
    record(stack, own.batch * own.length, own.total)
    x, mask = take(_batch_first(stack, src), own), PackedMask(own, own, causal)
    for layer in stack.layers:
        x = layer(x, src_mask=mask)
    return _unpacked(stack, x, own)


def packed_decoder(
    stack: nn.TransformerDecoder, tgt: Tensor, memory: Tensor, masks: TorchMasks, memory_masks: TorchMasks
) -> Tensor | None:
    """Output of a decoder; see :func:`packed_encoder`."""
    if (calls := _can_pack(stack, tgt)) is None or memory.dim() != 3:
        return None
    try:
        keep, causal = _padding(stack, tgt, masks)
        memory_keep, memory_causal = _padding(stack, memory, memory_masks)
        if keep is None and memory_keep is None:
            return None
        own, source = _packing(keep, tgt, stack), _packing(memory_keep, memory, stack)
        if own.is_full and source.is_full:
            return None
        if memory_causal:
            raise StaysPaddedError("its attention to the encoder has a look-ahead mask")
        _check_parts(stack)
    except StaysPaddedError as reason:
        stays_padded(stack, calls, tgt, reason)
        return None
    record(stack, own.batch * own.length, own.total)
    x, encoded = take(_batch_first(stack, tgt), own), take(_batch_first(stack, memory), source)
    mask, memory_mask = PackedMask(own, own, causal), PackedMask(own, source)
    for layer in stack.layers:
        x = layer(x, encoded, tgt_mask=mask, memory_mask=memory_mask)
    return _unpacked(stack, x, own)


def takes_packed(layer: nn.Module) -> bool:
    """Return True if a layer can run packed: its attentions take a PackedMask, and all other parts work token by
    token."""
    if not is_plain(layer, TransformerEncoderLayer, TransformerDecoderLayer) or is_replaced(layer):
        return False
    attentions = [m for name, m in layer._modules.items() if name in ("self_attn", "multihead_attn")]
    norms = [m for name, m in layer._modules.items() if name.startswith("norm")]
    dropouts = [m for name, m in layer._modules.items() if name.startswith("dropout")]
    return (
        all(m is not None and is_plain(m, MultiheadAttention) for m in attentions)
        and all(m is not None and has_role(m, TAKES_RESIDUAL) for m in norms)
        and all(m is not None and is_plain(m, *DROPOUTS) for m in dropouts)
        and is_linear(layer.linear1)
        and is_linear(layer.linear2)
    )


def _can_pack(stack: nn.Module, x: Tensor) -> PaddedCalls | None:
    in_graph = torch.compiler.is_compiling() or is_traced()
    return None if in_graph or x.dim() != 3 or type(x) is not Tensor else padded_calls(stack)


def _check_parts(stack: nn.Module) -> None:
    if not all(map(takes_packed, stack.layers)):  # type: ignore[arg-type]
        raise StaysPaddedError("a layer has a hook, or an unknown submodule")
    if stack.norm is not None and not has_role(stack.norm, TAKES_RESIDUAL):  # type: ignore[arg-type]
        raise StaysPaddedError("its last norm has a hook, or is of an unknown class")


def _is_batch_first(stack: nn.Module) -> bool:
    return bool(stack.layers[0].self_attn.batch_first)  # type: ignore[index, union-attr]


def _batch_first(stack: nn.Module, x: Tensor) -> Tensor:
    return x if _is_batch_first(stack) else x.transpose(0, 1)


def _unpacked(stack: nn.Module, tokens: Tensor, packing: Packing) -> Tensor:
    tokens = tokens if stack.norm is None else stack.norm(tokens)  # type: ignore[operator]
    return _batch_first(stack, unpack(tokens, packing))


def _packing(keep: Tensor | None, x: Tensor, stack: nn.Module) -> Packing:
    packing = packing_of(keep, *_batch_first(stack, x).shape[:2], x.device)
    if packing.total == 0:
        raise StaysPaddedError(NO_TOKEN)
    return packing


def _padding(stack: nn.Module, x: Tensor, masks: TorchMasks) -> tuple[Tensor | None, bool]:
    """Pair: bool (N, L), True at tokens, or None; and True for a look-ahead mask."""
    mask, padding, is_causal = masks
    causal = is_look_ahead(mask, is_causal)
    if padding is None:
        keep = None
    elif tuple(padding.shape) != tuple(_batch_first(stack, x).shape[:2]):
        return None, False  # invalid, so that the layers raise their error
    elif padding.dtype == torch.bool:
        keep = ~padding
    else:
        keep = padding == 0
        if not bool((keep | (padding == float("-inf"))).all()):
            raise StaysPaddedError("its padding mask is a float tensor, which is added to the scores")
    if mask is not None and not causal:
        raise StaysPaddedError("its mask is not the look-ahead mask")
    return keep, causal
