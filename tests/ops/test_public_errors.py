"""Errors of every public op name the function and the argument: arguments of a wrong type, and calls for which the
kernels have no rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from transformer_fast import ops
from transformer_fast.backends import BackendError
from transformer_fast.ops import registry

TORCHS_OWN = {"linear", "scaled_dot_product_attention"}
"""Functions that raise the errors of PyTorch's function."""
NO_TENSORS = {"decompositions"}

HEADS, TOKENS, ROWS, WEIGHT = torch.randn(2, 2, 5, 8), torch.randn(6, 2, 8), torch.randn(2, 3, 8), torch.randn(11, 8)
STARTS, IDS = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([[1, 2, 3], [4, 5, 6]])
VALID: dict[str, dict[str, Any]] = {
    "attention": {"q": HEADS, "k": HEADS, "v": HEADS},
    "attention_packed": {"q": TOKENS, "k": TOKENS, "v": TOKENS, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS},
    "attention_decode": {"q": HEADS, "k_cache": HEADS, "v_cache": HEADS, "lengths": torch.tensor([5, 5])},
    "layer_norm": {"x": ROWS, "weight": ROWS[0, 0], "bias": ROWS[0, 0], "residual": ROWS},
    "dropout": {"x": ROWS, "p": 0.1},
    "embed": {"ids": IDS, "weight": WEIGHT},
    "add_positional": {"x": ROWS, "table": WEIGHT, "dropout_p": 0.1},
    "positional_table": {"length": 3, "d_model": 8},
    "linear_cross_entropy": {"x": ROWS, "weight": WEIGHT, "bias": None, "target": IDS},
}
"""A valid call of each function."""


class Wrong:
    """An object that no argument takes."""


def functions() -> Iterator[str]:
    yield from sorted(set(ops.__all__) - TORCHS_OWN - NO_TENSORS)


def arguments() -> Iterator[Any]:
    for name in functions():
        for argument in inspect.signature(getattr(ops, name)).parameters.values():
            if argument.kind is not inspect.Parameter.VAR_KEYWORD:
                yield pytest.param(name, argument.name, id=f"{name}-{argument.name}")


def test_every_function_has_a_valid_call() -> None:
    for name in functions():
        getattr(ops, name)(**VALID[name])


@pytest.mark.parametrize(("name", "argument"), arguments())
def test_the_error_names_the_argument(name: str, argument: str) -> None:
    function: Callable[..., Any] = getattr(ops, name)
    text = argument in ("empty_rows", "layout", "reduction", "return_weights")  # one of several
    with pytest.raises(ValueError if text else TypeError, match=rf"\b{argument}\b"):
        function(**VALID[name] | {argument: Wrong()})


@pytest.mark.parametrize("name", sorted(registry.OPS.keys() - {"linear"}))
def test_a_refusal_names_the_function(name: str) -> None:
    argument, given = next((n, t) for n, t in VALID[name].items() if isinstance(t, Tensor) and t.is_floating_point())

    def call(t: Tensor) -> Any:
        return getattr(ops, name)(**VALID[name] | {argument: t})

    with pytest.raises(BackendError, match=rf"^{name} cannot run inside vmap"):
        torch.func.vmap(call, randomness="same")(given[None])
    with pytest.raises(BackendError, match=rf"^{name} cannot run in forward-mode"), forward_ad.dual_level():
        call(forward_ad.make_dual(given, torch.ones_like(given)))


def test_a_table_is_made_inside_a_transform() -> None:
    x = torch.randn(2, 3, 8)
    added = torch.func.vmap(lambda row: row + ops.positional_table(3, 8))(x)
    assert torch.equal(added, x + ops.positional_table(3, 8))


@pytest.mark.parametrize("option", ["scale", "softcap", "dropout_p"])
def test_a_tensor_of_several_numbers_is_no_number(option: str) -> None:
    with pytest.raises(TypeError, match=f"attention: {option} must be a number"):
        ops.attention(HEADS, HEADS, HEADS, **{option: torch.tensor([0.5, 0.25])})


def test_lengths_of_a_cache_may_be_of_two_types() -> None:
    with pytest.raises(TypeError, match=r"lengths must be a tensor of torch.int32 or torch.int64, got torch\.float32"):
        ops.attention_decode(HEADS, HEADS, HEADS, torch.tensor([5.0, 5.0]))


def test_weights_of_packed_sequences_on_the_meta_device() -> None:
    given = {name: t.to("meta") for name, t in VALID["attention_packed"].items()}
    assert ops.attention_packed(**given, max_seqlen_q=4, max_seqlen_k=4).is_meta
    with pytest.raises(ValueError, match="attention_packed: return_weights needs the lengths"):
        ops.attention_packed(**given, max_seqlen_q=4, max_seqlen_k=4, return_weights=True)
