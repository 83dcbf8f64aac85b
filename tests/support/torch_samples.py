"""PyTorch's sample inputs, and torch's equivalent of each of our functions.

The samples are those of ``torch.testing._internal``, which is in torch's wheel. The import takes seconds, so it waits
for the first call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers.dropout import dropout
from transformer_fast.testing import fixed_dropout_seed

Call = tuple[tuple[Any, ...], dict[str, Any]]

SEED = 7
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LEAST_SAMPLES = {
    "scaled_dot_product_attention": 20,
    "layer_norm": 6,
    "rms_norm": 6,
    "embedding": 10,
    "linear_cross_entropy": 100,
    "dropout": 15,
    "linear": 15,
}
"""Smallest number of samples per function, in a torch that has the function."""
LEAST_MODULE_SAMPLES = {
    "Linear": 3,
    "LayerNorm": 6,
    "RMSNorm": 6,
    "Embedding": 2,
    "MultiheadAttention": 64,
    "TransformerEncoderLayer": 35,
    "TransformerDecoderLayer": 60,
    "TransformerEncoder": 35,
    "Transformer": 60,
}
"""Smallest number of samples per module, in training and in evaluation."""
UNIT = 1 / 9
"""Factor for inputs, which lie in [-9, 9], so that scores of attention have unit scale."""


def _layer_norm(x: Tensor, shape: tuple[int, ...], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return tfast.layer_norm(x, weight, bias, eps)


def _rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return tfast.layer_norm(x, weight, None, eps, kind="rms")


def _linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    **kwargs: Any,
) -> Tensor:
    ignored = -100 if ignore_index is None else ignore_index
    return tfast.linear_cross_entropy(
        x, linear_weight, linear_bias, target, class_weight=weight, ignore_index=ignored, **kwargs
    )


OURS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": tfast.scaled_dot_product_attention,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "embedding": tfast.embed,
    "linear_cross_entropy": _linear_cross_entropy,
    "dropout": dropout,
    "linear": tfast.ops.linear,
}
"""Our functions with torch's arguments."""


IN_BLOCKS = {
    "scaled_dot_product_attention": 20,
    "layer_norm": 4,
    "rms_norm": 4,
    "dropout": 3,
    "cross_entropy": 4,
}
"""Smallest number of samples that are ours in a block of ``functional()``, by function."""


def in_a_block(name: str) -> Callable[..., Tensor]:
    """Return torch's function, called in a block."""
    return tfast.functional()(lambda *args, **kwargs: getattr(F, name)(*args, **kwargs))


@functools.cache
def function_samples(name: str, scale: float = 1.0) -> list[Call]:
    """Yield the samples of ``F.<name>``: positional and keyword arguments. Floats are float32, times ``scale``."""
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(SEED)
    calls = []
    for op in op_db:
        # The variants "chunked" repeat the calls with options of torch's algorithm.
        if op.name == f"nn.functional.{name}" and not op.variant_test_name:
            for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
                args = (sample.input, *sample.args)
                if name == "embedding":  # PyTorch's tests pass the weight first
                    args = (args[1], args[0], *args[2:])
                calls.append(_scaled((args, sample.kwargs), scale))
    return calls


@functools.cache
def module_samples(name: str, training: bool) -> list[tuple[nn.Module, Call]]:
    """Yield modules ``nn.<name>`` with random parameters, and the arguments of a call of each."""
    from torch.testing._internal.common_modules import module_db

    torch.manual_seed(SEED)
    made = []
    for info in module_db:
        if info.name == f"nn.{name}":
            given = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": training}
            for sample in info.module_inputs_func(info, **given):
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
                for parameter in module.parameters():
                    parameter.data = representable(parameter.data + 0.1 * torch.randn_like(parameter))
                call = sample.forward_input.args, sample.forward_input.kwargs
                made.append((module.train(training), _scaled(call, UNIT)))
    return made


def representable(t: Tensor) -> Tensor:
    """Round to numbers that every dtype has, so that one call in float64 is the truth of all dtypes."""
    return t.bfloat16().half().to(t.dtype) if t.is_floating_point() else t


def _scaled(call: Call, scale: float) -> Call:
    def one(value: Any) -> Any:
        return representable(value.detach() * scale) if _is_float(value) else value

    args, kwargs = call
    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def torchs(name: str, kwargs: dict[str, Any]) -> Callable[..., Tensor]:
    """Return torch's function; for dropout, our op on the eager reference, which draws the same mask."""
    probability = (
        kwargs.get("p", 0.5) * kwargs.get("training", True) if name == "dropout" else kwargs.get("dropout_p", 0)
    )
    if not 0.0 < probability < 1.0:
        return getattr(F, name)

    def by_the_reference(*args: Any, **kwargs: Any) -> Tensor:
        with tfast.backend("reference"):
            return OURS[name](*args, **kwargs)

    return by_the_reference


def outcome(function: Callable[..., Any], call: Call, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs of a call in a dtype, and the gradients of its inputs and of a module's parameters.

    Each output has a fixed gradient. Under ``torch.no_grad()`` there are no gradients.
    """
    leaves = []

    def one(name: str, value: Any) -> Any:
        if not _is_float(value):
            return value
        value = value.to(dtype, copy=True)
        if name != "weight":  # the weights of classes have no gradient
            leaves.append(value.requires_grad_())
        return value

    args, kwargs = call
    args, kwargs = [one("", value) for value in args], {name: one(name, value) for name, value in kwargs.items()}
    if isinstance(function, nn.Module):
        leaves += function.parameters()
    torch.manual_seed(SEED)
    with fixed_dropout_seed(SEED):
        result = function(*args, **kwargs)
    outputs = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
    if not torch.is_grad_enabled():
        return outputs, []
    generator = torch.Generator().manual_seed(SEED)
    weights = [representable(torch.randn(t.shape, generator=generator)).to(t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
    return [t.detach() for t in outputs], [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
