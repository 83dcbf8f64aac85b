"""The trial: a plain module and the same module fast on the same inputs, on copies.

``check_form.py`` tries hand-written modules, ``register.py`` and ``check_tokens.py`` what a user registers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers.padded_calls import WITHOUT_PADDING
from ..ops.weight_layout import LAYOUT

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
SMALLEST = 0.1
"""Scale of values that are about 0, such as the gradient of a key's bias, or a mean of normed values."""

Place = tuple[str, str]
"""Path of a module and name of its attribute, which is a probability of dropout."""


class FailsError(ValueError):
    """Error for a module that raises one."""


class DiffersError(ValueError):
    """Error for results of another kind or shape."""


class DrawsError(ValueError):
    """Error for random numbers that are no dropout."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one call of a module, and their description.

    Attributes:
        args, kwargs: the arguments.
        where: description.
        may_fail: True for arguments that the plain module may not take.
        keep: bool (B, L), True at the tokens to which padding was added; None for any other call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    may_fail: bool = False
    keep: Tensor | None = None


def largest_difference(ours: Tensor, plain: Tensor) -> tuple[float, float]:
    """Largest difference of two tensors where the plain value is not NaN, and the largest finite plain value."""
    ours, plain = ours.detach().cpu(), plain.detach().cpu()
    if not plain.is_floating_point():
        ours, plain = ours.double(), plain.double()
    worst, largest = float((ours - plain).abs().max()), float(plain.abs().max())
    if not math.isfinite(worst + largest):
        equal = (ours == plain) | plain.isnan()
        largest = float(torch.where(plain.isfinite(), plain, 0.0).abs().max())
        worst = float(torch.where(equal, 0.0, (ours - plain).abs()).nan_to_num(nan=float("inf")).max())
    return worst, largest


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"[:60]


def first_line(error: BaseException) -> str:
    """Class name of an error, and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of the first float parameter; float32 if there is none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def tensors_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in the attributes of a module itself, also in containers, by place; parameters and buffers too."""
    for name, value in vars(module).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        yield from ((f"{name}[{n}]", t) for n, t in enumerate(values) if isinstance(t, Tensor))


def _copies_by_itself(module: nn.Module) -> bool:
    """Return True for a class whose author says how it is copied."""
    bases = (b for b in type(module).__mro__ if b is not object and not b.__module__.startswith("transformer_fast."))
    return any({"__deepcopy__", "__reduce__", "__reduce_ex__"} & vars(base).keys() for base in bases)


def copy_of(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy of a module without hooks, records of calls and kept weights; with a dtype on the CPU, where a parameter
    that has this dtype already shares its memory.

    Raises:
        ValueError: if the module cannot be copied.
    """

    def converted(t: Tensor) -> Tensor:
        new = t.detach()
        if dtype is not None:
            new = new.to("cpu", dtype if new.is_floating_point() else new.dtype)
        return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new.clone()

    memo: dict[int, Any] = {}
    try:
        for part in module.modules():
            hooks = (value for name, value in vars(part).items() if name.endswith("_hooks"))
            memo |= {id(value): OrderedDict() for value in hooks if type(value) is OrderedDict}
            for _, t in tensors_in(part):
                if (dtype is not None or not t.is_leaf) and id(t) not in memo:
                    memo[id(t)] = converted(t)
        # A constructor may draw weights. Else the state stays untouched, for other threads draw meanwhile.
        state = torch.get_rng_state() if any(map(_copies_by_itself, module.modules())) else None
        made = copy.deepcopy(module, memo)
        if state is not None:
            torch.set_rng_state(state)
    except Exception as error:
        raise ValueError(f"a copy of the module could not be made: {first_line(error)}") from error
    for part in made.modules():
        for name in (WITHOUT_PADDING, LAYOUT):
            vars(part).pop(name, None)
    return made


def change_constants(module: nn.Module, *, buffers: bool = False, generator: torch.Generator | None = None) -> bool:
    """Give parameters of equal values, such as those of a branch that is zero at first, other values in a copy. Shared
    memory stays as it is. Return True if there are such parameters, or such buffers where these count, too."""
    constant = [t for t in (*module.parameters(), *(module.buffers() if buffers else ())) if is_constant(t)]
    for t in constant:
        t.data = t.data + 0.1 * torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t)
    return bool(constant)


def is_constant(t: Tensor) -> bool:
    """Return True for floats of equal values."""
    values = t.detach().flatten()
    return t.is_floating_point() and bool(len(values) and values[0] == values[-1] and (values == values[0]).all())


def dropouts_of(module: nn.Module, values: Collection[Any] = ()) -> list[Place]:
    """Dropouts of a module: ``nn.Dropout`` and its relatives, ``nn.MultiheadAttention``, and attributes that hold one
    of the probabilities with which dropout was called."""
    return [
        (path, name)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if (name == "p" and isinstance(part, nn.modules.dropout._DropoutNd))
        or (name == "dropout" and isinstance(part, nn.MultiheadAttention))
        or (type(value) is float and value != 0.0 and value in values)
    ]


def set_dropouts(p: float, places: Iterable[Place], *modules: nn.Module) -> None:
    """Set the probability at these places of a module and its copies."""
    for path, name in places:
        for module in modules:
            vars(module.get_submodule(path))[name] = p


