"""``accelerate(model, packed=True)`` on layers of any class: the trial tells what their mask means, and their code runs
on tokens; equal at every token. What the trial or a call cannot prove keeps the padding, and the report says why."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from test_packed_stacks import hold, lengths, outcome
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.packed import any_layer
from transformer_fast.layers.padded_calls import NO_SOURCE
from transformer_fast.reference import layers as reference

D, HEADS, LENGTH = 16, 2, 9
TOKENS = torch.tensor([9, 2, 6, 4])
KEEP = lengths(TOKENS, LENGTH)
GAPS = KEEP.clone()
GAPS[2, 3] = False


class Base(nn.Module):
    """Layer after Xiong et al. (2020): norm, attention, norm, feed-forward network, with residual additions."""

    length_first = False

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm_of_ff = nn.LayerNorm(D), nn.LayerNorm(D)
        self.widen, self.narrow = nn.Linear(D, 24), nn.Linear(24, D)
        self.drop = nn.Dropout(dropout)
        self.add_attention(dropout)

    def add_attention(self, dropout: float) -> None:
        self.attention = nn.MultiheadAttention(D, HEADS, dropout, batch_first=not self.length_first)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=mask)[0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = x + self.drop(self.heads(self.norm(x), mask))
        return x + self.narrow(F.gelu(self.widen(self.norm_of_ff(x))))


class LengthFirst(Base):
    length_first = True


class Classic(Base):
    """Layer around the classic text's attention, which passes its mask on."""

    def add_attention(self, dropout: float) -> None:
        self.attention = reference.MultiHeadAttention(HEADS, D, dropout)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x, mask), mask


class Annotated(Base):
    """Layer around the attention of The Annotated Transformer, which stores its weights."""

    def add_attention(self, dropout: float) -> None:
        self.attention = hw.AnnotatedAttention(HEADS, D, dropout)

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x, mask)


class Stack(nn.Module):
    """A list of layers in a loop."""

    def __init__(self, make: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor | None, **others: Any) -> Tensor:
        turned = (lambda t: t.transpose(0, 1)) if getattr(self.layers[0], "length_first", False) else (lambda t: t)
        x = turned(x)
        for layer in self.layers:
            result = layer(x, mask, **others)
            x = result[0] if isinstance(result, tuple) else result
        return turned(x)


X = torch.randn(4, LENGTH, D, generator=torch.Generator().manual_seed(0))
LAYERS: dict[str, tuple[type[Base], Callable[[Tensor], Tensor]]] = {
    "nn.MultiheadAttention, blocked": (Base, lambda keep: ~keep),
    "length first": (LengthFirst, lambda keep: ~keep),
    "classic heads, a row per batch": (Classic, lambda keep: keep[:, None]),
    "annotated heads, weights stored": (Annotated, lambda keep: keep[:, None]),
    "classic heads, int": (Classic, lambda keep: keep[:, None].int()),
    "classic heads, a row per query": (Classic, lambda keep: keep[:, None].expand(-1, LENGTH, -1)),
}


