"""Isolated context of a trial: float64, its own random generator, and the reference backend, for one thread only.

The default dtype and the default generator of PyTorch belong to the whole program, so neither is touched. Instead, a
mode adds a dtype and a generator to the calls of this thread.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import backends

Drop = tuple[float, bool]
"""A dropout probability, and True for a call in training."""


class DrawsNumbersError(Exception):
    """Error: a module draws random numbers by a function that takes no generator."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context in which the caller's random state, dtype, autocast, grad mode and backend have no influence."""
    on_cpu = torch.get_default_device().type == "cpu"  # then no device mode, which costs time
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        contextlib.nullcontext() if on_cpu else torch.device("cpu"),
        backends.backend("reference"),
        _Float64Mode(),
    ):
        yield


class _Float64Mode(TorchFunctionMode):
    """Mode that computes in float64 instead of float32 or the default dtype, and draws from its own generator.

    Many norms convert every input to float32. The trial compares formulas, not rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator(device="cpu").manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # an attribute: half of all calls
            made = func(*args)
            return _widened(func, args, {}, made) if isinstance(made, Tensor) else made
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if arg is torch.float32 else arg for k, arg in (kwargs or {}).items()}
        if func in _DRAW:
            kwargs["generator"] = kwargs.get("generator") or self.generator
        elif func in _TAKES_NO_GENERATOR or (func in _DROP and _drops(func, args, kwargs)):
            raise DrawsNumbersError(
                f"it draws random numbers with {func.__name__}, whose probability a trial cannot set"
            )
        func = Tensor.double if func is Tensor.float else func
        made = func(*args, **kwargs)
        return _widened(func, args, kwargs, made) if isinstance(made, Tensor) else made


def _widened(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> Tensor:
    """Result in float64; computed in float64 if only the default dtype made it narrower."""
    if made.dtype not in (torch.float32, torch.get_default_dtype()) or made.dtype is torch.float64:
        return made
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if any(made is t for t in given):  # changed in place
        return made
    if func in _MAKE:
        return func(*args, **{**kwargs, "dtype": torch.float64})
    if not any(t.is_floating_point() for t in given):
        with contextlib.suppress(Exception):  # where only integers serve
            args, kwargs = tree_map_only(Tensor, lambda t: t if t.dtype is torch.bool else t.double(), (args, kwargs))
            again = func(*args, **kwargs)
            if again.dtype is torch.float64:
                return again
    return made.double()


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call draws random numbers: in training, with a probability other than 0 and 1."""
    p, training = _DROP[func](*args, **kwargs)
    return training and 0.0 < p < 1.0


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True
) -> Drop:
    return p, training and train


def _rrelu(input: Tensor, lower: float = 0, upper: float = 0, training: bool = False, inplace: bool = False) -> Drop:
    return 0.5, training


def _sdpa(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Drop:
    return dropout_p, True


def _attention(*args: Any, **kwargs: Any) -> Drop:
    given = _ATTENTION.bind(*args, **kwargs).arguments
    return given["dropout_p"], given.get("training", True)


def _rnn(*args: Any) -> Drop:
    """Probability and training flag of a call (x, state, weights, biases, layers, dropout, train, ...), or with lengths
    after x."""
    return (args[5], args[6]) if isinstance(args[3], bool) else (args[6], args[7])


_ATTENTION = inspect.signature(F.multi_head_attention_forward)
_DRAW = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.normal,
    torch.bernoulli,
    torch.multinomial,
    torch.poisson,
    Tensor.bernoulli,
    Tensor.multinomial,
    Tensor.bernoulli_,
    Tensor.uniform_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.exponential_,
    Tensor.cauchy_,
    Tensor.geometric_,
    Tensor.log_normal_,
}
"""Functions that take a generator."""
_TAKES_NO_GENERATOR = {torch.rand_like, torch.randn_like, torch.randint_like, F.gumbel_softmax}
_DROP: dict[Any, Callable[..., Drop]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    **dict.fromkeys((torch.dropout, torch.alpha_dropout, torch.feature_dropout), _dropout),
    **dict.fromkeys((F.feature_alpha_dropout, torch.feature_alpha_dropout), _dropout),
    F.rrelu: _rrelu,
    F.scaled_dot_product_attention: _sdpa,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _rnn),
}
"""Functions with a dropout probability, and getters of probability and training flag from the arguments."""
_MAKE = {
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.scalar_tensor,
    torch.arange,
    torch.linspace,
    torch.logspace,
    torch.full,
    torch.ones,
    torch.zeros,
    torch.empty,
    torch.eye,
    torch.rand,
    torch.randn,
    torch.normal,
}
"""Functions that make tensors and take a dtype."""
