"""Trial of layers that a user registers as computing each token alone outside of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.padded_calls import NO_SOURCE, StaysPaddedError, padded_calls
from ..ops.token_mask import OnTokens
from .accelerate import accelerate
from .check import Call, Pair, copy_of, tensors_in
from .check_fast import Sample, UserTrial, undisturbed
from .token_layer import LOWEST, TokenLayer, positional_names, seen

_MIXES_POSITIONS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_NO_TOKEN = "a sentence without tokens"


def check_tokens(kind: type[nn.Module], layer: TokenLayer, samples: list[Sample]) -> TokenLayer:
    """Compare layers of a registered class with the padding and without: at each token, results and gradients are
    equal. Return the statement, with what the calls have shown.

    Raises:
        ValueError: if the layers differ, or keep their padding.
    """
    reads, redirects = set(), False
    for module, calls in samples:
        for part in module.modules():
            if isinstance(part, _MIXES_POSITIONS):
                raise ValueError(
                    f"register: a {type(part).__name__} inside {kind.__name__} reads several positions in training"
                )
        try:
            with seen() as on_tokens, undisturbed(module):
                trial = _TokenTrial(kind, layer, on_tokens)
                padded = [padded for call in calls for padded in trial.padded(call)]
                if not padded:
                    raise ValueError(
                        "its inputs have no room for padding: give at least 2 sequences of at least 3 positions"
                    )
                trial.run_all(module, padded, buffers=True)
            if trial.error > 1.0:
                raise ValueError(trial.text)
        except ValueError as error:
            text = f"{kind.__name__} does not compute each token alone, or {layer.mask} does not mean {layer.means!r}"
            raise ValueError(f"register: {text}: {error}") from error
        reads |= {call.reads for call in on_tokens}
        redirects |= any(call.redirected for call in on_tokens)
    return dataclasses.replace(layer, reads=frozenset(reads), redirects=redirects)


class _TokenTrial(UserTrial):
    """Trial of a layer with padding and without.

    Attributes:
        states: tensors that are hidden states, by identity.
    """

    def __init__(self, kind: type[nn.Module], layer: TokenLayer, seen_calls: list[OnTokens]) -> None:
        super().__init__("the accelerated layer")
        self.layer, self.seen = layer, seen_calls
        self.names = positional_names(kind.forward)  # that of the hidden states first
        self.states: set[int] = set()

    def make(self, plain: nn.Module) -> nn.Module:
        """Accelerate a copy of a layer."""
        fast = copy_of(plain)
        accelerate(nn.ModuleList([fast]), packed=True).padded_calls.warns = False
        return fast

    def trained(self, t: Tensor) -> bool:
        """Return True for hidden states."""
        return id(t) in self.states

    def run(self, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden states at tokens."""
        result = module(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if not isinstance(first, Tensor) or first.dim() != 3:
            raise TypeError(f"it returns {type(first).__name__}, expected hidden states (B, L, d)")
        first = self.layer.as_batch_first(first)
        return first[call.keep.to(first.device)]

    def compare(self, pair: Pair, call: Any, *others: Any, **how: Any) -> None:
        """Compare a call at its tokens, and test that the padding was left out."""
        if self.of_features:
            raise ValueError("it drops whole features, which reads several positions")
        calls, before = padded_calls(pair.fast), _stored(pair.fast)
        if calls is None:
            raise ValueError("accelerate leaves it as it is")
        calls.reasons.clear()
        number = len(self.seen)
        super().compare(pair, call, *others, **how)
        expected = {NO_SOURCE} if not bool(call.keep.any(1).all()) else set()
        if left := calls.reasons.keys() - expected:
            reason = next(iter(left))
            advice = "; register the class of its attention first" if reason.startswith("0 attentions") else ""
            raise ValueError(f"{reason}{advice} ({call.where})")
        if not expected and len(self.seen) < number + 2:  # in evaluation and in training
            raise ValueError(f"its accelerated class runs with the padding ({call.where})")
        for place, tensor in _stored(pair.fast).items():
            if before.get(place) is not tensor:
                raise ValueError(f"it keeps tensors of a call in {place}")

    def padded(self, call: Call) -> Iterator[Call]:
        """Yield a call with padding in several places; for given inputs without further tensors also with the batch
        size equal to the length.

        Raises:
            ValueError: if hidden states or mask are missing or have another shape.
        """
        values = dict(zip(self.names, call.args)) | call.kwargs
        x, mask = values.pop(self.names[0], None), values.pop(self.layer.mask, None)
        if not isinstance(x, Tensor) or x.dim() != 3 or not isinstance(mask, Tensor):
            order = "(B, L, d)" if self.layer.batch_first else "(L, B, d)"
            raise ValueError(
                f"its inputs must have {self.names[0]} {order} and a tensor {self.layer.mask} ({call.where})"
            )
        yield from self._with_masks(call, x, mask)
        batch, length = self.layer.as_batch_first(x).shape[:2]
        size, more = min(batch, length), any(isinstance(value, Tensor) for value in values.values())
        if call.where.startswith("the given") and batch != length and size > 1 and not more:
            x = x[:size, :size]
            mask = mask[:size, ..., :size]
            if mask.dim() > 2 and mask.shape[-2] == length:
                mask = mask[..., :size, :]
            call = dataclasses.replace(call, where=f"{call.where}, cut to {size} of {size} positions")
            yield from self._with_masks(call, x, mask)

    def _with_masks(self, call: Call, x: Tensor, mask: Tensor) -> Iterator[Call]:
        self.states.add(id(x))
        batch, length = self.layer.as_batch_first(x).shape[:2]
        try:
            own = self.layer.keep_of(mask, batch, length).cpu().expand(batch, length)
        except StaysPaddedError as reason:
            raise ValueError(f"{reason} ({call.where})") from reason
        keeps = {"its mask": own} if bool(own.any(1).all()) and not bool(own.all()) else {}
        for where, keep in {**keeps, **_paddings(batch, length)}.items():
            new = {self.names[0]: x, self.layer.mask: self.written(mask, keep)}
            args = tuple(new.get(name, value) for name, value in zip(self.names, call.args))
            kwargs = {name: new.get(name, value) for name, value in call.kwargs.items()}
            yield Call(args, kwargs, f"{call.where}, {where}", may_fail=where == _NO_TOKEN, keep=keep)

    def written(self, mask: Tensor, keep: Tensor) -> Tensor:
        """Mask for these tokens, of the same kind."""
        keep = keep.to(mask.device).view(len(keep), *[1] * (mask.dim() - 2), -1).expand(mask.shape)
        if self.layer.means != "added":
            return (keep if self.layer.means == "keep" else ~keep).to(mask.dtype)
        lowest = min(float(mask.min()), LOWEST)
        return torch.zeros_like(mask).masked_fill(~keep, lowest)


def _paddings(batch: int, length: int) -> dict[str, Tensor]:
    """Tokens of a batch, bool (B, L), by the place of the padding."""
    if length < 2:
        return {}
    positions, rows = torch.arange(length), torch.arange(batch)[:, None]
    end = positions < (length - 1 - rows * max(1, length // (batch + 1))).clamp(min=1)
    found = {"padding at the end": end, "first key hidden": positions.expand(batch, -1) > 0}
    if length > 2:
        found["a gap"] = end | (positions == length - 1)
    if batch > 1:
        found[_NO_TOKEN] = end & (rows > 0)
    return found


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """Tensors in attributes of a module and the modules inside, also in containers, but parameters and buffers."""
    named = [(f"{path}.{name}".lstrip("."), t) for path, m in module.named_modules() for name, t in tensors_in(m)]
    held = {id(t) for t in (*module.parameters(), *module.buffers())}
    return {name: t for name, t in named if id(t) not in held}
