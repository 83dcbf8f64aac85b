"""Layers that read more than their tokens: the check of ``register`` refuses them, and says what it found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from registered_texts import D, Layer, SdpaLayer, SpeechLayer, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.swap.token_layer import TOKENS


def mixed(x: Tensor) -> Tensor:
    """Read all positions of a row."""
    return x - x.mean(1, keepdim=True)


class Ends(Layer):
    """Layer whose end is changed below."""

    def end(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.end(super().forward(x, mask))


class Reentrant(Layer):
    reentrant = True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return checkpoint(super().forward, x, mask, use_reentrant=self.reentrant)


class NotReentrant(Reentrant):
    reentrant = False


class Mixes(Ends):
    def end(self, x: Tensor) -> Tensor:
        return mixed(x)


class MixesInTraining(Ends):
    def end(self, x: Tensor) -> Tensor:
        return mixed(x) if self.training else x


class BatchNorm(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(D)

    def end(self, x: Tensor) -> Tensor:
        return self.batch_norm(x.mT).mT


class FunctionalBatchNorm(Ends):
    def end(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.mT, torch.zeros(D).to(x), torch.ones(D).to(x), training=self.training).mT


class InstanceNorm(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.instance_norm = nn.InstanceNorm1d(D)

    def end(self, x: Tensor) -> Tensor:
        return self.instance_norm(x.mT).mT


class RunningMean(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(D))

    def end(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


class DropPath(Ends):
    """Stochastic depth: a sentence is left out."""

    def end(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) > 0.5) if self.training else x


class FeatureDropout(Ends):
    p = 0.5

    def end(self, x: Tensor) -> Tensor:
        return F.dropout1d(x.mT, self.p, self.training).mT


class LiveFeatureDropout(FeatureDropout):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5


class Dilated(Ends):
    """A rule that acts on long inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 2, dilation=64)

    def end(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.mT, (64, 0))).mT


class LargeBatch(Ends):
    def end(self, x: Tensor) -> Tensor:
        return 2 * x if x.shape[0] >= 5 else x


class Square(Ends):
    """A rule for a batch size that equals the length."""

    def end(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if x.shape[0] == x.shape[1] else x


class ReturnsMore(Ends):
    def end(self, x: Tensor) -> Any:
        return x, (x, x)


class ReturnsDict(Ends):
    def end(self, x: Tensor) -> Any:
        return {"states": x}


class KeepsStates(Ends):
    def end(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class KeepsWeights(Layer):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        out, self.last = self.attention(x, x, x, key_padding_mask=mask)
        return out


class ReadsWeights(Layer):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        out, weights = self.attention(x, x, x, key_padding_mask=mask)
        return out * weights.amax(-1, keepdim=True)


class GateBuffer(Ends):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def end(self, x: Tensor) -> Tensor:
        return x + self.gate * mixed(x)


class ZeroAdapter(Ends):
    """A branch that reads other positions, and whose last weights are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        nn.init.zeros_(self.conv.weight), nn.init.zeros_(self.conv.bias)

    def end(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT).mT


class ZeroBias(SdpaLayer):
    """A learned bias by position, which is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1000, 1000))

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        added = self.bias[: x.shape[1], : x.shape[1]]
        if mask is not None:
            added = added + torch.zeros(mask.shape).to(added).masked_fill(mask, -1e9)[:, None, None]
        return self.attention(F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2).flatten(2))


class KeyBias(ZeroBias):
    """A learned bias by key."""

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        added = self.bias[0, : x.shape[1]].expand(len(x), 1, 1, -1)
        added = added.masked_fill(mask[:, None, None], -1e9)
        return self.attention(F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2).flatten(2))


class Causal(Layer):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attention(x, x, x, key_padding_mask=mask, attn_mask=ahead)[0]


class IgnoresItsMask(Layer):
    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return self.attention(x, x, x)[0]


class ByHand(Layer):
    """Attention that no kernel computes."""

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        return (x @ x.mT).masked_fill(mask[:, None], -1e9).softmax(-1) @ x


class HalfByHand(Layer):
    """Two attentions, of which one runs on no kernel."""

    def heads(self, x: Tensor, mask: Any) -> Tensor:
        own = (x @ x.mT).masked_fill(mask[:, None], -1e9).softmax(-1) @ x
        return own + self.attention(x, x, x, key_padding_mask=mask)[0]


class Positions(Ends):
    def end(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1]).to(x)[:, None]


