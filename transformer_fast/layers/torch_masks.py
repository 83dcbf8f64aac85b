"""Masks of ``torch.nn``'s attention modules, converted to one normal form."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..backends import in_transform
from ..masks import AttentionMask


@dataclasses.dataclass(frozen=True, eq=False)
class TorchMask:
    """Normal form of ``attn_mask``, ``key_padding_mask`` and ``is_causal``, made once per stack.

    Attributes:
        keys: the blocked keys, as an AttentionMask.
        bias: float added to the scores: (N|1, heads|1, L|1, S) float, or None.
        original: the three arguments, for modules that were not swapped; a hint that the mask contradicts is False.
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
    """Convert masks of ``nn.MultiheadAttention``: bool True = blocked, float = added to the scores.

    Args:
        attn_mask: (L, S) or (N * heads, L, S); or a TorchMask, which is returned.
        key_padding_mask: (N, S), or (S,) for an unbatched input.
        is_causal: hint that ``attn_mask`` is the look-ahead mask. On the CPU the values decide: the mask is recognised
            without the hint, and wins over a hint that differs.
        shape: (N, heads, L, S).

    Raises:
        TypeError: for a mask that is neither bool nor float.
        RuntimeError: for a mask of another shape.
    """
    if isinstance(attn_mask, TorchMask):
        return attn_mask
    if attn_mask is None and key_padding_mask is None and not is_causal:
        return _NOTHING
    N, heads, L, S = shape
    keys, bias = AttentionMask(), None
    if attn_mask is not None:
        _check("attn_mask", attn_mask, ((L, S), (N * heads, L, S)))
    causal = is_look_ahead(attn_mask, is_causal)
    original = (attn_mask, key_padding_mask, bool(is_causal) and causal)
    if causal:
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
    """Return the masks that the stack was called with, for a module that was not swapped."""
    return mask.original if isinstance(mask, TorchMask) else (mask, padding, causal)


def encoder_masks(x: Tensor, mask: Tensor | TorchMask | None, padding: Tensor | None, causal: bool) -> TorchMasks:
    """Return the original masks in the form that ``torch.nn``'s encoder passes to layers: bool becomes 0 and -inf in
    x's dtype."""
    mask, padding, causal = original_masks(mask, padding, causal)
    return _additive_mask(mask, x), _additive_mask(padding, x), causal


def _additive_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask, float("-inf"))


def _check(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: expected bool (True = blocked) or float (added to the scores), got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise RuntimeError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def is_look_ahead(mask: Tensor | None, is_causal: bool | None) -> bool:
    """Return True if a mask is the look-ahead mask: by its values, or by the caller's hint if these are not read.

    So a mask wins over a hint that differs. The values are read only on the CPU, where reading is immediate, and never
    while a graph is made. A mask that requires a gradient is no constant. With the hint, a mask by head is read too.
    """
    if mask is None:
        return bool(is_causal)
    if mask.requires_grad:
        return False
    if not _is_readable(mask):
        return bool(is_causal)
    if mask.dim() not in ((2, 3) if is_causal else (2,)):
        return False
    fill = True if mask.dtype == torch.bool else float("-inf")
    blocked = torch.full(mask.shape[-2:], fill, dtype=mask.dtype, device=mask.device).triu_(1)
    return torch.equal(mask, blocked.expand_as(mask))


def _is_readable(mask: Tensor) -> bool:
    if mask.device.type != "cpu" or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    return not (torch.compiler.is_compiling() or type(mask) is not Tensor or in_transform())
