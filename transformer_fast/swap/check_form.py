"""Trial of a hand-written module: its own forward and that of its form on the same inputs, on a copy.

Each module is run, with its own parameters. The first module of a class is tried at all sizes, a further one with the
same attributes at one size. The children are those of the model, which were tried before.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..layers.hooks import HOOKS
from .check import Worst, results, set_dropouts
from .form import OURS, Form, form_of, own_attributes
from .form_calls import FULL, SMALL, Calls, Size
from .form_class import class_of_form, compute
from .inputs import Call, first_line

_COMPARED = 20_000
"""Most numbers of a parameter whose gradient is compared; that of a larger one follows from those of its bias and
input."""
_DROPOUTS = 4
"""Most dropouts that are tried one by one; more are tried together."""
_LISTS = ("layers", "enc_layers", "dec_layers", "blks")
DIFFERS = "it has the names of a known module, but computes something else"


class FormTrial:
    """Trials of the modules of one model.

    Attributes:
        tried: differences that the first modules have shown, by class and attributes.
    """

    def __init__(self) -> None:
        self.tried: dict[Hashable, str] = {}

    def difference(self, module: nn.Module, form: Form) -> str:
        """Compare a module with its form.

        Returns:
            The difference as text; "" if there is none.
        """
        key = form, _description(module)
        if known := self.tried.get(key):
            return known
        with _quiet():
            try:
                trial = _Trial(module, form)
                found = trial.at_one_size() if key in self.tried else trial.at_all_sizes()
            except _LeftError as reason:
                found = str(reason)
        self.tried.setdefault(key, found)
        return found


class _LeftError(Exception):
    """Error whose text is the reason to leave a module."""


def _description(module: nn.Module, depth: int = 0) -> Hashable:
    """Class, plain attributes and shapes of a module, and of the modules inside that were not tried by themselves."""
    attributes = tuple((name, _plain(value)) for name, value in own_attributes(module))
    shapes = tuple((name, p is not None and tuple(p.shape)) for name, p in module._parameters.items())
    tried = depth > 0 and form_of(module) is not None
    children = () if tried else module._modules.items()
    inside = tuple((name, child and _description(child, depth + 1)) for name, child in children)
    return type(module), attributes, shapes, inside


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    return type(value), None if isinstance(value, Tensor) else id(value)


class _NoDraws(TorchDispatchMode):
    """Raise an error where random numbers are drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            name = func.overloadpacket.__name__
            raise _LeftError(f"it draws random numbers with {name}, whose probability a trial cannot set")
        return func(*args, **(kwargs or {}))


class _OwnSeeds(TorchFunctionMode):
    """Draw the seeds of dropout masks from a generator of the trial."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {"generator": self.generator} if func is torch.randint else {}
        return func(*args, **{**(kwargs or {}), **own})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context in which autocast, inference mode and the default device of the caller have no influence."""
    on_cpu = torch.get_default_device().type == "cpu"  # then no device mode, which costs time
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        contextlib.nullcontext() if on_cpu else torch.device("cpu"),
    ):
        yield


