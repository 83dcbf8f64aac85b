"""Changes that users make to a child of a module: a fused parent, or a search, must follow them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

Change = Callable[[nn.Module, str], None]
"""Change of the child at a path below a root; raises NotApplicable if the child cannot be changed so."""


class NotApplicable(Exception):
    """Error: the child has nothing to change in this way."""


def altered(value: Any) -> Any:
    """Return a value, or a tuple, with its first tensor changed, position by position; no norm undoes the change."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return value + 0.5 * nn.functional.softplus(value)
        return value - value.sign() if value.dtype == torch.int64 else value
    if isinstance(value, tuple):
        return (altered(value[0]), *value[1:])
    return value


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    root.get_submodule(parent)._modules[name] = module


def subclass(root: nn.Module, path: str) -> None:
    """Return a subclass that computes something else."""
    child = root.get_submodule(path)
    kind = type(child)
    forward = lambda self, *args, **kwargs: altered(kind.forward(self, *args, **kwargs))  # noqa: E731
    child.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def patched_forward(root: nn.Module, path: str) -> None:
    child = root.get_submodule(path)
    kind = type(child)
    child.forward = types.MethodType(lambda m, *args, **kwargs: altered(kind.forward(m, *args, **kwargs)), child)


def forward_hook(root: nn.Module, path: str) -> None:
    root.get_submodule(path).register_forward_hook(lambda m, args, out: altered(out))


def forward_pre_hook(root: nn.Module, path: str) -> None:
    def change(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (altered(args[0]), *args[1:]), kwargs
        return args, {name: altered(value) if n == 0 else value for n, (name, value) in enumerate(kwargs.items())}

    root.get_submodule(path).register_forward_pre_hook(change, with_kwargs=True)


def full_backward_hook(root: nn.Module, path: str) -> None:
    def double(m: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad * 2 for grad in grad_input)

    root.get_submodule(path).register_full_backward_hook(double)


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _weight_of(child: nn.Module) -> Tensor:
    weight = child._parameters.get("weight")
    if weight is None:
        raise NotApplicable
    return weight


def parametrization(root: nn.Module, path: str) -> None:
    child = root.get_submodule(path)
    _weight_of(child)
    parametrize.register_parametrization(child, "weight", _Halved())


def weight_norm(root: nn.Module, path: str) -> None:
    child = root.get_submodule(path)
    if _weight_of(child).dim() < 2:
        raise NotApplicable
    parametrizations.weight_norm(child, "weight")
    with torch.no_grad():
        child.parametrizations.weight.original0.mul_(1.5)


class Adapter(nn.Module):
    """Module around another one, as LoRA makes it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return altered(self.base(*args, **kwargs))


def adapter(root: nn.Module, path: str) -> None:
    _replace(root, path, Adapter(root.get_submodule(path)).train(root.training))


def identity(root: nn.Module, path: str) -> None:
    _replace(root, path, nn.Identity())


class Kept:
    """Outputs that a child stored, with a copy of each, which shows later writes."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def keep(self, value: Any) -> Any:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor):
            self.pairs.append((tensor, tensor.detach().clone()))
        return value

    def assert_untouched(self) -> None:
        assert all(torch.equal(kept, copy) for kept, copy in self.pairs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()


def keeps_its_output(root: nn.Module, path: str) -> None:
    child = root.get_submodule(path)
    kind, child.kept = type(child), Kept()
    child.forward = types.MethodType(lambda m, *args, **kwargs: m.kept.keep(kind.forward(m, *args, **kwargs)), child)


def returns_its_input(root: nn.Module, path: str) -> None:
    class ReturnsInput(nn.Module):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return x

    _replace(root, path, ReturnsInput())


CHANGES: tuple[Change, ...] = (
    subclass,
    patched_forward,
    forward_hook,
    forward_pre_hook,
    full_backward_hook,
    parametrization,
    weight_norm,
    adapter,
    identity,
    keeps_its_output,
    returns_its_input,
)
