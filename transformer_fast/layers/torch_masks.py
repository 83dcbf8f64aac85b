"""The masks of ``torch.nn``'s attention modules in normal form."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..backends import in_transform
from ..masks import AttentionMask
from ..tracing import is_traced, unrecorded


@dataclasses.dataclass(frozen=True, eq=False)
class TorchMask:
    """``attn_mask``, ``key_padding_mask`` and ``is_causal`` of one attention, worked out once for a whole stack.

    Attributes:
        keys: what they block.
        bias: what they add to the scores: (N|1, heads|1, L|1, S) float, or None.
        original: the three as they were given, for a module that wants them so.
    """

    keys: AttentionMask
    bias: Tensor | None
    original: tuple[Tensor | None, Tensor | None, bool]


_NOTHING = TorchMask(AttentionMask(), None, (None, None, False))


def torch_mask(
    attn_mask: Tensor | TorchMask | None,
    key_padding_mask: Tensor | None,
    is_causal: bool | None,
    shape: tuple[int, int, int, int],
) -> TorchMask:
    """Masks as ``nn.MultiheadAttention`` takes them: bool True = blocked, float = added to the scores.

    Args:
        attn_mask: (L, S) or (N * heads, L, S); or a TorchMask, which is returned.
        key_padding_mask: (N, S), or (S,) for an unbatched input.
        is_causal: the hint that ``attn_mask`` is the look-ahead mask, which is then not read. On the CPU it is
            recognised without a hint.
        shape: (N, heads, L, S).

    Raises:
        TypeError: for a mask that is neither bool nor float.
        RuntimeError: for one of another shape.
    """
    if isinstance(attn_mask, TorchMask):
        return attn_mask
    if attn_mask is None and key_padding_mask is None and not is_causal:
        return _NOTHING
    original = (attn_mask, key_padding_mask, bool(is_causal))
    N, heads, L, S = shape
    keys, bias = AttentionMask(), None
    if attn_mask is not None:
        _check("attn_mask", attn_mask, ((L, S), (N * heads, L, S)))
    if is_look_ahead(attn_mask, is_causal):
        keys = AttentionMask.causal()
    elif attn_mask is not None:
        attn_mask = attn_mask.view(1, 1, L, S) if attn_mask.dim() == 2 else attn_mask.view(N, heads, L, S)
        if attn_mask.dtype == torch.bool:
            keys = AttentionMask(keep_mask=~attn_mask)
        else:
            bias = attn_mask
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, ((N, S), (S,)))
        key_padding_mask = key_padding_mask.view(N, 1, 1, S)
        if key_padding_mask.dtype == torch.bool:
            keys = AttentionMask(keys.keep_mask, ~key_padding_mask, causal_offset=keys.causal_offset)
        else:
            bias = key_padding_mask if bias is None else bias + key_padding_mask
    return TorchMask(keys, bias, original)


TorchMasks = tuple[Tensor | None, Tensor | None, bool]
"""``attn_mask``, ``key_padding_mask`` and ``is_causal``, as ``torch.nn`` passes them to a module."""


def original_masks(mask: Tensor | TorchMask | None, padding: Tensor | None, causal: bool) -> TorchMasks:
    """Return the masks as the caller of the stack gave them, for a module that was not swapped."""
    return mask.original if isinstance(mask, TorchMask) else (mask, padding, causal)


def encoder_masks(x: Tensor, mask: Tensor | TorchMask | None, padding: Tensor | None, causal: bool) -> TorchMasks:
    """Return the original masks as ``torch.nn``'s encoder passes them on: bool becomes 0 and -inf in x's dtype."""
    mask, padding, causal = original_masks(mask, padding, causal)
    return _added(mask, x), _added(padding, x), causal


def _added(mask: Tensor | None, x: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask, float("-inf"))


@unrecorded
def _check(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: expected bool (True = blocked) or float (added to the scores), got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise RuntimeError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def is_look_ahead(mask: Tensor | None, is_causal: bool | None) -> bool:
    """Return True if a mask is the square look-ahead mask, by the caller's hint or by its values.

    Values are read only on the CPU, where nothing waits, and in no graph.
    """
    if is_causal:
        return True
    if mask is None or is_traced() or mask.dim() != 2 or mask.shape[0] != mask.shape[1] or mask.requires_grad:
        return False
    if mask.device.type != "cpu" or torch.compiler.is_compiling() or type(mask) is not Tensor or in_transform():
        return False
    blocked = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    if mask.dtype != torch.bool:
        blocked = torch.zeros_like(mask).masked_fill_(blocked, float("-inf"))
    return torch.equal(mask, blocked)
