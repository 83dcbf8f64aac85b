"""Arguments with the names of other libraries: the error says what to write here."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import transformer_fast as tfast
from transformer_fast.ops.unknown_names import HINTS

Q, IDS, X, W = torch.randn(1, 2, 3, 4), torch.zeros(1, 3).long(), torch.randn(1, 3, 4), torch.ones(4)
TOKENS, ENDS, LENGTHS = torch.randn(3, 2, 4), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3])
CALLS = {
    "attention": (Q, Q, Q),
    "attention_packed": (TOKENS, TOKENS, TOKENS, ENDS, ENDS),
    "attention_decode": (Q, Q, Q, LENGTHS),
    "layer_norm": (X, W, W),
    "embed": (IDS, torch.randn(5, 4)),
}


def test_every_unknown_name_is_in_the_error() -> None:
    with pytest.raises(TypeError, match=r"write scale=.*Also: dropout; write dropout_p="):
        tfast.attention(*CALLS["attention"], softmax_scale=1.0, dropout=0.1)
    with pytest.raises(TypeError, match=r"argument: colour; it takes q, k, v, mask, bias, causal, .*$"):
        tfast.attention(*CALLS["attention"], colour=1)


@pytest.mark.parametrize("op", HINTS)
def test_a_misspelt_name_is_near_the_one_that_is_meant(op: str) -> None:
    for name in list(inspect.signature(getattr(tfast, op)).parameters)[:-1]:
        misspelt = f"{name}_"
        with pytest.raises(TypeError, match=rf"argument: {misspelt}; did you mean {name}\?$"):
            getattr(tfast, op)(*CALLS[op], **{misspelt: None})


def test_explain_takes_what_attention_takes() -> None:
    wrong = ("is_causal", "write causal=True"), ("dropout_", "did you mean dropout_p?"), ("unknown", "it takes q, k, v")
    for name, said in wrong:
        with pytest.raises(TypeError, match=re.escape(f"explain() got an unexpected keyword argument: {name}; {said}")):
            tfast.explain(Q, Q, Q, **{name: True})


def test_the_shape_that_torch_wants_second() -> None:
    with pytest.raises(
        TypeError, match="weight must be a tensor, got tuple; unlike torch's, this layer_norm takes no normalized_shape"
    ):
        tfast.layer_norm(X, (4,), W)


@pytest.mark.parametrize("op", HINTS)
def test_what_the_hints_say_is_there(op: str) -> None:
    """Hints name existing things, and no hint is for an argument that the op has."""
    arguments = inspect.signature(getattr(tfast, op)).parameters
    for name, hint in HINTS[op].items():
        assert name not in arguments, f"{op} has {name}"
        written = re.findall(r"\b(\w+)=", hint) + re.findall(r"^(\w+)$", hint)
        assert all(word in arguments for word in written), f"{op}, {name}: {hint}"
        assert all(hasattr(tfast.AttentionMask, word) for word in re.findall(r"AttentionMask\.(\w+)", hint))
        said = f"{op}() got an unexpected keyword argument: {name}; write {hint}"
        with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
            getattr(tfast, op)(*CALLS[op], **{name: None})
