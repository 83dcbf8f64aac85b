"""Layers of any class around attention that runs on the kernels, without padding.

A layer's code is tried, not known. The layer is given tokens (1, T, d) as one sequence, and a mask of the kind that it
knows, which keeps all of them. Attention inside it reads the boundaries of the sentences from ``layers.token_mask``,
so the layer's code may do with its mask what it likes. A layer qualifies if the trial shows what its mask means, that
its output at a token depends on no padding, and that the output of tokens alone is the same.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...backends import in_transform
from ...layers.hooks import is_plain
from ...layers.padded_calls import StaysPaddedError, padded_calls
from ...layers.padder import Padder, hand_over, without_padding
from ...layers.token_mask import call_on_tokens, on_tokens
from ...masks import AttentionMask
from ...masks.packing import Packing, packing_of
from ...models.packed import padding_of
from ...tensor_cache import get_or_compute
from ...tracing import is_traced
from ..made import Made, change_of, is_as_proven
from .classes import JUDGED, Arguments, Forward, part, positional_names

ANY_LAYER = "any layer"
"""Name of this part."""
WAY = "_packed_way"
"""Attribute of such a layer: its :class:`Way`."""

LOWEST = -1e4
"""Number that hides a key when it is added to a score, or a lower one."""

Kind = tuple[bool, bool, int, bool]
"""Kind of a mask: if it is bool, if it is a float, number of its dimensions, and if it has a row per query."""


@dataclasses.dataclass(frozen=True)
class Way:
    """Argument that tells a layer where the padding is.

    Attributes:
        name: argument of its forward.
        length_first: True if hidden states are (L, B, d).
        meanings: what a mask of a kind means: "keep" (0 hides a key), "blocked" (0 keeps it) or "added" (to a score).
    """

    name: str
    length_first: bool
    meanings: dict[Kind, str]

    @property
    def axis(self) -> int:
        """Axis of the batch."""
        return int(self.length_first)

    def turned(self, x: Tensor) -> Tensor:
        """Exchange the axes of length and batch if the layer has them in the other order; keep the tokens that x
        holds."""
        return hand_over(x, x.transpose(0, 1)) if self.length_first else x

    def packing(self, mask: Any, batch: int, length: int) -> Packing:
        """Packing of a batch with this mask.

        Raises:
            StaysPaddedError: if the mask is not padding alone.
        """
        meaning = self.meanings.get(kind_of(mask)) if isinstance(mask, Tensor) else None
        if meaning is None or mask.requires_grad or (mask.shape[0], mask.shape[-1]) != (batch, length):
            raise StaysPaddedError(f"its {self.name} is of a kind that its trial has not seen")
        other = mask <= LOWEST if meaning == "added" else mask == 1
        if mask.dtype != torch.bool and not bool(((mask == 0) | other).all()):
            raise StaysPaddedError(f"its {self.name} holds scores, not padding alone")
        keep = _four_dimensions(mask != 0 if meaning == "keep" else mask == 0)
        try:
            parts = padding_of(AttentionMask.keep(keep), length)
        except ValueError as reason:
            raise StaysPaddedError(str(reason)) from reason
        assert parts is not None and parts.key_keep_mask is not None
        rows = parts.key_keep_mask[:, 0, 0]
        # One packing for all layers of a batch. On a CPU the values are compared, because writes may go unnoticed.
        stamp = rows.numpy().tobytes() if mask.is_cpu else None
        return get_or_compute(mask, ("tokens", meaning), (), lambda: packing_of(rows, *rows.shape, mask.device), stamp)

    def kept(self, mask: Tensor, tokens: int) -> Tensor:
        """Mask of the same kind that keeps all tokens."""
        shape = (*[1] * (mask.dim() - 1), tokens)
        return mask.new_full(shape, self.meanings[kind_of(mask)] == "keep")


def kind_of(mask: Tensor) -> Kind:
    per_query = mask.dim() > 2 and mask.shape[-2] > 1
    return mask.dtype == torch.bool, mask.is_floating_point(), mask.dim(), per_query


def _four_dimensions(keep: Tensor) -> Tensor:
    """Convert a mask (B, L), (B, L|1, L) or (B, 1, L|1, L) to one of four dimensions.

    Raises:
        StaysPaddedError: for a mask with more than one head.
    """
    if keep.dim() == 4 and keep.shape[1] != 1:
        raise StaysPaddedError("its mask has heads of its own")
    return keep if keep.dim() == 4 else keep[:, None] if keep.dim() == 3 else keep[:, None, None]


@part(ANY_LAYER)
def any_layer_forward(base: type[nn.Module]) -> Forward:
    """Make the ``forward`` of a layer: hidden states first, then its mask; all else has its default."""
    names = positional_names(base.forward)
    defaults = {name: p.default for name, p in inspect.signature(base.forward).parameters.items()}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls, arguments = padded_calls(self), Arguments(names, args, kwargs)
        given = arguments.given
        x, way = given.get(names[0]), self.__dict__.get(WAY)
        runs = calls is not None and way is not None and arguments.fits and call_on_tokens() is None
        if not runs or torch.compiler.is_compiling() or is_traced() or in_transform():
            return base.forward(self, *args, **kwargs)
        if type(x) is not Tensor or x.dim() != 3 or (mask := given.get(way.name)) is None:
            return base.forward(self, *args, **kwargs)

        def prepare() -> tuple[Padder, Callable[[], Any]]:
            _check(self, given, {names[0], way.name}, defaults)
            padded = way.turned(x)
            padder = Padder(way.packing(mask, *padded.shape[:2]))
            padder.check_sources()
            (tokens,) = padder.remove(padded)
            kept = way.kept(mask, padder.own.total)
            own, named = arguments.replaced({names[0]: tokens.unsqueeze(way.axis), way.name: kept})

            def run() -> Any:
                with on_tokens(padder.masks[0]) as call:
                    try:
                        result = base.forward(self, *own, **named)
                    except StaysPaddedError:
                        raise
                    except Exception as error:  # an error of the author comes again, with the padding
                        raise StaysPaddedError(f"its code fails on tokens ({type(error).__name__})") from error
                first, *others = result if isinstance(result, tuple) else (result,)
                others = [mask if other is kept else other for other in others]
                size = 1, padder.own.total
                if type(first) is not Tensor or first.dim() != 3 or tuple(way.turned(first).shape[:2]) != size:
                    raise StaysPaddedError("it returns something else than hidden states")
                if not all(other is mask or other is None for other in others):
                    raise StaysPaddedError("it returns more than hidden states, such as attention weights")
                call.check_weights()
                tokens = first.squeeze(way.axis)
                return (tokens, *others) if isinstance(result, tuple) else tokens

            return padder, run

        result = without_padding(self, calls, x, prepare)
        if result is None:
            return base.forward(self, *args, **kwargs)
        return (way.turned(result[0]), *result[1:]) if isinstance(result, tuple) else way.turned(result)

    return forward


def _check(layer: nn.Module, given: dict[str, Any], known: set[str], defaults: dict[str, Any]) -> None:
    """Raise StaysPaddedError if a layer cannot run on tokens as it was tried."""
    judged = layer.__dict__.get(JUDGED)
    if judged is not None and not judged.fits():
        raise StaysPaddedError(f"a module inside a {type(layer).__name__} was replaced since accelerate")
    for child in layer.modules():
        if child is not layer and not is_plain(child):
            raise StaysPaddedError(
                f"a {type(child).__name__} inside a layer has a hook, which would see tokens without padding"
            )
        if isinstance(child, Made) and not is_as_proven(child):
            raise StaysPaddedError(f"a {type(child).__name__}: {change_of(child)}")
    for name, value in given.items():
        if name not in known and value is not None and value is not defaults.get(name, value is None):
            raise StaysPaddedError(f"its layers are given {name}, which their trial had not")
