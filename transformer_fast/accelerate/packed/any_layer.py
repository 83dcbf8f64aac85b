"""Layers of any class around attention that runs on the kernels, without padding.

A layer's code is tried, not known. The layer is given tokens (1, T, d) as one sequence, and a mask of the kind that it
knows, which keeps all of them. Attention inside it reads the boundaries of the sentences from ``layers.token_mask``,
so the layer's code may do with its mask what it likes. A layer qualifies if the trial shows what its mask means, that
its output at a token depends on no padding, and that the output of tokens alone is the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.hooks import is_plain
from ...layers.padded_calls import WITHOUT_PADDING, PaddedCalls, StaysPaddedError, padded_calls
from ...layers.padder import Padder, hand_over, without_padding
from ...layers.token_mask import call_on_tokens, on_tokens
from ...masks import AttentionMask
from ...masks.packing import Packing, packing_of
from ...models.packed import padding_of
from ...tensor_cache import get_or_compute
from ...tracing import is_traced
from .classes import JUDGED, Arguments, Forward, packed_class, part, positional_names
from .trial import close, copy_of, first, keep_of

ANY_LAYER = "any layer"
"""Name of this part."""
WAY = "_packed_way"
"""Attribute of such a layer: its :class:`Way`."""

MASKS = (
    "mask", "masks", "attn_mask", "attention_mask", "att_mask", "src_mask", "src_key_padding_mask", "key_padding_mask",
    "encoder_padding_mask", "padding_mask", "pad_mask", "slf_attn_mask", "self_attn_mask", "x_mask",
)  # fmt: skip
"""Names of the argument that says where the padding is."""
LOWEST = -1e4
"""Number that hides a key when it is added to a score, or a lower one."""
_DTYPES = {
    torch.bool: ("keep", "blocked"),
    torch.int64: ("keep", "blocked"),
    torch.float32: ("added", "keep", "blocked"),
}
_MIXES_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that read other positions in training alone, which no trial in evaluation shows."""

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

    def turned(self, x: Tensor) -> Tensor:
        """Exchange the axes of length and batch if the layer has them in the other order; keep the tokens that x
        holds."""
        return hand_over(x, x.transpose(0, 1)) if self.length_first else x

    def packing(self, mask: Any, batch: int, length: int) -> Packing:
        """Packing of a batch with this mask.

        Raises:
            StaysPaddedError: if the mask is not padding alone.
        """
        meaning = self.meanings.get(_kind(mask)) if isinstance(mask, Tensor) else None
        if meaning is None:
            raise StaysPaddedError(f"its {self.name} is of a kind that its trial has not seen")
        keep = _four_dimensions(mask != 0 if meaning == "keep" else mask == 0)
        if meaning == "added" and not bool(((mask == 0) | (mask <= LOWEST)).all()):
            raise StaysPaddedError(f"its {self.name} holds scores, not padding alone")
        try:
            parts = padding_of(AttentionMask.keep(keep), length)
        except ValueError as reason:
            raise StaysPaddedError(str(reason)) from reason
        assert parts is not None and parts.key_keep_mask is not None
        rows = parts.key_keep_mask[:, 0, 0].expand(batch, length)
        # One packing for all layers of a batch. On a CPU the values are compared, because writes may go unnoticed.
        stamp = None if mask.is_cuda else rows.numpy().tobytes()
        return get_or_compute(
            mask, ("tokens", batch, meaning), (), lambda: packing_of(rows, *rows.shape, mask.device), stamp
        )

    def kept(self, mask: Tensor, tokens: int) -> Tensor:
        """Mask of the same kind that keeps all tokens."""
        shape = (*[1] * (mask.dim() - 1), tokens)
        return mask.new_full(shape, self.meanings[_kind(mask)] == "keep")


def _kind(mask: Tensor) -> Kind:
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
    """Make the ``forward`` of a layer: hidden states first, then its mask and arguments without tensors."""
    names = positional_names(base.forward)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls, arguments = padded_calls(self), Arguments(names, args, kwargs)
        given = arguments.given
        x, way = given.get(names[0]), self.__dict__.get(WAY)
        runs = calls is not None and way is not None and arguments.fits and call_on_tokens() is None
        if not runs or torch.compiler.is_compiling() or is_traced() or type(x) is not Tensor or x.dim() != 3:
            return base.forward(self, *args, **kwargs)
        if (mask := given.get(way.name)) is None:
            return base.forward(self, *args, **kwargs)

        def prepare() -> tuple[Padder, Callable[[], Any]]:
            _check(self, given, {names[0], way.name})
            padded = way.turned(x)
            padder = Padder(way.packing(mask, *padded.shape[:2]))
            padder.check_sources()
            (tokens,) = padder.remove(padded)
            kept = way.kept(mask, padder.own.total)
            own, named = arguments.replaced({names[0]: tokens.unsqueeze(int(way.length_first)), way.name: kept})

            def run() -> Any:
                with on_tokens(padder.masks[0]) as call:
                    try:
                        result = base.forward(self, *own, **named)
                    except StaysPaddedError:
                        raise
                    except Exception as error:  # an error of the author comes again, with the padding
                        raise StaysPaddedError(f"its code fails on tokens ({type(error).__name__})") from error
                tokens, *others = result if isinstance(result, tuple) else (result,)
                others = [mask if other is kept else other for other in others]
                if any(isinstance(other, Tensor) and other is not mask for other in others):
                    raise StaysPaddedError("it returns more than hidden states")
                call.check_weights()
                tokens = tokens.squeeze(int(way.length_first))
                return (tokens, *others) if isinstance(result, tuple) else tokens

            return padder, run

        result = without_padding(self, calls, x, prepare)
        if result is None:
            return base.forward(self, *args, **kwargs)
        return (way.turned(result[0]), *result[1:]) if isinstance(result, tuple) else way.turned(result)

    return forward


