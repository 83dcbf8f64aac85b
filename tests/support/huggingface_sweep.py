"""Comparison of a model of transformers with attn_implementation="transformer_fast" and the same model with "eager"."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import huggingface_models as models
import torch
from torch import Tensor, nn

import transformer_fast.huggingface.attention as integration
from transformer_fast import ops
from transformer_fast.huggingface import interface
from transformer_fast.testing import errors

ULPS = 8.0
EQUAL, UNTOUCHED, ALONE = "equal", "equal, nothing to replace", "equal, by attention of its own"
REFUSED, NO_SUCH_LAYER, NOT_MADE = "refused", "its layers are chosen from a table", "not made"


def sides(case: models.Case) -> list[str]:
    """Return the padding sides for a case."""
    if case.kind in ("image", "image to text"):
        return ["none"]
    return ["none", "right", "left"] if "text" in case.kind or case.kind in models.LANGUAGE else ["none", "right"]


def verdict(case: models.Case) -> tuple[str, str]:
    """Return (verdict, message of the refusal or reason why the model cannot be made).

    Attention of its own is compared with eager alone: it may see what comes later, or have no fp64.

    Raises:
        AssertionError: where the numbers are not those of eager, or a causal model sees what comes later.
        Exception: any other that the model raises, with "transformer_fast" alone.
    """
    try:
        eager = models.make(case, "eager")
        models.enlarge(eager)
        for side in sides(case):
            _logits(eager, models.inputs(case, side))
    except Exception as error:
        return NOT_MADE, f"{type(error).__name__}: {error}"
    calls: list[None] = []
    try:
        model = models.make(case, integration.NAME)
    except KeyError as error:
        assert error.args == (integration.NAME,)
        return NO_SUCH_LAYER, str(error)
    model.load_state_dict(eager.state_dict())
    try:
        with _counted(calls):
            for side in sides(case):
                _logits(model, models.inputs(case, side))
            if calls:
                three = Three(model, eager, copy.deepcopy(eager).double())
                for side in sides(case):
                    _hold(case, three, side)
                return EQUAL, ""
    except NotImplementedError as error:
        return REFUSED, str(error)
    for side in sides(case):
        expected = _logits(eager, models.inputs(case, side))
        torch.testing.assert_close(_logits(model, models.inputs(case, side)), expected, equal_nan=True)
    return (UNTOUCHED if interface.can_use(type(model)) else ALONE), ""


class Three:
    """A model with our attention, the same with eager attention, and the same in fp64."""

    def __init__(self, model: nn.Module, eager: nn.Module, exact: nn.Module) -> None:
        self.model, self.eager, self.exact = model, eager, exact

    def hold(self, run: Callable[[nn.Module], Tensor], ours: Tensor, what: str) -> None:
        """Raise where ``ours`` is further from the fp64 truth than eager, by the gate of every kernel.

        A single run of eager may be lucky. Where it was, eager is run with weights that are moved by a unit in the
        last place, which is what another order of the same sums does, up to eight times; the worst is what it is worth.

        Args:
            run: gives what a model computes.
            ours: what our model computed, of the shape that ``run`` gives.
        """
        exact, allowed = run(self.exact), 0.0
        assert exact.isfinite().all(), f"{what}: the oracle is not finite"
        for attempt in range(9):
            other = self.eager if attempt == 0 else self._moved(attempt)
            error, enough, _ = errors(ours, run(other), exact, ULPS)
            allowed = max(allowed, enough)
            if error <= allowed:
                return
        raise AssertionError(f"{what}: error {error:.3e}, allowed {allowed:.3e}")

    @functools.cache  # noqa: B019 - lives as long as the test
    def _moved(self, seed: int) -> nn.Module:
        generator, moved = torch.Generator().manual_seed(seed), copy.deepcopy(self.eager)
        with torch.no_grad():
            for parameter in moved.parameters():
                step = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + step * torch.finfo(parameter.dtype).eps)
        return moved


def _hold(case: models.Case, three: Three, side: str) -> None:
    given = models.inputs(case, side)
    kept = given["attention_mask"] == 1 if side != "none" and case.kind in ("causal", "masked") else ...

    def all_tokens(model: nn.Module) -> Tensor:
        return _logits(model, given)[kept]

    three.hold(all_tokens, all_tokens(three.model), f"{case}, padding {side}")
    ids = "input_ids" if case.kind == "causal" else "decoder_input_ids"
    if ids not in given:
        return
    changed = given | {ids: given[ids].clone()}
    changed[ids][:, -1] = given[ids][:, -1] % 40 + 4
    before = kept[:, :-1] if torch.is_tensor(kept) else ...

    def earlier(model: nn.Module) -> Tensor:
        return _logits(model, given)[:, :-1][before]

    three.hold(earlier, _logits(three.model, changed)[:, :-1][before], f"{case}, padding {side}, a later token")
    if case.kind == "causal" and _keeps_a_cache(three.eager, given):
        three.hold(lambda model: _step(model, given), _step(three.model, given), f"{case}, padding {side}, a cache")


@torch.no_grad()
def _logits(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return a model's output, (B, L, vocabulary) for language models; fp64 for a model in fp64."""
    with softmax_in_the_dtype_of_its_input():
        return _first(model(**models.typed(given, next(model.parameters()).dtype)))


@torch.no_grad()
def _step(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Return the logits of the last token, (B, vocabulary), after the others were read into a cache."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    with softmax_in_the_dtype_of_its_input():
        start = {"input_ids": ids[:, :-1]} | ({} if mask is None else {"attention_mask": mask[:, :-1]})
        read = model(**start, use_cache=True)
        rest = {"input_ids": ids[:, -1:]} | ({} if mask is None else {"attention_mask": mask})
        return model(**rest, past_key_values=read.past_key_values, use_cache=True).logits[:, -1][_last_kept(mask)]


def _last_kept(mask: Tensor | None) -> Any:
    return ... if mask is None else mask[:, -1] == 1


def _keeps_a_cache(eager: nn.Module, given: dict[str, Tensor]) -> bool:
    try:
        _step(eager, given)
    except Exception:  # a model without one, or with one of its own kind
        return False
    return True


def _first(output: Any) -> Tensor:
    for name in ("logits", "logits_per_image"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    raise TypeError(f"{type(output).__name__} has no logits")


@contextlib.contextmanager
def softmax_in_the_dtype_of_its_input() -> Iterator[None]:
    """Eager layers ask for a softmax in fp32, in fp64 too: that would be less exact, and turn fp64's least mask into
    -inf, so that a query without keys becomes NaN where in fp32 it attends to all."""
    softmax = torch.nn.functional.softmax

    def exact(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.float64 if x.dtype == torch.float64 else dtype)

    with mock.patch("torch.nn.functional.softmax", exact):
        yield


@contextlib.contextmanager
def _counted(calls: list[None]) -> Iterator[None]:
    """Append to ``calls`` for each call of our attention."""
    attention = ops.attention

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return attention(*args, **kwargs)

    with mock.patch.object(ops, "attention", count):
        yield
