"""Trial of a hand-written module: its own forward and that of its form.

Each module is run, with its own parameters. The first module of a class is tried at all sizes, a further one with the
same attributes at one size. The children are those of the model, which were tried before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .check import Call, DiffersError, Trial, alone, change_constants, copy_of, first_line, is_constant
from .form import Form, form_of, own_attributes
from .form_calls import FULL, SMALL, Size
from .form_class import class_of_form, compute

_COMPARED = 20_000
"""Most numbers of a parameter whose gradient is compared; that of a larger one follows from those of its bias and
input."""
_DROPOUTS = 4
"""Most dropouts that are tried one by one; more are tried together."""
_LISTS = ("layers", "enc_layers", "dec_layers", "blks")
DIFFERS = "it has the names of a known module, but computes something else"


def difference(module: nn.Module, form: Form, tried: dict[Hashable, str]) -> str:
    """Difference of a module and its form, as text; "" if there is none.

    Args:
        tried: differences that the first modules of a model have shown, by form, class and attributes.
    """
    key = form, tuple(map(_description, _own_parts(module)))
    if known := tried.get(key):
        return known
    cpu = torch.get_default_device().type == "cpu"  # then no device mode, which costs time
    with alone(), contextlib.nullcontext() if cpu else torch.device("cpu"):
        try:
            trial = _FormTrial(module, form)
            trial.at_one_size(module) if key in tried else trial.at_all_sizes(module)
            found = "" if trial.computed else DIFFERS
        except DiffersError:
            found = DIFFERS
        except Exception as error:
            found = str(error) if isinstance(error, ValueError) else f"its trial failed: {first_line(error)}"
    tried.setdefault(key, found)
    return found


def _own_parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and its parts by path, without the parts of those that were tried by themselves."""
    yield path, module
    if not path or form_of(module) is None:
        for name, child in module._modules.items():
            if child is not None:
                yield from _own_parts(child, f"{path}.{name}" if path else name)


def _description(part: tuple[str, nn.Module]) -> Hashable:
    """Class, plain attributes and shapes."""
    path, m = part
    attributes = tuple((name, _plain(value)) for name, value in own_attributes(m))
    shapes = tuple((name, p is not None and tuple(p.shape)) for name, p in m._parameters.items())
    return path, type(m), attributes, shapes


def _plain(value: Any) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    return type(value), None if isinstance(value, Tensor) else id(value)


class _OwnSeeds(TorchFunctionMode):
    """Draw the seeds of dropout masks from a generator of the trial."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {"generator": self.generator} if func is torch.randint else {}
        return func(*args, **{**(kwargs or {}), **own})


class _FormTrial(Trial):
    """Trial of one module.

    Attributes:
        computed: True if the form has computed a call.
    """

    def __init__(self, module: nn.Module, form: Form) -> None:
        super().__init__(f"fused {form.name}")
        self.form, self.computed = form, False
        self.kind = class_of_form(form, module)
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        wide = form.exact or any(p.dtype == torch.float64 for p in module.parameters())
        self.dtype = torch.float64 if wide else torch.float32
        tried = {path for path, part in _own_parts(module) if path and form_of(part) is not None}
        self.own = {path for path, _ in _own_parts(module)} - tried

    def make(self, plain: nn.Module) -> nn.Module:
        """Make a module of the form with the same children and parameters."""
        return _twin(plain, self.kind)

    def run(self, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by the form, and note whether it did; or run the author's forward."""
        result = compute(self.form, module, args, {}) if type(module) is self.kind else None
        self.computed |= result is not None
        return module(*args) if result is None else result

    def trained(self, t: Tensor) -> bool:
        """Return True for an input of three dimensions; a float of another rank is a mask."""
        return t.dim() == 3

    def compare(self, *args: Any, **kwargs: Any) -> None:
        """Compare a call.

        Raises:
            DiffersError: if an error is larger than allowed.
        """
        super().compare(*args, **kwargs)
        if self.error > 1.0:
            raise DiffersError(self.text)

    def at_one_size(self, module: nn.Module) -> None:
        """Compare at one size, in evaluation; in training with other values of parameters of equal values."""
        self.looks_for_draws = False
        plain = self._copy(module)
        pair = self.pair(plain, "its parameters")
        self.compare(pair, self._calls(plain, SMALL)[-1], modes=(False,))
        own = (p for path in self.own for p in plain.get_submodule(path)._parameters.values())
        if any(p is not None and is_constant(p) for p in own):
            change_constants(plain, generator=self.generator)
            self.compare(pair, self._training_call(plain, SMALL), modes=(True,))

    def at_all_sizes(self, module: nn.Module) -> None:
        """Compare at all sizes, in evaluation and training, and with dropouts that drop everything.

        A stack is tried with its first layer, and in evaluation with all of them.
        """
        full = self._copy(module)
        plain = self._shortened(full)
        pair = self.pair(plain, "its parameters")
        for size in FULL:
            self.looks_for_draws = size is FULL[0]
            calls = self._calls(plain, size)
            every = size is FULL[0] or (size is FULL[-1] and self.form.attends)
            for call in calls if every else calls[-1:]:
                self.compare(pair, call, modes=(False,))
        if plain is not full:
            self.compare(self.pair(full, "its parameters"), self._calls(full, SMALL)[-1], modes=(False,))
        if change_constants(plain, generator=self.generator):
            pair.words = "other values of equal parameters"
        for size in FULL:
            self.looks_for_draws = size is FULL[0]
            if size.trains and (self.form.attends or not size.empty):
                self.compare(pair, self._training_call(plain, size), modes=(True,))
        places = [place for place in pair.dropouts if place[0] in self.own]
        singles = [[place] for place in places] if len(places) <= _DROPOUTS else []
        groups = singles or [places or pair.dropouts]
        with _OwnSeeds(self.generator):
            call = self._calls(plain, FULL[0])[-1]
            self.compare(pair, call, modes=(), drops=[group for group in groups if group], gradients=False)

    def _copy(self, module: nn.Module) -> nn.Module:
        made = copy_of(module, self.dtype)
        for p in made.parameters():
            p.requires_grad_(p.is_floating_point() and p.numel() <= _COMPARED)
        return made

    def _calls(self, plain: nn.Module, size: Size) -> list[Call]:
        made = self.form.calls(plain, dataclasses.replace(size, generator=self.generator))
        where, first = f"batch {size.batch}, length {size.queries}", size is FULL[0]
        return [Call(args, {}, where, may_fail=n > 0 or not first) for n, args in enumerate(made)]

    def _training_call(self, plain: nn.Module, size: Size) -> Call:
        empty = size.empty and not self.form.adds_masks
        return self._calls(plain, dataclasses.replace(size, empty=empty))[-1]

    def _shortened(self, stack: nn.Module) -> nn.Module:
        """The stack with its first layer; itself if it is no stack, or if its code needs all layers."""
        for name in _LISTS:
            layers = stack._modules.get(name)
            if isinstance(layers, nn.ModuleList | nn.Sequential):
                short = _twin(stack, type(stack))
                first = _twin(layers, type(layers))
                first._modules = dict(list(layers._modules.items())[:1])
                short._modules = {**stack._modules, name: first}
                try:
                    self.expected(short, self._calls(short, SMALL)[-1], training=False)
                except Exception:
                    break
                return short
        return stack


def _twin(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Module of a class with the same attributes, children and parameters."""
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    return twin