def _check(layer: nn.Module, given: dict[str, Any], known: set[str]) -> None:
    """Raise StaysPaddedError if a layer cannot run on tokens as it was tried."""
    judged = layer.__dict__.get(JUDGED)
    if judged is not None and not judged.fits():
        raise StaysPaddedError(f"a module inside a {type(layer).__name__} was replaced since accelerate")
    for child in layer.modules():
        if child is not layer and not is_plain(child):
            raise StaysPaddedError(
                f"a {type(child).__name__} inside a layer has a hook, which would see tokens without padding"
            )
    for name, value in given.items():
        if name not in known and isinstance(value, Tensor | list | tuple | dict):
            raise StaysPaddedError(f"its layers are given {name}, whose layout is unknown")


def judge_any(layer: nn.Module, width: int) -> Way | str:
    """Way of a layer, found by its trial; or the reason why it keeps its padding.

    Args:
        layer: any module whose attention was swapped by its structure.
        width: of its hidden states.
    """
    kind, names = type(layer).__name__, positional_names(type(layer).forward)
    if not (known := [name for name in names[1:] if name in MASKS]):
        return f"{kind}.forward has no argument that is known as a mask"
    if any(isinstance(module, _MIXES_BATCH) for module in layer.modules()):
        return f"a module inside {kind} reads several positions in training"
    why = f"no mask that {kind} takes hides padding alone"
    with torch.random.fork_rng(devices=[]):
        trial = _randomised(copy_of(layer)).eval()
        for name, length_first in itertools.product(known, (False, True)):
            way = Way(name, length_first, {})
            for mask, meaning in _masks(keep_of(torch.device("cpu"))):
                if _kind(mask) in way.meanings:
                    continue
                outcome = _outcome(trial, names[0], way, width, mask, meaning)
                if outcome == "":
                    way.meanings[_kind(mask)] = meaning
                why = outcome or why
            if way.meanings:
                return way
    return why


def _randomised(trial: nn.Module) -> nn.Module:
    """Give a copy random parameters: what is zero at first, such as the last layer of a branch, may grow later."""
    made: dict[int, nn.Parameter] = {}
    for module in trial.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_floating_point():
                scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0
                new = torch.randn(p.shape, device=p.device) * scale
                module._parameters[name] = made.setdefault(id(p), nn.Parameter(new.to(p.dtype)))
    return trial


def _masks(keep: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Masks (B, L), (B, 1, L), (B, 1, 1, L), (B, L, L) and (B, 1, L, L) of each dtype and meaning."""
    square = keep[:, None].expand(-1, keep.shape[1], -1)
    shapes = keep, keep[:, None], keep[:, None, None], square, square[:, None]
    for (dtype, meanings), shape in itertools.product(_DTYPES.items(), shapes):
        for meaning in meanings:
            if meaning == "added":
                yield torch.zeros(shape.shape, dtype=dtype).masked_fill(~shape, LOWEST), meaning
            else:
                yield (shape if meaning == "keep" else ~shape).to(dtype), meaning


def _outcome(trial: nn.Module, hidden: str, way: Way, width: int, mask: Tensor, meaning: str) -> str | None:
    """Return "" if a layer takes this mask with this meaning, and runs on tokens; None if the mask means something
    else; or why the layer keeps its padding."""
    parameter = next(p for p in trial.parameters() if p.is_floating_point())
    options: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
    keep, former, calls = keep_of(parameter.device), type(trial), PaddedCalls()
    generator = torch.Generator(parameter.device).manual_seed(0)
    x, noise = torch.randn(2, *keep.shape, width, generator=generator, **options)
    way, mask = Way(way.name, way.length_first, {_kind(mask): meaning}), mask.to(parameter.device)

    def run(x: Tensor, mask: Tensor) -> Tensor:
        return way.turned(first(trial(**{hidden: way.turned(x), way.name: mask})))

    with torch.no_grad():
        try:
            expected, other = run(x, mask), run(torch.where(keep[..., None], x, noise), mask)
            unmasked = run(x, way.kept(mask, 1).expand(mask.shape))
        except Exception:
            return None
        if expected.shape != x.shape or not close(other[keep], expected[keep]) or close(unmasked[keep], expected[keep]):
            return None
        trial.__class__ = packed_class(former, ANY_LAYER)
        trial.__dict__ |= {WAY: way, WITHOUT_PADDING: calls}
        try:
            actual = run(x, mask)
        finally:
            trial.__class__ = former
    if calls.reasons:
        return next(iter(calls.reasons))
    same = not bool(actual[~keep].any()) and close(actual[keep], expected[keep])
    return "" if same else "its output for a token depends on other tokens beside its attention"
