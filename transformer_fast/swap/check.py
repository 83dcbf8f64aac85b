"""Trial of what a user registers: the plain module and the fast one on the same inputs, on copies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..accelerate.packed.token_layer import LOWEST
from ..accelerate.registered import fast_class, keywords_of
from ..layers.hooks import no_hooks
from .dropouts import Dropouts, HiddenDropoutError
from .inputs import Call, Sample, first_line

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_DRAWS = 64
_SMALLEST = 0.1  # scale of values that are about 0, such as the gradient of a key's bias


@dataclasses.dataclass
class Worst:
    """Largest error of all comparisons, as a multiple of what is allowed."""

    ratio: float = 0.0
    text: str = ""

    def compare(self, actual: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
        """Compare results by name. Values that are NaN in the plain module count as equal.

        Raises:
            ValueError: if a result has another kind or shape.
        """
        for name in [*expected, *(name for name in actual if name not in expected)]:
            ours, plain = actual.get(name), expected.get(name)
            if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
                if type(ours) is not type(plain) or ours != plain:
                    raise ValueError(f"{name} is {_kind(ours)}, and {_kind(plain)} in the plain module ({where})")
                continue
            if ours.shape != plain.shape or ours.dtype != plain.dtype:
                raise ValueError(f"{name} is {_kind(ours)}, and {_kind(plain)} in the plain module ({where})")
            self._compare(name, ours.detach().cpu(), plain.detach().cpu(), where)

    def _compare(self, name: str, ours: Tensor, plain: Tensor, where: str) -> None:
        if not plain.is_floating_point():
            ours, plain = ours.double(), plain.double()
        allowed = _TOLERANCES.get(plain.dtype, 5e-2)
        if plain.numel() == 0:
            return
        worst, largest = float((ours - plain).abs().max()), float(plain.abs().max())
        if not math.isfinite(worst + largest):
            equal = (ours == plain) | plain.isnan()
            largest = float(torch.where(plain.isfinite(), plain, 0.0).abs().max())
            worst = float(torch.where(equal, 0.0, (ours - plain).abs()).nan_to_num(nan=float("inf")).max())
        ratio = worst / (allowed * max(largest, _SMALLEST))
        if ratio > self.ratio:
            self.ratio = ratio
            self.text = f"the largest error is {worst:.2g}, of values up to {largest:.2g}, in {name} ({where})"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"[:60]


def copy_of(module: nn.Module) -> nn.Module:
    """Copy of a module without hooks.

    Raises:
        ValueError: if the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        memo |= no_hooks(part)
        kept = (value for value in vars(part).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach() for value in kept}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ValueError(f"a copy of the module could not be made: {first_line(error)}") from error


def with_other_constants(module: nn.Module, buffers: bool) -> nn.Module | None:
    """Copy in which parameters of equal values, such as those of a branch that is zero at first, have other values;
    None if there are none. buffers: such buffers too."""
    made, changed = copy_of(module), False
    with torch.no_grad():
        for p in (*made.parameters(), *(made.buffers() if buffers else ())):
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                p += 0.1 * torch.randn(p.shape, device=p.device, dtype=p.dtype)
                changed = True
    return made if changed else None


def set_dropouts(module: nn.Module, p: float) -> list[tuple[nn.Module, str]]:
    """Set the probabilities of all dropout modules, and return their places: modules, and names of attributes."""
    places: list[tuple[nn.Module, str]] = []
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            places.append((part, "p"))
        elif isinstance(part, nn.MultiheadAttention):
            places.append((part, "dropout"))
    for part, name in places:
        part.__dict__[name] = p
    return places


@contextlib.contextmanager
def alone(module: nn.Module) -> Iterator[None]:
    """Undisturbed by what surrounds a call: random state, gradients, inference mode and autocast."""
    devices = {p.device for p in module.parameters() if p.is_cuda}
    kinds = {"cpu"} | {device.type for device in devices}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.manual_seed(0)
        yield


