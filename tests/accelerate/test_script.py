"""``torch.jit.script`` after ``accelerate``: the scripted model, or the error, of the plain model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import handwritten
import pytest
import scripted_models
import sdpa_models
import torch
from torch import nn

import transformer_fast as tfast
from transformer_fast.accelerate.functional import FunctionalCalls
from transformer_fast.reference import layers as reference
from transformer_fast.swap.form_class import Formed

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*TorchScript:UserWarning")
X = torch.randn(2, 5, 32)
PADDING = torch.arange(5) >= torch.tensor([[5], [3]])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "norms": (lambda: nn.Sequential(nn.LayerNorm(32), nn.RMSNorm(32), nn.Dropout(0.1), nn.Linear(32, 32)), (X,)),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), (torch.tensor([[1, 2]]),)),
    "attention": (lambda: nn.MultiheadAttention(32, 2, batch_first=True), (X, X, X, PADDING)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), (X, None, PADDING)),
    "encoder": (encoder, (X, None, PADDING)),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(32, 2, 64, norm_first=True), (X, X)),
    "transformer": (lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True), (X, X)),
    "annotated norm": (lambda: handwritten.AnnotatedNorm(32), (X,)),
    "norm of torch's function": (lambda: sdpa_models.GptNorm(32, True), (X,)),
    "feed-forward": (lambda: reference.FeedForward(32, 64, 0.1), (X,)),
    "dropout inside": (lambda: sdpa_models.GptFeedForward(32, 0.1, True), (X,)),
    "attention by torch's function": (lambda: scripted_models.Typed(None), (X,)),
    "an optional tensor": (lambda: scripted_models.Typed(torch.randn(32)), (X,)),
    "a held function": (scripted_models.Holds, (X,)),
    "refused": (lambda: sdpa_models.Gpt(), (torch.randint(0, 40, (2, 6)),)),
    "refused by an annotation": (lambda: reference.MultiHeadAttention(2, 32, 0.1), (X, X, X)),
}  # fmt: skip


FUNCTIONAL = "norm of torch's function", "attention by torch's function", "an optional tensor", "a held function"
"""Models without a module that is swapped unless ``functional=True``."""


@pytest.fixture(autouse=True)
def swapped_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers are swapped on some processors only."""
    monkeypatch.setattr("transformer_fast.accelerate.engine.is_faster", lambda weight: True)


def kinds(model: nn.Module) -> list[type]:
    return [type(m) for m in model.modules()]


def scripted(model: nn.Module) -> Any:
    """Scripted model, or the class of the error."""
    try:
        return torch.jit.script(model)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("arguments", [{}, {"packed": True}, {"fused_loss": True}, {"functional": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_scripts_as_the_plain_model(name: str, arguments: dict[str, bool]) -> None:
    make, inputs = MODELS[name]
    plain = make()
    fast = copy.deepcopy(plain)
    assert tfast.accelerate(fast, **arguments).swapped or name in FUNCTIONAL
    before = kinds(fast)
    theirs, ours = scripted(plain), scripted(fast)
    assert kinds(fast) == before, "scripting changed the model"
    assert isinstance(theirs, type) == name.startswith("refused")
    if name.startswith("refused"):
        assert ours is theirs
        return
    for mode in (False, True):
        results = []
        for model in (theirs.train(mode), ours.train(mode)):
            torch.manual_seed(3)
            results.append(model(*inputs))
        assert isinstance(results[0], tuple) or torch.equal(*results)
        assert not isinstance(results[0], tuple) or all(map(torch.equal, *results))
    assert "transformer_fast::" not in str(ours.inlined_graph)


def test_every_made_class_is_scripted_as_the_class_before() -> None:
    """The classes of modules that are swapped at run time have the annotations of the class before."""
    model = nn.ModuleList([handwritten.AnnotatedNorm(32), scripted_models.Typed(None)])
    tfast.accelerate(model, functional=True)
    assert isinstance(model[0], Formed) and isinstance(model[1], FunctionalCalls)
    assert "form" not in model[0].__annotations__
    assert list(model[1].__annotations__) == ["size", "shift"]


def test_signatures_stay() -> None:
    """The norms keep their own arguments, and the others those of torch."""
    model = nn.Sequential(nn.LayerNorm(4), nn.MultiheadAttention(4, 2), handwritten.AnnotatedNorm(4))
    tfast.accelerate(model)
    assert list(inspect.signature(model[0].forward).parameters) == ["input", "residual", "dropout_p"]
    expected = list(inspect.signature(nn.MultiheadAttention(4, 2).forward).parameters)
    assert list(inspect.signature(model[1].forward).parameters) == expected
    assert list(inspect.signature(model[2].forward).parameters) == ["x"]