REFUSED = {
    Reentrant: "it checkpoints a part of itself",
    NotReentrant: r"its code fails on tokens \(RuntimeError\)",
    Mixes: "the largest error",
    MixesInTraining: "in training without dropout",
    BatchNorm: "a BatchNorm1d inside BatchNorm reads several positions in training",
    FunctionalBatchNorm: "in training",
    InstanceNorm: "the largest error",
    RunningMean: "or keeps something of a call",
    DropPath: "draws random numbers that are no dropout",
    FeatureDropout: "draws random numbers that are no dropout",
    LiveFeatureDropout: "drops whole features",
    Dilated: "batch 2, length (97|300)",
    LargeBatch: "batch 5, length 5",
    Square: "batch 5, length 5",
    ReturnsMore: "it returns more than hidden states",
    ReturnsDict: "it returns dict, expected hidden states",
    KeepsStates: "it keeps tensors of a call in last",
    KeepsWeights: "its code reads attention weights",
    ReadsWeights: "its code reads attention weights",
    GateBuffer: "with other values of equal parameters",
    ZeroAdapter: "the largest error",
    ZeroBias: "has a mask that is not padding alone",
    KeyBias: "in the gradient of bias",
    Causal: "has a mask that is not padding alone",
    IgnoresItsMask: "the largest error",
    ByHand: "0 attentions inside it run on the kernels; register the class of its attention first",
    HalfByHand: "the largest error",
    Positions: "the largest error",
}


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, D), torch.arange(length).expand(batch, -1) >= length - 1


def register(kind: type[nn.Module], check: Any = None, **options: Any) -> Any:
    """Register a layer whose mask is True at padding."""
    options = {"mask": "mask", "mask_means": "blocked", "tokens": True, **options}
    return tfast.register(kind, check=(kind(), inputs) if check is None else check, **options)


def test_the_base_of_the_layers_is_taken() -> None:
    register(Ends).remove()


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_layers_that_read_more_than_their_tokens(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=REFUSED[kind]) as raised:
        register(kind)
    assert str(raised.value).startswith("register: ") and kind not in TOKENS


PAIR = torch.randn(3, 5, D), torch.arange(5).expand(3, -1) >= 4
MISTAKES: dict[str, tuple[type[Exception], str, type[nn.Module], Any, dict[str, Any]]] = {
    "the other meaning": (ValueError, "or mask does not mean 'keep'", Layer, inputs, {"mask_means": "keep"}),
    "the other layout": (ValueError, "does not compute each token alone", Layer, inputs, {"batch_first": False}),
    "the other layout, B == L": (
        ValueError,
        "does not compute each token alone",
        Layer,
        lambda b, n: inputs(n, n),
        {"batch_first": False},
    ),
    "no meaning": (
        TypeError,
        'what mask means: "keep", "blocked" or "added", got None',
        Layer,
        inputs,
        {"mask_means": None},
    ),
    "an unknown meaning": (TypeError, "got 'hidden'", Layer, inputs, {"mask_means": "hidden"}),
    "no such argument": (
        TypeError,
        "has no argument 'keep' after its hidden states; it has mask",
        Layer,
        inputs,
        {"mask": "keep"},
    ),
    "hidden states as mask": (TypeError, "has no argument 'x' after its hidden states", Layer, inputs, {"mask": "x"}),
    "tokens not said": (TypeError, "the name of its mask and tokens=True", Layer, inputs, {"tokens": False}),
    "no mask given": (ValueError, "a tensor mask", Layer, (PAIR[0],), {}),
    "two dimensions": (ValueError, r"must have x \(B, L, d\)", Layer, (PAIR[0][0], PAIR[1][0]), {}),
    "a mask of other sizes": (ValueError, "has not the sizes", SpeechLayer, (PAIR[0], PAIR[1].T), {}),
    "scores": (
        ValueError,
        "holds scores, not padding alone",
        Layer,
        (PAIR[0], torch.rand(3, 5)),
        {"mask_means": "added"},
    ),
    "a bool that is added": (ValueError, "is bool, and is added to scores", Layer, PAIR, {"mask_means": "added"}),
    "no room for padding": (ValueError, "give at least 2 sequences", Layer, (PAIR[0][:, :1], PAIR[1][:, 4:] < 0), {}),
    "known already": (
        TypeError,
        "knows TransformerEncoderLayer already",
        nn.TransformerEncoderLayer,
        inputs,
        {"mask": "src_mask"},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    error, text, kind, given, options = MISTAKES[name]
    module = nn.TransformerEncoderLayer(D, 2) if kind is nn.TransformerEncoderLayer else kind()
    with pytest.raises(error, match=text):
        register(kind, (module, given), **options)
    assert kind not in TOKENS


def test_a_failed_check_leaves_the_registration_before() -> None:
    with register(Ends):
        before = TOKENS[Ends]
        with pytest.raises(ValueError, match="mean 'keep'"):
            register(Ends, mask_means="keep")
        assert TOKENS[Ends] is before
        with pytest.raises(TypeError, match="register both in two calls"):
            tfast.register(Ends, Ends, mask="mask", tokens=True, check=(Ends(), inputs))
    assert Ends not in TOKENS


def test_two_samples() -> None:
    class Two(Layer):
        """Layer with one attention or two."""

        again = False

        def heads(self, x: Tensor, mask: Any) -> Tensor:
            out = super().heads(x, mask)
            return super().heads(out, mask) if self.again else out

    other = Two()
    other.again = True
    with register(Two, [(Two(), PAIR), (other, PAIR)]):
        assert TOKENS[Two].reads == {1, 2}