class _Trial:
    """Trial of one module.

    Attributes:
        itself: copy with the module's parameters.
        changed: copy in which parameters of equal values, such as those of a branch that is zero at first, have others.
    """

    def __init__(self, module: nn.Module, form: Form) -> None:
        self.module, self.form, self.worst = module, form, Worst()
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        wide = form.exact or any(p.dtype == torch.float64 for p in module.parameters())
        self.dtype = torch.float64 if wide else torch.float32
        self.succeeded = self.computed = False
        try:
            self.made = class_of_form(form, module)
            self.itself = self._copy(module)
        except Exception as error:
            raise _LeftError(f"a copy for the trial could not be made: {first_line(error)}") from error

    def at_one_size(self) -> str:
        """Compare at one size, in evaluation; in training with other values of parameters of equal values."""
        call = self._calls(SMALL)[-1]
        self._compare(self.itself, call, SMALL, training=False)
        if any(map(_is_constant, _own_parameters(self.module))):
            self._compare(self._changed(), call, SMALL, training=True)
        return self._outcome()

    def at_all_sizes(self) -> str:
        """Compare at all sizes, in evaluation and training, and with dropouts that drop everything.

        A stack is tried with its first layer, and in evaluation with all of them.
        """
        name = next((n for n in _LISTS if isinstance(self.module._modules.get(n), nn.ModuleList | nn.Sequential)), "")
        whole, self.itself = self.itself, self._shortened(self.itself, name) if name else self.itself
        changed = self._changed()
        for size in FULL:
            calls = self._calls(size)
            every = size is FULL[0] or (size is FULL[-1] and self.form.attends)
            for call in calls if every else calls[-1:]:
                self._compare(self.itself, call, size, training=False)
            if size.trains and (self.form.attends or not size.empty):
                self._compare(changed, calls[-1], size, training=True)
        if whole is not self.itself:
            self.itself = whole
            self._compare(whole, self._calls(SMALL)[-1], SMALL, training=False)
        return self._outcome() or self._with_dropout(changed)

    def _outcome(self) -> str:
        if self.succeeded and not self.computed:
            return DIFFERS
        return "" if self.succeeded else "no trial call succeeded"

    def _calls(self, size: Size) -> Calls:
        try:
            return self.form.calls(self.itself, dataclasses.replace(size, generator=self.generator))
        except Exception as error:
            raise _LeftError(f"a call for the trial could not be made: {first_line(error)}") from error

    def _copy(self, module: nn.Module, changes: bool = False) -> nn.Module:
        trial = _Copy(self.dtype, self.generator if changes else None).of(module, root=True)
        set_dropouts(trial, 0.0)
        return trial

    def _changed(self) -> nn.Module:
        return self._copy(self.itself, changes=True)

    def _shortened(self, stack: nn.Module, name: str) -> nn.Module:
        """Copy of a stack with its first layer; the stack itself if its code needs all of them."""
        short = self._copy(stack)
        for place in list(short._modules[name]._modules)[1:]:  # type: ignore[union-attr]
            del short._modules[name]._modules[place]  # type: ignore[union-attr]
        try:
            self._results(short, self._calls(SMALL)[-1], training=False)
        except Exception:
            return stack
        return short

    def _compare(self, trial: nn.Module, call: tuple[Any, ...], size: Size, *, training: bool) -> None:
        how = {"training": training, "gradients": not (self.form.adds_masks and size.empty)}
        watched = size is FULL[0]
        try:
            with _NoDraws() if watched else contextlib.nullcontext():
                expected = self._results(trial, call, **how)
        except _LeftError:
            raise
        except Exception as error:
            if self.succeeded:  # a length or a mask that the module does not take
                return
            raise _LeftError(f"a trial call failed: {first_line(error)}") from error
        self.succeeded = True
        self._expect(expected, trial, call, **how)

    def _expect(self, expected: dict[str, Any], trial: nn.Module, call: tuple[Any, ...], **how: bool) -> None:
        def run(*args: Any) -> Any:
            result = compute(self.form, trial, args, {})
            self.computed |= result is not None
            return trial(*args) if result is None else result

        trial.__class__, original = self.made, type(trial)
        try:
            found = self._results(trial, call, **how, run=run)
        except Exception as error:
            text = f"it has the structure of {self.form.name}, but its fused form failed"
            raise _LeftError(f"{text}: {first_line(error)}") from error
        finally:
            trial.__class__ = original
        try:
            self.worst.compare(found, expected, "")
        except ValueError as error:
            raise _LeftError(DIFFERS) from error
        if self.worst.ratio > 1.0:
            raise _LeftError(DIFFERS)

    def _results(
        self, trial: nn.Module, call: tuple[Any, ...], training: bool, gradients: bool = False, run: Any = None
    ) -> dict[str, Any]:
        trained = _is_activation if gradients else None
        return results(trial, Call(call, {}, ""), training=training, trained=trained, run=run)

    def _with_dropout(self, trial: nn.Module) -> str:
        """Compare in training with dropouts that drop everything: one after the other, or many together."""
        call = self._calls(FULL[0])[-1]
        tried = {id(m) for child in trial.children() if form_of(child) is not None for m in child.modules()}
        places = set_dropouts(trial, 0.0)
        own = [(part, name) for part, name in places if id(part) not in tried]
        singles = [[place] for place in own] if len(own) <= _DROPOUTS else []
        for chosen in singles or [own or places]:
            for part, name in chosen:
                part.__dict__[name] = 1.0
            with _OwnSeeds(self.generator):
                self._expect(self._results(trial, call, training=True), trial, call, training=True)
            set_dropouts(trial, 0.0)
        return ""


