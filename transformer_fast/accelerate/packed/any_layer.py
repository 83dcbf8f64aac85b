"""Layers of any class around attention that runs on the kernels, without padding.

A layer's code is tried, not known. The layer is given tokens (1, T, d) as one sequence, and a mask of the kind that it
knows, which keeps all of them. Attention inside it reads the boundaries of the sentences from ``layers.token_mask``,
so the layer's code may do with its mask what it likes. A layer qualifies if the trial shows what its mask means, that
its output at a token depends on no padding, and that the output of tokens alone is the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...backends import in_transform
from ...layers.hooks import is_plain
from ...layers.padded_calls import WITHOUT_PADDING, PaddedCalls, StaysPaddedError, padded_calls
from ...layers.padder import Padder, hand_over, without_padding
from ...layers.token_mask import call_on_tokens, on_tokens
from ...masks import AttentionMask
from ...masks.packing import Packing, packing_of
from ...models.packed import padding_of
from ...tensor_cache import get_or_compute
from ...tracing import is_traced
from ..made import Made, change_of, is_as_proven, own_attributes
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
        meaning = self.meanings.get(_kind(mask)) if isinstance(mask, Tensor) else None
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
        stamp = None if mask.is_cuda else rows.numpy().tobytes()
        return get_or_compute(mask, ("tokens", meaning), (), lambda: packing_of(rows, *rows.shape, mask.device), stamp)

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
        trial = _Trial(layer, names[0], width)
        for name, length_first in itertools.product(known, (False, True)):
            way = Way(name, length_first, {})
            for mask, meaning in _masks(keep_of(torch.device("cpu"))):
                if _kind(mask) in way.meanings:
                    continue
                outcome = trial.outcome(dataclasses.replace(way, meanings={_kind(mask): meaning}), mask)
                if outcome == "":
                    way.meanings[_kind(mask)] = meaning
                why = outcome or why
            if way.meanings:
                return trial.obstacle(way) or way
    return why


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


class _Trial:
    """A layer's copy with random parameters and buffers: what is zero at first, such as the last weights of a branch,
    may grow later."""

    def __init__(self, layer: nn.Module, hidden: str, width: int) -> None:
        self.layer, self.hidden, self.width = copy_of(layer).eval(), hidden, width
        self.parameter = next(p for p in layer.parameters() if p.is_floating_point())
        made: dict[int, Tensor] = {}
        for module in self.layer.modules():
            for name, p in module._parameters.items():
                if p is not None and p.is_floating_point():
                    new = torch.randn(p.shape, device=p.device) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0)
                    module._parameters[name] = made.setdefault(id(p), nn.Parameter(new.to(p.dtype)))  # type: ignore
            for name, t in module._buffers.items():
                if t is not None:
                    new = torch.rand(t.shape, device=t.device) + 0.5 if t.is_floating_point() else t
                    module._buffers[name] = made.setdefault(id(t), new.to(t.dtype).clone())

    def run(self, way: Way, x: Tensor, mask: Tensor) -> Tensor:
        return way.turned(first(self.layer(**{self.hidden: way.turned(x), way.name: mask.to(x.device)})))

    def inputs(self, keep: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.parameter.device).manual_seed(0)
        options: dict[str, Any] = {"device": self.parameter.device, "dtype": self.parameter.dtype}
        x, noise = torch.randn(2, *keep.shape, self.width, generator=generator, **options)
        return x, torch.where(keep[..., None], x, noise)

    def outcome(self, way: Way, mask: Tensor) -> str | None:
        """Return "" if the layer takes this mask with this meaning, and runs on tokens; None if the mask means
        something else; or why the layer keeps its padding."""
        keep = keep_of(self.parameter.device)
        x, changed = self.inputs(keep)
        with torch.no_grad():
            try:
                expected, other = self.run(way, x, mask), self.run(way, changed, mask)
                unmasked = self.run(way, x, way.kept(mask, 1).expand(mask.shape))
            except Exception:
                return None
            if expected.shape != x.shape or not close(other[keep], expected[keep]):
                return None
            if close(unmasked[keep], expected[keep]):
                return None
            return self.difference(way, x, mask, keep)

    def difference(self, way: Way, x: Tensor, mask: Tensor, keep: Tensor) -> str:
        """Compare a call with the padding and one on tokens alone: results, and what both leave in the layer."""
        layer, former, calls = self.layer, type(self.layer), PaddedCalls()
        before, held = _buffers(layer), _tensors_of(layer)
        with torch.no_grad():
            expected, left = self.run(way, x, mask), _buffers(layer)
            if any(held.get(place) is not t for place, t in _tensors_of(layer).items()):
                return "it keeps tensors of a call"
            _restore(layer, before)
            layer.__class__ = packed_class(former, ANY_LAYER)
            layer.__dict__ |= {WAY: way, WITHOUT_PADDING: calls}
            try:
                actual = self.run(way, x, mask)
            finally:
                layer.__class__ = former
        same = all(map(torch.equal, left, before)) or all(map(close, _buffers(layer), left))
        _restore(layer, before)
        if calls.reasons:
            return next(iter(calls.reasons))
        if not same:
            return "what it notes of a batch depends on padding"
        same = not bool(actual[~keep].any()) and close(actual[keep], expected[keep])
        return "" if same else "its output for a token depends on other tokens beside its attention"

    def obstacle(self, way: Way) -> str:
        """Reason why a layer that runs on tokens in evaluation, in a small batch, does not in a larger one, or in
        training; or ""."""
        draws = _Draws()
        large = torch.arange(48) < torch.tensor([48, 3, 40, 17, 1, 29, 48, 8, 33])[:, None]
        for training, keep in ((False, large), (True, keep_of(torch.device("cpu"))), (True, large)):
            mask = next(mask for mask, meaning in _masks(keep) if way.meanings.get(_kind(mask)) == meaning)
            keep = keep.to(self.parameter.device)
            x, _ = self.inputs(keep)
            self.layer.train(training)
            before = _buffers(self.layer)
            with torch.no_grad(), draws:
                self.run(way, x, mask)
            _restore(self.layer, before)
            if draws.found:
                return "it draws random numbers that are not a dropout of single values"
            if training:
                _without_dropout(self.layer)
            if reason := self.difference(way, x, mask, keep):
                return reason
        return ""


class _Draws(TorchFunctionMode):
    """Notes draws of random numbers but those of ``F.dropout``."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") in _DRAWS
        return func(*args, **(kwargs or {}))


_DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_",
    "normal", "normal_", "uniform_", "random_", "exponential_", "multinomial", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout",
}  # fmt: skip


def _without_dropout(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, float) and re.search("drop|prob|rate|^p$", name):
                module.__dict__[name] = 0.0


def _buffers(layer: nn.Module) -> list[Tensor]:
    return [t.clone() for t in layer.buffers()]


def _restore(layer: nn.Module, values: list[Tensor]) -> None:
    for t, value in zip(layer.buffers(), values, strict=True):
        t.copy_(value)


def _tensors_of(layer: nn.Module) -> dict[tuple[int, str], Tensor]:
    """Tensors in attributes of a layer and the modules inside it, also in containers, that are no weights of a last
    call which are computed when they are read."""
    found = {}
    for place, module in enumerate(layer.modules()):
        for name, value in own_attributes(module):
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            found |= {(place, f"{name} {n}"): t for n, t in enumerate(values) if isinstance(t, Tensor)}
    return found
