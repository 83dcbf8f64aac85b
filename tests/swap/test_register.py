"""``tfast.register(kind, fast, check=...)``: the class is tried once, and ``accelerate`` swaps its modules."""

from __future__ import annotations

import abc
import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import registered_texts as texts
import torch
import torch.nn.functional as F
from accelerated import assert_copied_and_undone, copies, pair, state, step
from registered_texts import ATTENTIONS, D, SpeechAttention, split
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.swap.swapped import FAST

X = torch.randn(3, 7, D, generator=torch.Generator().manual_seed(1))
KEEP = (torch.arange(7) < torch.tensor([7, 4, 2])[:, None])[:, None]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert not FAST, FAST.clear()


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


@pytest.mark.parametrize("kind", ATTENTIONS, ids=lambda kind: kind.__name__)
def test_modules_of_a_registered_class_are_swapped(kind: type[nn.Module]) -> None:
    fast, inputs = ATTENTIONS[kind]
    with tfast.register(kind, fast, check=(kind(0.1), inputs)):
        plain, model, report = pair(nn.ModuleDict({"one": kind(0.0), "two": kind(0.0)}))
    rows = [(row.path, row.was, row.now) for row in report.swapped if row.path in ("one", "two")]
    assert rows == [(name, kind.__name__, f"{fast.__name__} (registered)") for name in ("one", "two")]
    assert [(row.path, row.now) for row in report.attention] == [("one", "registered"), ("two", "registered")]
    args, kwargs = arguments(inputs(3, 5))
    for training in (False, True):
        results = [model.train(training)["one"](*args, **kwargs) for model in (model, plain)]
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert isinstance(model["one"], kind) and model["one"].forward.__func__ is not kind.forward
    assert_copied_and_undone(model.eval(), report, state(plain), lambda m: m["two"](*args, **kwargs))


def speech(**options: Any) -> Any:
    return tfast.register(
        SpeechAttention, texts.FastSpeechAttention, check=(SpeechAttention(), (X, X, X, KEEP)), **options
    )


def test_gradients() -> None:
    with speech():
        plain, model, _ = pair(SpeechAttention(0.0))
    inputs = X, X, X, KEEP
    for module in (model, *copies(model)):
        torch.testing.assert_close(step(module, *inputs), step(plain, *inputs), atol=1e-5, rtol=1e-4)
        assert module.attn is None, "the text's own code ran"


def test_a_pickle_is_read_where_nothing_is_registered(tmp_path: Path) -> None:
    model = SpeechAttention(0.0).eval()
    with speech():
        tfast.accelerate(model)
    (tmp_path / "model").write_bytes(pickle.dumps((model, X, KEEP, model(X, X, X, KEEP))))
    code = (
        "import pickle, sys, torch; sys.path.insert(0, 'tests/support');"
        f"m, x, keep, out = pickle.load(open({str(tmp_path / 'model')!r}, 'rb'));"
        "assert torch.allclose(m(x, x, x, keep), out) and m.attn is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_exactly_the_class_as_long_as_it_is_registered() -> None:
    class Derived(SpeechAttention):
        pass

    handle = speech()
    report = tfast.accelerate(nn.ModuleList([Derived(), SpeechAttention()]))
    assert [row.path for row in report.attention if row.now == "registered"] == ["1"]
    second = speech()
    handle.remove()  # registered again since
    assert FAST
    second.remove()
    assert not FAST
    assert "registered" not in str(tfast.accelerate(SpeechAttention()))
    report.undo()


def test_calls_that_the_fast_class_does_not_take_run_the_own_code() -> None:
    kind = texts.TranslationAttention
    fast, inputs = ATTENTIONS[kind]
    with tfast.register(kind, fast, check=(kind(0.0), inputs)):
        plain, model, _ = pair(kind(0.0))
    k, v, q, mask = inputs(2, 5)
    mask[..., 0] = True
    torch.testing.assert_close(model(k, v, q, mask, return_weights=True), plain(k, v, q, mask, return_weights=True))
    one = lambda m: torch.func.vmap(lambda t: m(t[None], t[None], t[None])[0])(X)  # noqa: E731
    torch.testing.assert_close(one(model), one(plain))
    held = model.forward
    model.__class__ = kind
    torch.testing.assert_close(held(k, v, q, mask), plain(k, v, q, mask))


def test_a_fast_class_of_this_package() -> None:
    kind = reference.MultiHeadAttention
    with tfast.register(kind, tfast.layers.MultiHeadAttention, check=(kind(2, D), (X, X, X, KEEP))):
        model = kind(2, D).eval()
        expected = model(X, X, X, KEEP)
        report = tfast.accelerate(model)
    torch.testing.assert_close(model(X, X, X, KEEP), expected)
    assert report.swapped[0].now == "MultiHeadAttention (registered)"


def test_a_compiled_module_has_no_graph_break() -> None:
    model = SpeechAttention(0.0).eval()
    expected = model(X, X, X, KEEP)
    with speech():
        tfast.accelerate(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, X, X, mask=KEEP), expected)