def _is_activation(t: Tensor) -> bool:
    """Return True for an input of three dimensions; a float of another rank is a mask."""
    return t.dim() == 3


def _own_parameters(m: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module and of the children that were not tried by themselves."""
    yield from (p for p in m._parameters.values() if p is not None)
    for child in m.children():
        if form_of(child) is None:
            yield from _own_parameters(child)


class _Copy:
    """Copy on the CPU, without hooks. Parameters have one dtype, and share memory where they have it already.

    Args:
        dtype: dtype of the parameters and of other tensors.
        generator: source of other values for parameters of equal values; None keeps the values.
    """

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None) -> None:
        self.dtype, self.generator = dtype, generator
        self.memo: dict[int, Any] = {}

    def of(self, module: nn.Module, root: bool = False) -> nn.Module:
        """Copy of a module. A module of an unknown class is copied as its author says."""
        if id(module) in self.memo:
            return self.memo[id(module)]
        known = root or form_of(module) is not None or type(module).__module__.startswith(("torch.nn.", "transformer_"))
        if not known:
            return self._as_its_author_copies(module)
        new = self.memo[id(module)] = module.__class__.__new__(module.__class__)
        for name, value in module.__dict__.items():
            if not name.startswith(OURS):  # a record of calls, kept weights
                new.__dict__[name] = self._copied(name, value)
        return new

    def _copied(self, name: str, value: Any) -> Any:
        if name in HOOKS:
            return type(value)()
        if name == "_parameters":
            return {key: None if p is None else self._parameter(p) for key, p in value.items()}
        if name == "_buffers":
            return {key: None if t is None else self._tensor(t) for key, t in value.items()}
        if name == "_modules":
            return {key: None if child is None else self.of(child) for key, child in value.items()}
        return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._value, value))
        return {key: self._value(inner) for key, inner in value.items()} if type(value) is dict else value

    def _as_its_author_copies(self, module: nn.Module) -> nn.Module:
        for part in module.modules():
            self.memo |= {id(getattr(part, name)): type(getattr(part, name))() for name in HOOKS}
            for p in part._parameters.values():
                if p is not None:
                    self._parameter(p)
            tensors = [*part._buffers.values(), *(value for _, value in own_attributes(part))]
            self.memo |= {id(t): self._tensor(t) for t in tensors if isinstance(t, Tensor) and id(t) not in self.memo}
        state = torch.get_rng_state()
        new = copy.deepcopy(module, self.memo)
        if not torch.equal(state, torch.get_rng_state()):  # its copy is made by a constructor
            torch.set_rng_state(state)
        return new

    def _parameter(self, p: nn.Parameter) -> nn.Parameter:
        if id(p) not in self.memo:
            new = p.detach().to("cpu", self.dtype) if p.is_floating_point() else p.detach().to("cpu")
            if self.generator is not None and _is_constant(new):
                new = new + 0.1 * torch.randn(new.shape, generator=self.generator, dtype=torch.float32).to(new.dtype)
            self.memo[id(p)] = nn.Parameter(new, new.is_floating_point() and new.numel() <= _COMPARED)
        return self.memo[id(p)]

    def _tensor(self, t: Tensor) -> Tensor:
        return t.detach().to("cpu", self.dtype if t.is_floating_point() else t.dtype, copy=True)


def _is_constant(p: Tensor) -> bool:
    """Return True for a parameter of equal values, such as that of a branch which is zero at first."""
    values = p.detach().flatten()
    return len(values) > 1 and bool(values[0] == values[1]) and bool((values == values[0]).all())
