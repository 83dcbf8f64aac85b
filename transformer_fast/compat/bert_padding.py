"""``unpad_input`` and ``pad_input`` with the signatures and the results of ``flash_attn.bert_padding``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import packing_of
from ..masks.checks import INTEGERS, check_dense, kind_of
from ..ops.argument_types import check_int

_FLAGS = (torch.bool, *INTEGERS)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """``unpad_input`` of flash-attention 2.7 and 2.8: a padded batch without its padding.

    Args:
        hidden_states: (B, L, ...), any dtype; gradients flow through.
        attention_mask: bool or integer (B, L); nonzero = a token.
        unused_mask: bool or integer (B, L); nonzero = a place that is kept among the tokens but not used. None for no
            such places.

    Returns:
        hidden_states: (T, ...), a copy: the tokens and the unused places, sequence by sequence and in order.
        indices: int64 (T,), index of each in the flattened batch, ``b * L + position``.
        cu_seqlens: int32 (B + 1,): sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
        max_seqlen_in_batch: length of the longest sequence, an int. In graphs of torch.compile and torch.export L.
        seqused: int32 (B,), number of tokens per sequence, without the unused places.

    On a GPU the host waits once, to read T and the longest length.

    Raises:
        TypeError: for anything but tensors, and for masks of another dtype.
        ValueError: for masks that are not (B, L), or on another device than hidden_states.
    """
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"unpad_input: hidden_states must be a tensor (B, L, ...), got {kind_of(hidden_states)}")
    if hidden_states.dim() < 2:
        raise ValueError(f"unpad_input: hidden_states must be (B, L, ...), got shape {tuple(hidden_states.shape)}")
    used = _flags("attention_mask", attention_mask, hidden_states)
    kept = used if unused_mask is None else used | _flags("unused_mask", unused_mask, hidden_states)
    packing = packing_of(kept, hidden_states.shape[0], hidden_states.shape[1], hidden_states.device)
    tokens = hidden_states.flatten(0, 1).index_select(0, packing.indices)
    return tokens, packing.indices, packing.cu_seqlens, packing.max_length, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """``pad_input`` of flash-attention 2: the inverse of :func:`unpad_input`.

    Args:
        hidden_states: (T, ...), any dtype; gradients flow through.
        indices: int64 (T,) of :func:`unpad_input`, each at most once, between 0 and ``batch * seqlen - 1``.
        batch, seqlen: B and L of the padded batch.

    Returns:
        (B, L, ...), with zeros at the places that no index names.

    Raises:
        TypeError: for anything but tensors and ints, and for indices of another dtype.
        ValueError: for indices that are not (T,), and for a negative size.
        IndexError: for an index outside of the batch; torch's own error.
    """
    for name, t in (("hidden_states", hidden_states), ("indices", indices)):
        if not isinstance(t, Tensor):
            raise TypeError(f"pad_input: {name} must be a tensor, got {kind_of(t)}")
    if indices.dtype != torch.int64:
        raise TypeError(f"pad_input: indices must be int64 (T,), got {indices.dtype}")
    if hidden_states.dim() < 1 or indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"pad_input: indices must be (T,), one for each of hidden_states (T, ...), got shapes "
            f"{tuple(indices.shape)} and {tuple(hidden_states.shape)}"
        )
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        check_int("pad_input", name, size)
        if size < 0:
            raise ValueError(f"pad_input: {name} must be at least 0, got {size}")
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def _flags(name: str, mask: Any, hidden_states: Tensor) -> Tensor:
    """The mask as bool (B, L); raise unless it fits."""
    if not isinstance(mask, Tensor) or mask.dtype not in _FLAGS:
        raise TypeError(f"unpad_input: {name} must be a bool or integer tensor (B, L), got {kind_of(mask)}")
    check_dense(f"unpad_input: {name}", mask)
    if mask.shape != hidden_states.shape[:2]:
        expected = f"(B, L) = {tuple(hidden_states.shape[:2])}"
        raise ValueError(f"unpad_input: {name} must be {expected}, got shape {tuple(mask.shape)}")
    if mask.device != hidden_states.device:
        raise ValueError(f"unpad_input: {name} must be on {hidden_states.device}, got {mask.device}")
    return mask if mask.dtype == torch.bool else mask != 0
