"""Trial of what a user registers: the user's inputs, and a class with its fast class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .check import Call, FailsError, Pair, Trial, alone, change_constants, copy_of, dropouts_of, dtype_of, set_dropouts
from .swapped import fast_class, keywords_of
from .token_layer import LOWEST

_DRAWS = 64


Sample = tuple[nn.Module, list[Call]]
"""Module of a registered class, and calls of it."""


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Context of a trial that draws random numbers."""
    devices = {p.device for p in module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), alone(*(device.type for device in devices)):
        torch.manual_seed(0)
        yield


class _UsedDropout(TorchFunctionMode):
    """Probabilities with which a block of code calls dropout; ``of_features`` if it drops whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.values: set[Any] = set()
        self.of_features = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        attends = name == "scaled_dot_product_attention"
        if attends or "dropout" in name:
            key, place = ("dropout_p", 4) if attends else ("p", 1)
            self.values.add(kwargs.get(key, args[place] if len(args) > place else None))
            self.of_features |= not attends and name != "dropout"
        return func(*args, **kwargs)


class UserTrial(Trial):
    """Trial of a module of a user, with the user's inputs.

    Attributes:
        of_features: True if a module drops whole features.
    """

    of_features = False

    def run_all(self, module: nn.Module, calls: Sequence[Call], buffers: bool = False) -> Pair:
        """Compare all calls in float64, and the first one in the module's own dtype and on its device; return the pair
        of the latter. With ``buffers`` other values are also tried in buffers."""
        own = self._compared(copy_of(module), calls[:1], f"its parameters, {dtype_of(module)}".replace("torch.", ""))
        changed = copy_of(module)
        starts = [(module, "its parameters")]
        if change_constants(changed, buffers=buffers):
            starts.append((changed, "other values of equal parameters"))
        for start, words in starts:
            try:
                self._compared(copy_of(copy_of(start), torch.float64), calls, words, drops=True)
            except FailsError:  # its code knows one dtype
                self._compared(copy_of(start), calls, words, drops=True)
        return own

    def _compared(self, plain: nn.Module, calls: Sequence[Call], words: str, drops: bool = False) -> Pair:
        with _UsedDropout() as used:
            self.expected(plain, calls[0], True, draws=True)
        self.of_features |= used.of_features
        dropouts = dropouts_of(plain, used.values)
        set_dropouts(0.0, dropouts, plain)
        first, second = (self.expected(plain, calls[0], True) for _ in range(2))
        for name, value in first.items():
            if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), second[name].nan_to_num()):
                raise ValueError(f"{type(plain).__name__} draws random numbers, or keeps something of a call")
        pair = self.pair(plain, words, dropouts)
        for call in calls:
            places = dropouts if drops and call is calls[0] else ()
            self.compare(pair, call, drops=[[place] for place in places])
        return pair


class _FastTrial(UserTrial):
    """Trial of a class and its fast class; masks get no gradient."""

    def __init__(self, kind: type[nn.Module], fast: type[nn.Module], masks: set[int]) -> None:
        super().__init__(fast.__name__)
        self.kind, self.masks = fast_class(kind, fast), masks  # type: ignore[arg-type]

    def make(self, plain: nn.Module) -> nn.Module:
        """Give a copy the fast class."""
        fast = copy_of(plain)
        fast.__class__ = self.kind
        return fast

    def trained(self, t: Tensor) -> bool:
        """Return True for anything but a mask."""
        return id(t) not in self.masks

    def compare_draws(self, pair: Pair, call: Call) -> None:
        """Compare the variance of the results with half of all values dropped: one dropout more doubles it at least.

        Raises:
            ValueError: if the variances differ.
        """
        spreads = []
        for module in (pair.plain, pair.fast):
            set_dropouts(0.5, pair.dropouts, module)
            drawn = [list(self.results(module, call, True, gradients=False).values()) for _ in range(_DRAWS)]
            values = [torch.stack(each).double() for each in zip(*drawn) if isinstance(each[0], Tensor)]
            spreads.append(sum(float(each.nan_to_num().var(0).sum()) for each in values))
        one, other = spreads
        if not other / 1.5 <= one <= other * 1.5:
            raise ValueError(f"with dropout 0.5 their results have variances {one:.2g} and {other:.2g} in all")


def check_fast(kind: type[nn.Module], fast: type[nn.Module], module: nn.Module, calls: list[Call]) -> None:
    """Compare a module of a class with the fast class.

    Raises:
        ValueError: if they differ, or fail.
    """
    names = keywords_of(fast)
    for call in calls:
        if names is not None and (unknown := call.kwargs.keys() - names):
            raise ValueError(f"register: {fast.__name__}.forward has no argument {', '.join(sorted(unknown))}")
    tensors = (t for call in calls for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor))
    trial = _FastTrial(kind, fast, {id(t) for t in tensors if _hidden_and_kept(t) is not None})
    try:
        with undisturbed(module):
            own = trial.run_all(module, [changed for call in calls for changed in _with_changed_masks(call)])
            if own.dropouts and trial.error <= 1.0:
                trial.compare_draws(own, calls[len(calls) // 2])
    except ValueError as error:
        raise ValueError(f"register: {kind.__name__} and {fast.__name__} differ: {error}") from error
    if trial.error > 1.0:
        raise ValueError(f"register: {kind.__name__} computes something else than {fast.__name__}: {trial.text}")


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
                yield Call(args, kwargs, f"{call.where}, argument {name}{place} = {value}", may_fail=True)