def results(
    module: nn.Module,
    call: Call,
    *,
    training: bool,
    trained: Callable[[Tensor], bool] | None,
    select: Callable[[Any], Any] = lambda result: result,
    run: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Results of a call by name; in training, gradients of a weighted sum of all float results and buffers too.

    Args:
        module: plain or fast module.
        call: arguments; tensors are copied.
        training: mode of the module.
        trained: function that returns True for arguments that need a gradient; None for no gradients at all.
        select: function of the result, such as its values at tokens.
        run: function of the arguments that computes the result; None calls the module.
    """
    module.train(training)
    gradients = training and trained is not None
    leaves: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def fresh(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in made:
                new = value.detach().to(device, copy=True)
                made[id(value)] = new.to(dtype) if new.is_floating_point() else new
                if gradients and value.is_floating_point() and trained(value):  # type: ignore[misc]
                    leaves[f"the gradient of {name}"] = made[id(value)].requires_grad_()
            return made[id(value)]
        if isinstance(value, dict):
            return {key: fresh(inner, f"{name}[{key!r}]") for key, inner in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(fresh(inner, f"{name}[{n}]") for n, inner in enumerate(value))
        return value

    args = tuple(fresh(value, f"argument {n}") for n, value in enumerate(call.args))
    kwargs = {name: fresh(value, name) for name, value in call.kwargs.items()}
    with contextlib.nullcontext() if gradients else torch.no_grad():
        found = dict(_named("the result", select((run or module)(*args, **kwargs))))
    if gradients:
        outs = [t for t in found.values() if isinstance(t, Tensor) and t.requires_grad]
        leaves |= {f"the gradient of {name}": p for name, p in module.named_parameters() if p.requires_grad}
        if outs and leaves:
            weights = (torch.linspace(-1.0, 2.0, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in outs)
            total = sum((t * weight).sum() for t, weight in zip(outs, weights))
            for leaf in leaves.values():
                leaf.grad = None
            total.backward()  # type: ignore[union-attr]
            for name, leaf in leaves.items():
                found[name], leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, None
        found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return found


@dataclasses.dataclass
class Trial:
    """Pairs of a plain module and its fast copy, and the largest error between them.

    Attributes:
        make: function that makes a copy of a plain module fast.
        trained: function that returns True for arguments that need a gradient.
        fast: name of the fast module in messages.
        buffers: True to try other values in buffers, too.
        draws: call whose results are compared with half of all values dropped.
        worst: largest error so far.
    """

    make: Callable[[nn.Module], nn.Module]
    trained: Callable[[Tensor], bool]
    fast: str
    buffers: bool = False
    draws: Call | None = None
    worst: Worst = dataclasses.field(default_factory=Worst)

    def run(self, module: nn.Module, calls: list[Call], again: Callable[..., Any] | None = None) -> None:
        """Compare all calls in float64, and the first one in the module's own dtype and on its device.

        Args:
            module: module of the user.
            calls: calls of the module.
            again: function that compares one call, in place of :meth:`compare`.
        """
        compare = again or self.compare
        with alone(module):
            own = self._pair(copy_of(module), calls[0])
            if isinstance(own, str):
                raise ValueError(own)
            compare(*own, calls[0], f"its parameters, {_dtype_of(module)}", drops=False)
            constants = with_other_constants(module, self.buffers)
            for start, words in ((copy_of(module), "its parameters"), (constants, "other values of equal parameters")):
                if start is None:
                    continue
                pair = self._pair(copy_of(start).cpu().double(), calls[0])
                if isinstance(pair, str):  # its code knows one dtype
                    pair = self._pair(start, calls[0])
                if isinstance(pair, str):
                    raise ValueError(pair)
                for call in calls:
                    compare(*pair, call, words, drops=call is calls[0])
            if self.draws is not None and self.worst.ratio <= 1.0:
                self._compare_draws(*own, self.draws)

    def _pair(self, plain: nn.Module, call: Call) -> tuple[nn.Module, nn.Module, Dropouts] | str:
        """Plain module without dropout, the same fast, and places of dropout; or what failed."""
        name = type(plain).__name__
        try:
            dropouts = Dropouts(plain, lambda: results(plain, call, training=True, trained=None))
            drawn = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                drawn.append(results(plain, call, training=True, trained=self.trained))
        except HiddenDropoutError:
            raise
        except Exception as error:
            return f"{name} fails on {call.where}: {first_line(error)}"
        first, second = drawn
        for key, value in first.items():
            if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), second[key].nan_to_num()):
                raise ValueError(f"{name} draws random numbers that are no dropout, or keeps something of a call")
        try:
            fast = self.make(copy_of(plain))
            results(fast, call, training=True, trained=self.trained)
        except Exception as error:
            return f"{self.fast} fails where {name} runs: {first_line(error)} ({call.where})"
        return plain, fast, dropouts

    def compare(
        self,
        plain: nn.Module,
        fast: nn.Module,
        dropouts: Dropouts,
        call: Call,
        words: str,
        *,
        drops: bool,
        select: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        """Compare one call in evaluation and in training; with ``drops`` also with each dropout dropping everything."""
        settings: list[tuple[tuple[str, str] | None, bool, str]] = [
            (None, False, "evaluation"),
            (None, True, "training without dropout"),
            *(
                (place, True, f"training with {'.'.join(filter(None, place))} = 1")
                for place in dropouts.places
                if drops
            ),
        ]
        for place, training, mode in settings:
            for module in (plain, fast):
                dropouts.set_all(module, 0.0)
                if place is not None:
                    dropouts.drop(module, *place)
            how: dict[str, Any] = {"training": training, "trained": self.trained, "select": select}
            try:
                expected = results(plain, call, **how)
            except Exception as error:
                if call.varied:  # a mask that its code does not take
                    continue
                raise ValueError(f"{type(plain).__name__} fails on {call.where}: {first_line(error)}") from error
            try:
                found = results(fast, call, **how)
            except Exception as error:
                raise ValueError(f"{self.fast} fails on {call.where}: {first_line(error)}") from error
            self.worst.compare(found, expected, f"in {mode}, with {words}, {call.where}")
        for module in (plain, fast):
            dropouts.set_all(module, 0.0)

    def _compare_draws(self, plain: nn.Module, fast: nn.Module, dropouts: Dropouts, call: Call) -> None:
        """Compare the variance of the results over draws: it doubles at least with one dropout more."""
        if not dropouts.places:
            return
        spreads = []
        for module in (plain, fast):
            dropouts.set_all(module, 0.5)
            drawn = [list(results(module, call, training=True, trained=None).values()) for _ in range(_DRAWS)]
            values = [torch.stack(each).double() for each in zip(*drawn) if isinstance(each[0], Tensor)]
            spreads.append(sum(float(each.nan_to_num().var(0).sum()) for each in values))
            dropouts.set_all(module, 0.0)
        one, other = spreads
        if not other / 1.5 <= one <= other * 1.5:
            raise ValueError(f"with dropout 0.5 their results have variances {one:.2g} and {other:.2g} in all")

    def finish(self, text: str) -> None:
        """Raise ValueError if an error was larger than allowed."""
        if self.worst.ratio > 1.0:
            raise ValueError(f"register: {text}: {self.worst.text}")


def _dtype_of(module: nn.Module) -> str:
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def check_fast(kind: type[nn.Module], fast: type[nn.Module], sample: Sample) -> None:
    """Compare modules of a class with the fast class.

    Raises:
        ValueError: if they differ, or fail.
    """
    masks = {id(t) for call in sample.calls for t in _tensors(call) if _hidden_and_kept(t) is not None}
    names = keywords_of(fast)
    for call in sample.calls:
        if names is not None and (unknown := call.kwargs.keys() - names):
            raise ValueError(f"register: {fast.__name__}.forward has no argument {', '.join(sorted(unknown))}")

    def make(module: nn.Module) -> nn.Module:
        module.__class__ = fast_class(kind, fast)  # type: ignore[arg-type]
        return module

    trial = Trial(make, lambda t: id(t) not in masks, fast.__name__, draws=sample.calls[len(sample.calls) // 2])
    try:
        trial.run(sample.module, [changed for call in sample.calls for changed in _with_changed_masks(call)])
    except ValueError as error:
        raise ValueError(f"register: {kind.__name__} and {fast.__name__} differ: {error}") from error
    trial.finish(f"{kind.__name__} computes something else than {fast.__name__}")


def _tensors(call: Call) -> list[Tensor]:
    return [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor)]


def _hidden_and_kept(t: Tensor) -> tuple[Any, Any] | None:
    """Two values of a mask, which keep and hide a key in an order that is unknown; None for any other tensor."""
    if t.dim() < 2 or t.numel() == 0:
        return None
    if t.dtype == torch.bool:
        return False, True
    values = t.detach().unique()
    if bool(((values == 0) | (values == 1)).all()) and (len(values) == 2 or not t.is_floating_point()):
        return 0, 1
    is_added = t.is_floating_point() and bool(((values == 0) | (values <= LOWEST)).all())
    return (0.0, float(values.min())) if is_added and float(values.min()) <= LOWEST else None


def _with_changed_masks(call: Call) -> Iterator[Call]:
    """Yield a call, and the same with one value in each mask's first key, and in the first row of the batch."""
    yield call
    for name, mask in [*enumerate(call.args), *call.kwargs.items()]:
        values = _hidden_and_kept(mask) if isinstance(mask, Tensor) else None
        for value in values or ():
            for place in ("[..., 0]", "[0]"):
                changed = mask.clone()
                changed[(..., 0) if place == "[..., 0]" else 0] = value
                args = tuple(changed if n == name else t for n, t in enumerate(call.args))
                kwargs = {key: changed if key == name else t for key, t in call.kwargs.items()}
                yield Call(args, kwargs, f"{call.where}, argument {name}{place} = {value}", varied=True)


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested lists, tuples and dicts by name, and the kinds of these."""
    if isinstance(value, list | tuple):
        yield f"the kind of {name}", f"{type(value).__name__} of {len(value)} values"
        for n, inner in enumerate(value):
            yield from _named(f"{name}[{n}]", inner)
    elif isinstance(value, dict):
        yield f"the kind of {name}", f"dict with {', '.join(map(str, value))}"
        for key, inner in value.items():
            yield from _named(f"{name}[{key!r}]", inner)
    else:
        yield f"the kind of {name}", "tensor" if isinstance(value, Tensor) else type(value).__name__
        yield name, value