class _NoDraws(TorchDispatchMode):
    """Raise an error where random numbers are drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = {a.name: a.default_value for a in func._schema.arguments}
            given |= dict(zip(given, args)) | kwargs
            if given.get("dropout_p") != 0.0:
                name = func.overloadpacket.__name__
                raise DrawsError(f"it draws random numbers that are no dropout of a module or attribute, with {name}")
        return func(*args, **kwargs)


@contextlib.contextmanager
def alone(*devices: str) -> Iterator[None]:
    """Undisturbed by what surrounds a call: gradients, inference mode, and autocast on the CPU and other devices."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {"cpu", *devices}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


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


@dataclasses.dataclass
class Pair:
    """Plain module and the same fast, the places of their dropouts, which are 0, and a description of the
    parameters."""

    plain: nn.Module
    fast: nn.Module
    dropouts: list[Place]
    words: str


class Trial:
    """Comparisons of plain modules with fast ones, which messages call by the name ``fast``.

    Attributes:
        error, text: largest error so far, as a multiple of what is allowed, and its place.
        looks_for_draws: raise an error where a plain module draws random numbers.
    """

    looks_for_draws = True

    def __init__(self, fast: str) -> None:
        self.fast, self.error, self.text = fast, 0.0, ""

    def make(self, plain: nn.Module) -> nn.Module:
        """Make a fast module, and leave the plain one as it is."""
        raise NotImplementedError

    def trained(self, t: Tensor) -> bool:
        """Return True for an argument that needs a gradient."""
        raise NotImplementedError

    def run(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module with copies of a call's arguments, and return what is compared."""
        return module(*args, **kwargs)

    def results(self, module: nn.Module, call: Call, training: bool, gradients: bool = True) -> dict[str, Any]:
        """Results of a call with copies of its tensors, by name; in training also buffers, and gradients of a weighted
        sum of all float results."""
        module.train(training)
        gradients = gradients and training
        leaves: dict[str, Tensor] = {}
        made: dict[int, Tensor] = {}
        dtype = dtype_of(module)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))

        def fresh(value: Any, name: str) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in made:
                    new = value.detach().to(device, copy=True)
                    made[id(value)] = new.to(dtype) if new.is_floating_point() else new
                    if gradients and value.is_floating_point() and self.trained(value):
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
            found = dict(_named("the result", self.run(module, call, args, kwargs)))
        if not gradients:
            return found
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
        return found | {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}

    def pair(self, plain: nn.Module, words: str, dropouts: list[Place] | None = None) -> Pair:
        """Make a pair; for the arguments see :class:`Pair`."""
        places = dropouts_of(plain) if dropouts is None else dropouts
        set_dropouts(0.0, places, plain)
        return Pair(plain, self.make(plain), places, words)

    def compare(
        self,
        pair: Pair,
        call: Call,
        modes: Sequence[bool] = (False, True),
        drops: Sequence[Sequence[Place]] = (),
        gradients: bool = True,
    ) -> None:
        """Compare a call: in modes (False for evaluation, True for training without dropout), and in training where one
        of the groups ``drops`` of dropouts drops everything.

        Raises:
            FailsError: if a module fails, and the call must not.
            ValueError: for results of another kind or shape, or if the plain module draws random numbers.
        """
        for training, group in [*((training, ()) for training in modes), *((True, group) for group in drops)]:
            set_dropouts(1.0, group, pair.plain, pair.fast)
            try:
                expected = self.expected(pair.plain, call, training, gradients, draws=bool(group))
            except FailsError:
                if not call.may_fail:
                    raise
                continue
            try:
                found = self.results(pair.fast, call, training, gradients)
            except Exception as error:
                where = f"where {type(pair.plain).__name__} runs: {first_line(error)} ({call.where})"
                raise FailsError(f"{self.fast} fails {where}") from error
            set_dropouts(0.0, group, pair.plain, pair.fast)
            mode = "training without dropout" if training else "evaluation"
            if group:
                mode = f"training with {', '.join('.'.join(filter(None, place)) for place in group)} = 1"
            self._compare_results(found, expected, f"in {mode}, with {pair.words}, {call.where}")

    def _compare_results(self, actual: dict[str, Any], expected: dict[str, Any], where: str) -> None:
        """Compare results by name. Values that are NaN in the plain module count as equal.

        Raises:
            DiffersError: if a result has another kind or shape.
        """
        for name in [*expected, *(name for name in actual if name not in expected)]:
            ours, plain = actual.get(name), expected.get(name)
            if not isinstance(ours, Tensor) or not isinstance(plain, Tensor):
                equal = type(ours) is type(plain) and ours == plain
            else:
                equal = ours.shape == plain.shape and ours.dtype == plain.dtype
            if not equal:
                raise DiffersError(f"{name} is {_kind(ours)}, and {_kind(plain)} in the plain module ({where})")
            if not isinstance(ours, Tensor) or not isinstance(plain, Tensor) or not plain.numel():
                continue
            worst, largest = largest_difference(ours, plain)
            if (error := worst / (_TOLERANCES.get(plain.dtype, 5e-2) * max(largest, SMALLEST))) > self.error:
                self.error = error
                self.text = f"the largest error is {worst:.2g}, of values up to {largest:.2g}, in {name} ({where})"

    def expected(
        self, plain: nn.Module, call: Call, training: bool, gradients: bool = True, *, draws: bool = False
    ) -> dict[str, Any]:
        """Results of a plain module; ``draws`` if it may draw random numbers.

        Raises:
            FailsError: if it fails.
            DrawsError: if it draws random numbers.
        """
        try:
            with _NoDraws() if self.looks_for_draws and not draws else contextlib.nullcontext():
                return self.results(plain, call, training, gradients)
        except DrawsError:
            raise
        except Exception as error:
            raise FailsError(f"{type(plain).__name__} fails on {call.where}: {first_line(error)}") from error
