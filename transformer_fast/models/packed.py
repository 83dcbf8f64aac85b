"""Padding of a batch, from the masks of an encoder and a decoder."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..layers.attention import layer_mask
from ..layers.padder import Padder
from ..masks import AttentionMask
from ..masks.arguments import parts_beside
from ..masks.packing import packings_of

_WHAT_TO_PASS = "pass AttentionMask.lengths(trg_lengths) & AttentionMask.causal()"


def padder_of(
    src: Tensor, trg: Tensor, src_mask: Tensor | AttentionMask | None, trg_mask: Tensor | AttentionMask | None
) -> Padder:
    """Padder of a decoder, for the masks that all layers share.

    Args:
        src, trg: (B, L_src) and (B, L_trg), such as token ids.
        src_mask, trg_mask: as for :meth:`transformer_fast.Transformer.forward` with ``packed``.

    Raises:
        ValueError: for a mask with parts other than padding (and, for the target, look-ahead).
    """
    trg_mask = layer_mask(trg_mask)
    padding, causal = _padding_and_look_ahead(trg_mask, trg.shape[1])
    (source, own), _ = packings_of([(layer_mask(src_mask), *src.shape, src.device), (padding, *trg.shape, trg.device)])
    return Padder(own, source, causal, _window(trg_mask))


def padding_of(mask: AttentionMask | None, length: int) -> AttentionMask | None:
    """Mask of an encoder, whose dense part (B|1, 1, L, L) becomes (B|1, 1, 1, L) if it is only padding.

    Rows at padding may equal the rows at tokens, or be empty.

    Raises:
        ValueError: for a dense mask that is not only padding.
    """
    if mask is None or mask.keep_mask is None:
        return mask
    keep, shape = mask.keep_mask, tuple(mask.keep_mask.shape)
    if shape[1:] == (1, length, length):
        tokens = keep.diagonal(dim1=2, dim2=3).unsqueeze(2)
        if torch.equal(keep, tokens.expand_as(keep)) or torch.equal(keep, tokens & tokens.transpose(2, 3)):
            return dataclasses.replace(mask, keep_mask=None) & AttentionMask(key_keep_mask=tokens)
    raise ValueError(f"packed: the dense mask {shape} is not padding alone; pass (B, 1, 1, L)")


def _window(mask: AttentionMask | None) -> AttentionMask | None:
    """Window of a mask. Packing closes gaps between tokens, so distances stay the same only without gaps."""
    if mask is None or mask.window_offset is None:
        return None
    if mask.keep_mask is not None or mask.key_keep_mask is not None:
        raise ValueError("packed: with a window, the padding must be given as AttentionMask.lengths(trg_lengths)")
    return AttentionMask(window_offset=mask.window_offset)


def _padding_and_look_ahead(mask: AttentionMask | None, length: int) -> tuple[AttentionMask | None, bool]:
    if mask is None:
        return None, False
    if parts_beside(mask, "keep_mask", "key_keep_mask", "key_lengths", "causal_offset", "window_offset"):
        raise ValueError(f"packed: the target's mask is {mask}; {_WHAT_TO_PASS}")
    if mask.causal_offset not in (None, 0):
        raise ValueError(
            f"packed: the target's look-ahead must have offset 0, got {mask.causal_offset}; {_WHAT_TO_PASS}"
        )
    padding = AttentionMask(key_keep_mask=mask.key_keep_mask, key_lengths=mask.key_lengths)
    if mask.keep_mask is None:
        return padding, mask.causal_offset == 0
    return padding & AttentionMask(key_keep_mask=_padding_of_dense(mask.keep_mask, length)), True


def _padding_of_dense(keep: Tensor, length: int) -> Tensor:
    """Padding (B|1, 1, 1, L) of a dense mask (B|1, 1, L, L) that consists of padding and look-ahead only.

    Each token sees itself, so the diagonal marks the tokens. Rows at padding do not matter.
    """
    on_gpu = keep.device.type != "cpu"
    if on_gpu or torch.compiler.is_compiling():
        obstacle = "without waiting for the GPU" if on_gpu else "by torch.compile or torch.export"
        raise ValueError(
            f"packed: trg_mask is a dense keep mask {tuple(keep.shape)} on {keep.device}, which cannot be checked "
            f"{obstacle}: it must be padding and look-ahead only; {_WHAT_TO_PASS}"
        )
    if tuple(keep.shape[1:]) != (1, length, length):
        raise ValueError(
            f"packed: a dense trg_mask must be (B, L_trg, L_trg) with L_trg = {length}, got shape {tuple(keep.shape)}"
        )
    tokens = keep.diagonal(dim1=2, dim2=3).unsqueeze(2)
    look_ahead = torch.ones(length, length, dtype=torch.bool).tril()
    if not torch.all((keep == (tokens & look_ahead)) | ~tokens.transpose(2, 3)):
        raise ValueError(
            f"packed: the dense trg_mask {tuple(keep.shape)} is not padding and look-ahead alone, so the batch "
            f"cannot be packed; {_WHAT_TO_PASS}, or use packed=False"
        )
    return tokens
