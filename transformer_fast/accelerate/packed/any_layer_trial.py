"""Trial of a layer of any class: what its mask means, and if it computes the same on tokens alone."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...layers.padded_calls import WITHOUT_PADDING, PaddedCalls
from ...ops import seeds
from ..made import own_attributes
from .any_layer import ANY_LAYER, LOWEST, WAY, Way, kind_of
from .classes import packed_class, positional_names
from .trial import close, copy_of, first, keep_of

MASKS = (
    "mask", "masks", "attn_mask", "attention_mask", "att_mask", "src_mask", "src_key_padding_mask", "key_padding_mask",
    "encoder_padding_mask", "padding_mask", "pad_mask", "slf_attn_mask", "self_attn_mask", "x_mask",
)  # fmt: skip
"""Names of the argument that says where the padding is."""
_DTYPES = {
    torch.bool: ("keep", "blocked"),
    torch.int64: ("keep", "blocked"),
    torch.float32: ("added", "keep", "blocked"),
}
_MIXES_BATCH = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that read other positions in training alone, which no trial in evaluation shows."""


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
                if kind_of(mask) in way.meanings:
                    continue
                outcome = trial.outcome(dataclasses.replace(way, meanings={kind_of(mask): meaning}), mask)
                if outcome == "":
                    way.meanings[kind_of(mask)] = meaning
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
            mask = next(mask for mask, meaning in _masks(keep) if way.meanings.get(kind_of(mask)) == meaning)
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
    """Notes draws of random numbers but those of ``F.dropout`` and of the seeds of our dropout."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = getattr(func, "__name__", "") in _DRAWS
        self.found |= draws and sys._getframe(1).f_globals.get("__name__") != seeds.__name__
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
    """Tensors in attributes of a layer and the modules inside it, also in containers. Attention weights that are
    computed when they are read are none."""
    found = {}
    for place, module in enumerate(layer.modules()):
        for name, value in own_attributes(module):
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            found |= {(place, f"{name} {n}"): t for n, t in enumerate(values) if isinstance(t, Tensor)}
    return found
