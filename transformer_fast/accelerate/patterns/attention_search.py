"""Search for the formula of attention whose names are known: formulas are compared with the module on random input."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .attention_names import HEAD_AXES, LAYOUTS, LISTS, MEANINGS, TABLES, Kind, Reading, heads_and_scales

_BATCH, _LENGTH, _MEMORY = 2, 5, 3
_SIZES = (1, 1, 0), (3, 1, 0), (3, 67, 0), (1, 193, 0), (1, 7, 7), (3, 1, 67), (1, 67, 193), (1, 193, 7)
"""Batch, number of queries, and of keys (0: the queries are the keys), at which a formula is compared once more."""
_SIZES_OF_LARGE_SCORES = (0, _LENGTH, 0), (16, 2, 0)
"""With two keys, a query often keeps only the one with the smaller score."""
_SCORES = 300.0
"""Size of large scores: what still takes part at a score of -50 shows, and -1e4 blocks."""
CALLED = ("out", "out_dropout", "norm", "q_norm", "k_norm")
"""Roles of children that are called; one that the module's own code does not call has no part in the formula."""


class _Inputs:
    """Random arguments of a module. A bias by distance gives the length, and with it the batch has several windows."""

    def __init__(self, m: nn.Module, reading: Reading, batch: int = 0, length: int = _LENGTH) -> None:
        self.reading = reading
        linears = [m._modules[name] for name in reading.linears]
        linears = list(linears[0]) if reading.linears[0] in LISTS else linears  # type: ignore[call-overload]
        self.widths = [linears[0].in_features, linears[min(1, len(linears) - 1)].in_features]  # type: ignore[union-attr]
        self.widths.append(linears[min(2, len(linears) - 1)].in_features if len(linears) > 2 else self.widths[1])  # type: ignore[union-attr]
        self.length = getattr(m, TABLES[1]).shape[0] if reading.table else length
        self.batch = batch or 2 * _BATCH if reading.table else batch or _BATCH

    def call(self, mask: Any = None, memory: int = 0, flag: Any = None) -> tuple[Any, ...]:
        """Arguments of a call.

        Args:
            mask: the mask.
            memory: number of keys, if it differs from that of queries; 0 leaves out keys that may be left out.
            flag: value of the argument that asks for weights.
        """
        reading, args = self.reading, list(self.reading.defaults)
        memory = memory or (self.length if self.widths[0] != self.widths[1] else 0)
        for place, width, n in zip(reading.places, self.widths, (0, memory, memory)):
            if place == reading.places[0] or (place >= 0 and (memory or place < reading.required)):
                rows = math.isqrt(self.length)
                sizes = {"B": self.batch, "L": n or self.length, "N": 1 if self.batch == 1 else 3, "d": width}
                sizes |= {"Y": rows, "X": -(-self.length // rows)}
                args[place] = torch.randn([sizes[axis] for axis in reading.layout[1:-1].split(", ")])
        if reading.places[3] >= 0:
            args[reading.places[3]] = mask
        if reading.places[4] >= 0 and (args[reading.places[4]] or flag is not None):
            args[reading.places[4]] = flag or False
        return tuple(args)

    def mask(self, kind: Kind, axis: str, meaning: str, empty: bool, memory: int = 0) -> Tensor:
        """Random mask; with ``empty`` the first query has no key."""
        n, batch = self.length, self.batch
        keys = memory or n
        shapes = {2: (n, keys), 3: (self.reading.heads, n, keys), 4: (batch, 1, n, keys)}
        front = max(1, batch // 2) if axis == "windows" else batch
        shape = {"": shapes[kind[1]], "keys": (batch, keys)}.get(axis, (front, n, keys))
        drawn = torch.rand(shape) > 0.4
        drawn[-1] = ~drawn[0]  # the axis of the batch is seen, whatever is drawn
        drawn[..., 0] = True
        if empty:
            drawn.view(-1, keys)[0] = False
        if meaning == "blocked":
            drawn = ~drawn
        if kind[0] == "bool":
            return drawn
        # The numbers have any sign and size, so that a mask which the module compares with another number is not taken.
        return drawn * torch.randn(shape) if kind[0] == "float" else drawn * torch.randint(1, 4, shape) * _signs(shape)


def calls_of(m: nn.Module, reading: Reading) -> Iterator[tuple[Any, ...]]:
    """Test calls: with a mask of each known meaning, without, and with keys of another length.

    The search has compared the outputs for masks of every kind.
    """
    inputs = _Inputs(m, reading)
    for (meaning, axis, empty), kind in {tuple(rest): kind for kind, *rest in reading.masks}.items():
        yield inputs.call(inputs.mask(kind, axis, meaning, empty in ("uniform", "zero")))
    yield inputs.call()
    if reading.places[4] >= 0:
        yield inputs.call(flag=False)
    if reading.places[1] >= 0 and LAYOUTS[reading.layout] == 3:
        yield inputs.call(memory=_MEMORY)


def search(trial: nn.Module, reading: Reading, pattern: Callable[[Reading], Any]) -> Reading | None:
    """The reading with all that names leave open; None if no formula computes what the module computes.

    Args:
        trial: copy of a module, in evaluation.
        reading: what the names say.
        pattern: function that returns the pattern of a reading.
    """
    return _Search(trial, pattern).found(reading)


class _Search:
    def __init__(self, trial: nn.Module, pattern: Callable[[Reading], Any]) -> None:
        self.trial, self.pattern = trial, pattern

    def found(self, reading: Reading) -> Reading | None:
        for step in (self._formula, self._memory, self._other_sizes, self._probability):
            found = step(reading)
            if found is None:
                return None
            reading = found
        return self._masks(reading)

    def _own(self, args: tuple[Any, ...]) -> Any:
        """Result of the module itself; None if it refuses the arguments."""
        try:
            with torch.no_grad():
                return self.trial(*args)
        except Exception:
            return None

    def _is(self, reading: Reading, args: tuple[Any, ...], expected: Any) -> bool:
        """Return True if a reading computes the module's result."""
        try:
            with torch.no_grad():
                found = self.pattern(reading).fused_forward(self.trial, *args)
        except Exception:
            return False
        if isinstance(expected, tuple):
            return isinstance(found, tuple) and len(found) == len(expected) and _close(found[0], expected[0])
        return isinstance(found, Tensor) and _close(found, expected)

    def _formula(self, reading: Reading) -> Reading | None:
        """Heads, scale, order and layout, by a call without a mask or with one that changes nothing."""
        for layout, blank in itertools.product(LAYOUTS, _blank_masks(reading)):
            reading = dataclasses.replace(reading, layout=layout)
            inputs = _Inputs(self.trial, reading)
            args = inputs.call(None if blank is None else blank(inputs))
            before = dict(self.trial.__dict__)
            with _Sdpa() as calls, self._called() as called:
                expected = self._own(args)
            if calls.seen:  # calls of torch's function are redirected
                return None
            if (returned := _returned(expected)) is None or (LAYOUTS[layout] == 4 and returned != "tensor"):
                continue
            changed = [name for name, value in self.trial.__dict__.items() if value is not before.get(name)]
            if changed and not (len(changed) == 1 and _is_weights(self.trial.__dict__[changed[0]], inputs.length)):
                return None
            parts = tuple((role, name) for role, name in reading.parts if role not in CALLED or name in called)
            reading = dataclasses.replace(reading, parts=parts, returned=returned, stored="".join(changed))
            without = tuple(None if place == reading.places[3] else arg for place, arg in enumerate(args))
            for candidate in self._formulas(reading):
                if self._is(candidate, without, expected):
                    return candidate
        return None

    @contextlib.contextmanager
    def _called(self) -> Iterator[set[str]]:
        """Collect the names of the children that are called in the block."""
        called: set[str] = set()
        children = self.trial.named_children()
        handles = [child.register_forward_hook(lambda *_, name=name: called.add(name)) for name, child in children]
        try:
            yield called
        finally:
            for handle in handles:
                handle.remove()

    def _formulas(self, reading: Reading) -> Iterator[Reading]:
        first = self.trial._modules[reading.linears[0]]
        first = first[0] if reading.linears[0] in LISTS else first  # type: ignore[index]
        alone = len(reading.linears) == 1 and reading.linears[0] not in LISTS
        width = first.out_features // 3 if alone else first.out_features  # type: ignore[union-attr, operator]
        for heads, scale in heads_and_scales(self.trial, width):
            for order in ("3hd", "h3d", "hd3") if alone else ("3hd",):
                for residual in (False, True)[: 1 + ("norm" in dict(reading.parts))]:
                    yield dataclasses.replace(reading, heads=heads, scale=scale, order=order, residual=residual)

    def _memory(self, reading: Reading) -> Reading | None:
        """Find whether the norm of queries is that of keys and values too."""
        if reading.places[1] < 0 or reading.residual or LAYOUTS[reading.layout] == 4:
            return reading
        args = _Inputs(self.trial, reading).call(memory=_MEMORY)
        if _returned(expected := self._own(args)) is None:
            return reading
        both = (dataclasses.replace(reading, norms_memory=norms) for norms in (False, True))
        return next((candidate for candidate in both if self._is(candidate, args, expected)), None)

    def _other_sizes(self, reading: Reading) -> Reading | None:
        """Compare at other sizes, and with large scores: a rule for long inputs or one query is another formula."""
        with self._large_scores(reading):
            holds = self._holds(reading, _SIZES_OF_LARGE_SCORES)
        return reading if holds and self._holds(reading, _SIZES) else None

    def _holds(self, reading: Reading, sizes: Iterable[tuple[int, int, int]]) -> bool:
        """Return True if a reading computes the module's result at all sizes that the module takes, with the reading's
        mask or without one."""
        takes_memory = reading.places[1] >= 0 and LAYOUTS[reading.layout] == 3
        for batch, length, memory in sizes:
            if memory and not takes_memory:
                continue
            inputs, mask = _Inputs(self.trial, reading, batch, length), None
            for kind, meaning, axis, _ in reading.masks:
                mask = inputs.mask(kind, axis, meaning, False, memory)
            args = inputs.call(mask, memory)
            if (expected := self._own(args)) is not None and not self._is(reading, args, expected):
                return False
        return True

    @contextlib.contextmanager
    def _large_scores(self, reading: Reading) -> Iterator[None]:
        """Make the scores large in the block, so that a key that has any weight has all of it."""
        inputs = _Inputs(self.trial, reading).call(memory=_MEMORY if reading.places[1] >= 0 else 0)
        query, key, value = (None if place < 0 else inputs[place] for place in reading.places[:3])
        with torch.no_grad():
            query = query if LAYOUTS[reading.layout] == 3 else query.flatten(0, -3)
            q, k, _ = self.pattern(reading)._heads(self.trial, query, key, value)
            size = reading.scale * math.sqrt(q.shape[-1]) * (q.square().mean() * k.square().mean()).sqrt().item()
        factor = _SCORES / max(size, 1e-9)
        factors = {name: math.sqrt(factor) for name in reading.linears}
        factors |= {name: factor for role, name in reading.parts if role == "q_norm"}
        scaled = [(t, f) for name, f in factors.items() for t in self.trial._modules[name].parameters()]  # type: ignore[union-attr]
        before = [t.detach().clone() for t, _ in scaled]
        with torch.no_grad():
            for t, f in scaled:
                t.mul_(f)
        try:
            yield
        finally:
            with torch.no_grad():
                for (t, _), own in zip(scaled, before, strict=True):
                    t.copy_(own)

    def _probability(self, reading: Reading) -> Reading | None:
        """Find whether a number that is named as dropout drops the weights."""
        if not reading.probability:
            return reading
        trial, args = self.trial, _Inputs(self.trial, reading).call()
        before = trial.__dict__[reading.probability]
        trial.training, trial.__dict__[reading.probability] = True, 1.0
        expected = self._own(args)
        both = reading, dataclasses.replace(reading, probability="")
        found = [candidate for candidate in both if self._is(candidate, args, expected)]
        trial.training, trial.__dict__[reading.probability] = False, before
        return found[0] if found else None

    def _masks(self, reading: Reading) -> Reading:
        """Kinds of masks that the module takes, and what they mean."""
        if reading.places[3] < 0 or LAYOUTS[reading.layout] == 4:
            return reading
        masks = []
        for name, dims in itertools.product(("bool", "int", "float"), (4, 3, 2)):
            masks += list(itertools.islice(self._meanings(reading, (name, dims)), 1))
        return dataclasses.replace(reading, masks=tuple(masks))

    def _meanings(self, reading: Reading, kind: Kind) -> Iterator[tuple[Kind, str, str, str]]:
        inputs = _Inputs(self.trial, reading)
        for axis in HEAD_AXES[kind[1]]:
            if (axis == "windows") != (reading.table and kind[1] == 3):
                continue
            for meaning in MEANINGS if kind[0] == "float" else MEANINGS[:2]:
                entry = kind, meaning, axis, "nan"
                candidate = dataclasses.replace(reading, masks=(entry,))
                args = inputs.call(inputs.mask(kind, axis, meaning, False))
                if _returned(expected := self._own(args)) is None:
                    break
                again = inputs.call(inputs.mask(kind, axis, meaning, False))
                if not (self._is(candidate, args, expected) and self._is(candidate, again, self._own(again))):
                    continue
                with self._large_scores(candidate) if meaning != "added" else contextlib.nullcontext():
                    holds = self._holds(candidate, _SIZES_OF_LARGE_SCORES)
                if holds and self._holds(candidate, _SIZES):
                    yield self._with_empty_rows(candidate)

    def _with_empty_rows(self, reading: Reading) -> Any:
        """The meaning of a mask, with the result of a query without a key: "uniform", "zero" or "nan"."""
        ((kind, meaning, axis, _),) = reading.masks
        if meaning == "added":
            return reading.masks[0]
        inputs = _Inputs(self.trial, reading)
        args = inputs.call(inputs.mask(kind, axis, meaning, True))
        expected = self._own(args)
        for empty in ("uniform", "zero"):
            if self._is(dataclasses.replace(reading, masks=((kind, meaning, axis, empty),)), args, expected):
                return kind, meaning, axis, empty
        return reading.masks[0]


def _signs(shape: tuple[int, ...]) -> Tensor:
    return 2 * torch.randint(0, 2, shape) - 1


class _Sdpa(TorchFunctionMode):
    """Notes calls of torch's attention."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def _blank_masks(reading: Reading) -> Iterable[Callable[[_Inputs], Tensor] | None]:
    """Masks that change nothing: none, and for a module that requires a mask, zeros and ones."""
    yield None
    if 0 <= reading.places[3] < reading.required:
        yield lambda inputs: torch.zeros(inputs.batch, 1, 1, inputs.length)
        yield lambda inputs: torch.ones(inputs.batch, 1, 1, inputs.length, dtype=torch.bool)
        yield lambda inputs: torch.ones(inputs.batch, 1, inputs.length, dtype=torch.bool)


def _returned(result: Any) -> str | None:
    """Form of a result; None for any other, such as one with weights."""
    if isinstance(result, Tensor):
        return "tensor"
    if not isinstance(result, tuple) or not result or not isinstance(result[0], Tensor):
        return None
    return "one" if len(result) == 1 else "none" if len(result) == 2 and result[1] is None else None


def _is_weights(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.shape[-2:] == (length, length)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9)