def call_with(mask: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(X.to(next(model.parameters()).dtype), mask)


@pytest.mark.parametrize("keep", [KEEP, GAPS], ids=["right", "gaps"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_any_class_equal_the_padded_ones_at_tokens(name: str, keep: Tensor) -> None:
    kind, as_mask = LAYERS[name]
    model = Stack(kind)
    hold(model, call_with(as_mask(keep)), keep)
    report = tfast.accelerate(model, packed=True)
    with torch.no_grad():
        assert not model(X, as_mask(keep))[~keep].any(), "the padding was computed"
    assert [(row.was, row.now) for row in report.rows if row.path == "layers"] == [
        (f"3 {kind.__name__}", "without padding")
    ]


def test_layers_of_torch_in_a_loop_of_the_author() -> None:
    class Loop(Stack):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=mask)
            return x

    hold(Loop(lambda: nn.TransformerEncoderLayer(D, HEADS, 24, 0.0, batch_first=True)), call_with(~KEEP), KEEP)


def test_a_packing_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made, packing_of = [], any_layer.packing_of
    model = Stack(Base)
    tfast.accelerate(model, packed=True)
    monkeypatch.setattr(any_layer, "packing_of", lambda *args: made.append(1) or packing_of(*args))
    mask = ~KEEP
    model(X, mask)
    assert len(made) == 1
    mask.numpy()[3, 5] = False  # a write that torch does not count
    keep = ~mask
    plain = Stack(Base)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(X, mask)[keep], plain(X, mask)[keep])
    assert len(made) == 2


def test_dropout_is_drawn_for_tokens_and_repeats_with_its_seed() -> None:
    for kind, as_mask in (LAYERS[name] for name in list(LAYERS)[:3]):
        model = Stack(lambda kind=kind: kind(0.5))
        report = tfast.accelerate(model, packed=True)
        assert [row.now for row in report.rows if row.path == "layers"] == ["without padding"]
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(outcome(model, call_with(as_mask(KEEP)), KEEP))
        assert all(map(torch.equal, found[0], found[1])) and not torch.equal(found[0][0], found[2][0])


class ReadsWeights(Base):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        out, weights = self.attention(x, x, x, key_padding_mask=mask)
        return out * weights.amax(-1, keepdim=True)


class KeepsWeights(Base):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        out, self.last = self.attention(x, x, x, key_padding_mask=mask)
        return out


class ReturnsWeights(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.attention(x, x, x, key_padding_mask=mask)


class ZeroConvolution(Base):
    """Layer with a branch that mixes positions, and whose last weights are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        nn.init.zeros_(self.conv.weight), nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.heads(self.norm(x), mask)
        mixed = x if mask is None else x.masked_fill(mask[..., None], 0.0)
        return x + self.conv(mixed.transpose(1, 2)).transpose(1, 2)


class ZeroBias(Base):
    """Layer with a learned bias by position, which is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        bias = self.bias[: x.shape[1], : x.shape[1]]
        hidden = None if mask is None else torch.zeros(mask.shape).masked_fill(mask, -1e9)
        return self.attention(x, x, x, key_padding_mask=hidden, attn_mask=bias)[0]


class Batch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D)


class NoMask(Base):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(x, positions)


OBSTACLES = {
    ReadsWeights: "attention weights",
    KeepsWeights: "keeps tensors of a call",
    ReturnsWeights: "attention weights",
    ZeroConvolution: "depends on other tokens|hides padding alone",
    ZeroBias: "not padding alone|fails on tokens",
    Batch: "reads several positions in training",
    NoMask: "no argument that is known as a mask",
}


@pytest.mark.parametrize("kind", OBSTACLES, ids=lambda kind: kind.__name__)
def test_what_the_trial_cannot_prove_keeps_its_padding(kind: type[Base]) -> None:
    model = Stack(kind)
    plain = copy.deepcopy(model).eval()
    mask = ~KEEP
    report = tfast.accelerate(model.eval(), packed=True)
    (note,) = report.notes
    assert f"padding stays in layers (3 {kind.__name__}): " in note and re.search(OBSTACLES[kind], note), note
    torch.testing.assert_close(model(X, mask), plain(X, mask))


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Any]:
    """Return a plain model, the same without padding, and its report."""
    plain = Stack(Base)
    model = copy.deepcopy(plain)
    return plain, model, tfast.accelerate(model, packed=True)


def test_a_call_that_the_trial_has_not_seen_keeps_its_padding(pair: Any) -> None:
    plain, model, report = pair
    pad = ~KEEP
    scores = torch.zeros(KEEP.shape).masked_fill(pad, float("-inf"))
    scores[0, 0] = 0.5
    empty = pad.clone()
    empty[1] = True
    for mask, reason in ((scores, "holds scores"), (empty, NO_SOURCE)):
        keep = mask == 0
        torch.testing.assert_close(model(X, mask)[keep], plain(X, mask)[keep])
        assert any(reason in found for found in report.padded_calls.reasons), report.padded_calls.reasons
    found = []
    model.layers[1].norm.register_forward_hook(lambda module, args, out: found.append(out.shape))
    torch.testing.assert_close(model(X, pad)[KEEP], plain(X, pad)[KEEP])
    assert found == [X.shape] and any("has a hook" in reason for reason in report.padded_calls.reasons)


def test_a_part_that_is_replaced_later_keeps_the_padding(pair: Any) -> None:
    plain, model, report = pair

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.mean(1, keepdim=True)

    for each in (plain, model):
        each.layers[0].norm_of_ff = Mean()
    torch.testing.assert_close(model(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])
    assert "a module inside a Base was replaced since accelerate" in report.padded_calls.reasons


def test_the_authors_errors_stay_theirs() -> None:
    class Picky(Base):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
            if x.isnan().any():
                raise ValueError("a NaN among the inputs")
            return super().forward(x, mask)

    model = Stack(Picky)
    report = tfast.accelerate(model, packed=True)
    with pytest.raises(ValueError, match="a NaN among the inputs"):
        model(X.masked_fill(KEEP[..., None], float("nan")), ~KEEP)
    assert not model(X, ~KEEP)[~KEEP].any() and len(report.padded_calls.reasons) == 1


def test_copies_pickles_and_undo(pair: Any) -> None:
    plain, model, report = pair
    expected = model(X, ~KEEP)
    assert not expected[~KEEP].any()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X, ~KEEP), expected)
    assert tfast.accelerate(model, packed=True).rows
    assert torch.equal(model(X, ~KEEP), expected)
    report.undo()
    assert torch.equal(model(X, ~KEEP), plain(X, ~KEEP))
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [m.__dict__.keys() for m in model.modules()] == [m.__dict__.keys() for m in plain.modules()]


def test_a_compiled_model_runs_with_its_padding(pair: Any) -> None:
    plain, model, _ = pair
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, ~KEEP)[KEEP], plain(X, ~KEEP)[KEEP])


@pytest.mark.parametrize("name", list(LAYERS)[:3])
def test_bfloat16(name: str) -> None:
    kind, as_mask = LAYERS[name]
    hold(Stack(kind).bfloat16(), call_with(as_mask(KEEP)), KEEP)