def test_a_norm_is_no_attention() -> None:
    class Mine(nn.LayerNorm):
        pass

    with tfast.register(Mine, tfast.layers.LayerNorm, check=(Mine(D), X)):
        report = tfast.accelerate(nn.Sequential(Mine(D)))
    assert [row.now for row in report.swapped] == ["LayerNorm (registered)"] and not report.attention


class Attention(nn.Module):
    """Attention with rules that a fast class below does not have."""

    rates = {"out": 0.25}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.drop = nn.Linear(D, 3 * D), nn.Dropout(0.1)
        self.extra = nn.Parameter(torch.zeros(D))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(~mask[:, None, None], -1e9)

    def end(self, out: Tensor, mask: Tensor) -> Any:
        return out

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        weights = self.drop(self.masked(self.scores(q, k), mask).softmax(-1))
        return self.end((weights @ v).transpose(1, 2).flatten(2), mask)


class Fast(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        p = self.drop.p if self.training else 0.0
        return tfast.attention(q, k, v, mask[:, None, None], dropout_p=p).transpose(1, 2).flatten(2)


def sees_the_first(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[:, 0] = True
    return Attention.masked(self, scores, mask)


def window(self: Any, scores: Tensor, mask: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return Attention.masked(self, scores, mask).masked_fill((place[:, None] - place).abs() > 200, -1e9)


DRAWS = "draws random numbers that are no dropout"
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "another scale": (
        {"scores": lambda self, q, k: q @ k.mT * (q.shape[-1] + 1e-3) ** -0.5},
        r"the largest error is \S+, of values up to \S+, in the gradient of .* \(in training",
    ),
    "sees the first key": ({"masked": sees_the_first}, r"argument 1\[(..., )?0\] = False"),
    "rows without keys are zero": (
        {"end": lambda self, out, mask: out * mask.any(1)[:, None, None]}, r"argument 1\[(..., )?0\] = False",
    ),
    "a window of 200": ({"masked": window}, "batch 2, length 300"),
    "batch == length": (
        {"end": lambda self, out, mask: out.transpose(0, 1) if out.shape[0] == out.shape[1] else out},
        "batch 5, length 5",
    ),
    "one dropout more": (
        {"end": lambda self, out, mask: self.drop(out)}, "with dropout 0.5 their results have variances",
    ),
    "dropout of an attribute": (
        {"end": lambda self, out, mask: F.dropout(out, self.p, self.training), "p": 0.1}, "training with p = 1",
    ),
    "a branch that is zero at first": (
        {"end": lambda self, out, mask: out * (1 + self.extra * out.mean(1, keepdim=True))},
        "the gradient of extra|other values of equal parameters",
    ),
    "in training": ({"end": lambda self, out, mask: out * 1.01 if self.training else out}, "in training"),
    "detached": ({"end": lambda self, out, mask: out.detach() * 0.5 + out * 0.5}, "the gradient of"),
    "noise": ({"end": lambda self, out, mask: out + torch.randn_like(out) if self.training else out}, DRAWS),
    "dropout of a class attribute": (
        {"end": lambda self, out, mask: F.dropout(out, self.rates["out"], self.training)},
        f"{DRAWS} of a module or attribute, with bernoulli_",
    ),
    "returns a pair": (
        {"end": lambda self, out, mask: (out, None)},
        "the kind of the result is tensor, and tuple of 2 values in the plain module",
    ),
}  # fmt: skip
"""Methods of the class, or attributes of the module, and what is said of the difference."""


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, D), torch.arange(length).expand(batch, -1) < max(1, length - 1)


def test_the_base_of_the_differences_has_none() -> None:
    tfast.register(Attention, Fast, check=(Attention(), inputs)).remove()


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_found_and_its_place_said(name: str) -> None:
    own, said = DIFFERENCES[name]
    kind = type("Own", (Attention,), {key: value for key, value in own.items() if callable(value)})
    module = kind()
    module.__dict__.update({key: value for key, value in own.items() if not callable(value)})
    with pytest.raises(ValueError, match=said) as raised:
        tfast.register(kind, Fast, check=(module, inputs))
    assert str(raised.value).startswith("register: ") and "Own" in str(raised.value)


class Missing(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.heads


class OtherNames(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> Any:
        return x


class Abstract(nn.Module, abc.ABC):
    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


GOOD = Attention(), inputs(2, 5)
NAMED = dict(zip(("x", "mask"), inputs(2, 5)))
CLASSES = Attention, Fast
MISTAKES: dict[str, tuple[type[Exception], str, Any, Any]] = {
    "no class": (TypeError, "must be derived from nn.Module, got 3", (3, Fast), GOOD),
    "no module": (TypeError, "must be derived from nn.Module", (dict, Fast), GOOD),
    "a module": (TypeError, "is a module of class Attention; give the class itself", (Attention(), Fast), GOOD),
    "abstract": (TypeError, "Abstract is abstract", (Abstract, Fast), GOOD),
    "no forward": (TypeError, "Module is abstract", (nn.Module, Fast), GOOD),
    "known": (TypeError, "accelerate knows LayerNorm already", (nn.LayerNorm, Fast), (nn.LayerNorm(D), X)),
    "a fast module": (TypeError, "the fast class is a module", (Attention, Fast()), GOOD),
    "no fast class": (TypeError, "give the class that computes what Attention computes", (Attention,), GOOD),
    "another module": (TypeError, "a module of class Fast, expected Attention", CLASSES, (Fast(), X)),
    "no pair": (TypeError, "must be .module, inputs. or a list of such pairs, got Tensor", CLASSES, X),
    "no inputs": (TypeError, "got NoneType", CLASSES, (Attention(), None)),
    "a failing function": (
        ValueError, r"inputs\(2, 1\) failed: ZeroDivisionError", CLASSES, (Attention(), lambda batch, length: 1 / 0),
    ),
    "wrong inputs": (
        ValueError, "Attention fails on the given inputs: TypeError.*missing", CLASSES, (Attention(), X),
    ),
    "a missing attribute": (
        ValueError, "Missing fails where Attention runs: AttributeError.*heads", (Attention, Missing), GOOD,
    ),
    "other names": (
        ValueError, "OtherNames.forward has no argument mask", (Attention, OtherNames), (Attention(), NAMED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    error, text, classes, check = MISTAKES[name]
    with pytest.raises(error, match=text):
        tfast.register(*classes, check=check)


def test_the_module_of_the_check_and_its_surroundings_stay_as_they_are() -> None:
    module = Attention()
    module.register_forward_hook(lambda *args: pytest.fail("a hook ran"))
    state, before = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    with torch.inference_mode(), torch.autocast("cpu"), tfast.register(Attention, Fast, check=(module, GOOD[1])):
        assert type(module) is Attention and module.training and module.drop.p == 0.1
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in module.parameters())
