"""Modules that ``accelerate`` swaps, made from their signatures, and calls with tensors of many kinds."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers.linear import Linear
from transformer_fast.swap.rules import SWAPS

N, L, E, HEADS, VOCABULARY = 3, 5, 8, 2, 11

SIZES = {
    "normalized_shape": E, "num_embeddings": VOCABULARY, "embedding_dim": E, "in_features": E, "out_features": 6,
    "embed_dim": E, "num_heads": HEADS, "d_model": E, "nhead": HEADS, "dim_feedforward": 12, "num_layers": 2,
    "batch_first": True, "eps": 1e-5,
}  # fmt: skip
"""Values of constructor arguments, by name."""

KINDS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (*SWAPS, nn.Linear)}
"""Classes of torch.nn that have a swapped class, by name."""
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def make(kind: type[nn.Module], p: float = 0.0) -> nn.Module:
    """Make a module of a class. Constructor arguments with other names need an entry in SIZES."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name in SIZES:
            given[name] = SIZES[name]
        elif name in ("p", "dropout"):
            given[name] = p
        elif name in ("encoder_layer", "decoder_layer"):
            given[name] = make(nn.TransformerEncoderLayer if name[0] == "e" else nn.TransformerDecoderLayer, p)
        else:
            assert name == "self" or parameter.default is not inspect.Parameter.empty, f"SIZES needs {name!r}"
    module = kind(**given)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return module


def swapped(module: nn.Module) -> nn.Module:
    """Return an accelerated copy of a module."""
    fast = copy.deepcopy(module)
    tfast.accelerate(fast)
    if type(fast) is nn.Linear:  # on this processor torch's is as fast
        fast.__class__ = Linear
    assert type(fast) is not type(module)
    return fast


def inputs(kind: type[nn.Module], length: int = L) -> list[Tensor]:
    """Return tensors for the required arguments of forward: ids, or rows of the same length."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    count = sum(p.default is inspect.Parameter.empty for p in parameters)
    if issubclass(kind, nn.Embedding):
        return [torch.randint(0, VOCABULARY, (N, length)) for _ in range(count)]
    return [torch.randn(N, length, E) for _ in range(count)]


def outcome(call: Callable[[], Any], plain: Callable[[Any], Any] = lambda t: t) -> list[Any]:
    """Return the result of a call from a fixed seed, or the class of its error.

    Args:
        call: returns a tensor, or a tuple of tensors and None.
        plain: makes a plain tensor, or something else that can be compared, of what the call returns.
    """
    torch.manual_seed(1)
    try:
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        return [(type(t), None if t is None else plain(t)) for t in results]
    except Exception as error:
        return [type(error)]


def assert_alike(ours: list[Any], theirs: list[Any], *, exactly: bool = True) -> None:
    """Assert that two outcomes have the same classes and values."""
    assert len(ours) == len(theirs), f"{ours} instead of {theirs}"
    for mine, expected in zip(ours, theirs):
        if not isinstance(expected, tuple):
            assert mine is expected
            continue
        assert isinstance(mine, tuple), f"{mine} instead of a result"
        assert mine[0] is expected[0]
        if isinstance(expected[1], Tensor):
            torch.testing.assert_close(mine[1], expected[1], **({"atol": 0, "rtol": 0} if exactly else {}))
        else:
            assert mine[1] == expected[1]


def assert_as_torch(
    module: nn.Module,
    call: Callable[[nn.Module], Any],
    plain: Callable[[Any], Any] = lambda t: t,
    *,
    fast: nn.Module | None = None,
    exactly: bool = True,
) -> None:
    """Assert that the swapped module gives the result of torch's module, or fails with its error."""
    fast = swapped(module) if fast is None else fast
    assert_alike(*(outcome(lambda m=m: call(m), plain) for m in (fast, module)), exactly=exactly)
