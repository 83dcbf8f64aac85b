"""The stacks of ``torch.nn`` computed without padding, for ``accelerate(model, packed=True)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..masks.packing import packings_of
from .dropout import KINDS as DROPOUTS
from .hooks import TAKES_RESIDUAL, has_role, is_plain
from .linear import Linear
from .padded_calls import StaysPaddedError, padded_calls
from .padder import Padder, covers, held_packing, left_out, without_padding
from .torch_masks import TorchMasks, is_look_ahead
from .torch_modules import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, is_replaced

_encoder_stays: ContextVar[str] = ContextVar("encoder_stays", default="")
"""Reason why encoders keep their padding, or ""."""


@contextlib.contextmanager
def encoder_read_by(memory_padding: Tensor | None, source_padding: Tensor | None) -> Iterator[None]:
    """Let encoders keep padding that their decoder reads.

    Args:
        memory_padding, source_padding: padding masks of the decoder's source and of the encoder, as ``torch.nn`` takes
            them; None for none.
    """
    reads = source_padding is not None and memory_padding is not source_padding
    if reads and memory_padding is not None and memory_padding.shape == source_padding.shape:  # type: ignore[union-attr]
        reads = bool((_is_hidden(source_padding) & ~_is_hidden(memory_padding)).any())
    token = _encoder_stays.set("its decoder reads padding (memory_key_padding_mask)" if reads else "")
    try:
        yield
    finally:
        _encoder_stays.reset(token)


def _is_hidden(padding: Any) -> Tensor:
    return padding if padding.dtype == torch.bool else padding == float("-inf")


def packed_stack(stack: nn.Module, *inputs: tuple[Tensor, TorchMasks]) -> Tensor | None:
    """Output of an encoder or a decoder, zero at padded positions; None if the stack must run with the padding.

    Args:
        stack: the stack, swapped.
        inputs: the hidden states and their masks, as ``torch.nn`` takes them; of a decoder the encoder's outputs too.
    """
    calls, (x, _) = padded_calls(stack), inputs[0]
    in_graph = torch.compiler.is_compiling()
    if calls is None or in_graph or type(x) is not Tensor or any(t.dim() != 3 for t, _ in inputs):
        return None
    turned = (lambda t: t) if stack.layers[0].self_attn.batch_first else (lambda t: t.transpose(0, 1))  # type: ignore

    def prepare() -> tuple[Padder, Callable[[], Any]] | None:
        tensors = [turned(t) for t, _ in inputs]
        keeps, blocks, causal = zip(*(_padding(t, masks) for t, (_, masks) in zip(tensors, inputs)))
        if all(keep is None for keep in keeps):
            return None
        batches = [(keep, *t.shape[:2], x.device) for keep, t in zip(keeps, tensors)]
        before = [None if keep is None else held_packing(t) for (t, _), keep in zip(inputs[1:], keeps[1:])]
        orders = [covers(held, keep) for held, keep in zip(before, keeps[1:]) if held is not None]
        blocked = [flag for flag in blocks if flag is not None]
        packings, flags = packings_of(batches, [*orders, *blocked])  # one read
        only_block = flags[len(orders) :]
        if not all(flags[: len(orders)]):
            raise RuntimeError(left_out(stack))
        if not all(only_block):
            raise StaysPaddedError("its padding mask is a float tensor, which is added to the scores")
        if len(inputs) == 1 and (reason := _encoder_stays.get()):
            raise StaysPaddedError(reason)
        padder = Padder(*packings, causal=causal[0])

        def run() -> Tensor:
            if any(causal[1:]):
                raise StaysPaddedError("its attention to the encoder has a look-ahead mask")
            _check_parts(stack)
            y, *others = (*padder.remove(*tensors), *padder.masks)
            for layer in stack.layers:  # type: ignore[union-attr]
                y = layer(y, *others)
            return y if stack.norm is None else stack.norm(y)  # type: ignore[operator]

        return padder, run

    result = without_padding(stack, calls, x, prepare)
    return None if result is None else turned(result)


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
        and all(is_plain(m, nn.Linear, Linear) for m in (layer.linear1, layer.linear2))
    )


def _check_parts(stack: nn.Module) -> None:
    if not all(map(takes_packed, stack.layers)):  # type: ignore[arg-type]
        raise StaysPaddedError("a layer has a hook, or an unknown submodule")
    if stack.norm is not None and not has_role(stack.norm, TAKES_RESIDUAL):  # type: ignore[arg-type]
        raise StaysPaddedError("its last norm has a hook, or is of an unknown class")


def _padding(x: Tensor, masks: TorchMasks) -> tuple[Tensor | None, Tensor | None, bool]:
    """Bool (N, L), True at tokens, or None; of a float mask bool (), True if it only blocks; True for a look-ahead."""
    mask, padding, is_causal = masks
    causal, keep, blocks = is_look_ahead(mask, is_causal), None, None
    if padding is not None:
        if tuple(padding.shape) != tuple(x.shape[:2]):
            return None, None, False  # invalid, so that the layers raise their error
        keep = ~padding if padding.dtype == torch.bool else padding == 0
        if padding.dtype != torch.bool:
            blocks = (keep | (padding == float("-inf"))).all()
    if mask is not None and not causal:
        raise StaysPaddedError("its mask is not the look-ahead mask")
    return keep, blocks, causal
