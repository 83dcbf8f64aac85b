"""Layers that read more than their tokens: the check of ``register`` refuses them, and says what it found."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    """Layer with a rule at its end."""

    def end(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.end(super().forward(x, mask))


def own(
    end: Callable[[Any, Tensor], Any] = Ends.end, base: type[Layer] = Ends, parts: Any = None, **methods: Any
) -> type[nn.Module]:
    """Class of a layer with an end, parts and methods of its own."""

    def init(self: Any) -> None:
        base.__init__(self)
        for name, make in (parts or {}).items():
            setattr(self, name, make())

    return type("Own", (base,), {"__init__": init, "end": end, **methods})


def checkpointed(reentrant: bool) -> type[nn.Module]:
    def forward(self: nn.Module, x: Tensor, mask: Tensor | None = None) -> Any:
        return checkpoint(functools.partial(Layer.forward, self), x, mask, use_reentrant=reentrant)

    return own(base=Layer, forward=forward)


def running_mean(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.seen.lerp_(x.detach().mean((0, 1)), 0.1)
    return x


def keeps_states(self: Any, x: Tensor) -> Tensor:
    self.last = x
    return x


def keeps_weights(self: Any, x: Tensor, mask: Any) -> Tensor:
    out, self.last = self.attention(x, x, x, key_padding_mask=mask)
    return out


def reads_weights(self: Any, x: Tensor, mask: Any) -> Tensor:
    out, weights = self.attention(x, x, x, key_padding_mask=mask)
    return out * weights.amax(-1, keepdim=True)


def zero_convolution() -> nn.Module:
    """Convolution whose weights are zero at first."""
    conv = nn.Conv1d(D, D, 3, padding=1)
    nn.init.zeros_(conv.weight), nn.init.zeros_(conv.bias)
    return conv


def with_a_bias(bias_of: Callable[[Tensor, Tensor], Tensor]) -> type[nn.Module]:
    """Layer with a learned bias, which is zero at first: a function of the bias and the inputs is added to the
    scores."""

    def heads(self: Any, x: Tensor, mask: Any) -> Tensor:
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        added = bias_of(self.bias, x)
        if mask is not None:
            added = added + torch.zeros(mask.shape).to(added).masked_fill(mask, -1e9)[:, None, None]
        return self.attention(F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2).flatten(2))

    return own(base=SdpaLayer, parts={"bias": lambda: nn.Parameter(torch.zeros(1000, 1000))}, heads=heads)


def causal(self: Any, x: Tensor, mask: Any) -> Tensor:
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return self.attention(x, x, x, key_padding_mask=mask, attn_mask=ahead)[0]


def by_hand(self: Any, x: Tensor, mask: Any) -> Tensor:
    """Attention that no kernel computes."""
    return (x @ x.mT).masked_fill(mask[:, None], -1e9).softmax(-1) @ x


def half_by_hand(self: Any, x: Tensor, mask: Any) -> Tensor:
    """Two attentions, of which one runs on no kernel."""
    return by_hand(self, x, mask) + Layer.heads(self, x, mask)


DRAWS = "draws random numbers that are no dropout"
REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "reentrant": (checkpointed(True), "it checkpoints a part of itself"),
    "not reentrant": (checkpointed(False), r"its code fails on tokens \(RuntimeError\)"),
    "mixes": (own(lambda self, x: mixed(x)), "the largest error"),
    "mixes in training": (own(lambda self, x: mixed(x) if self.training else x), "in training without dropout"),
    "batch norm": (
        own(lambda self, x: self.norm_of_batch(x.mT).mT, parts={"norm_of_batch": lambda: nn.BatchNorm1d(D)}),
        "a BatchNorm1d inside Own reads several positions in training",
    ),
    "functional batch norm": (
        own(lambda self, x: F.batch_norm(
            x.mT, torch.zeros(D).to(x), torch.ones(D).to(x), training=self.training).mT),
        "in training",
    ),
    "instance norm": (
        own(lambda self, x: self.norm_of_row(x.mT).mT, parts={"norm_of_row": lambda: nn.InstanceNorm1d(D)}),
        "the largest error",
    ),
    "running mean": (
        own(running_mean, parts={"seen": lambda: nn.Buffer(torch.zeros(D))}), "or keeps something of a call",
    ),
    "a sentence is left out": (
        own(lambda self, x: x * (torch.rand(x.shape[0], 1, 1) > 0.5) if self.training else x), DRAWS,
    ),
    "dropout of features": (own(lambda self, x: F.dropout1d(x.mT, 0.5, self.training).mT), DRAWS),
    "dropout of features, live": (
        own(lambda self, x: F.dropout1d(x.mT, self.p, self.training).mT, parts={"p": lambda: 0.5}),
        "drops whole features",
    ),
    "a rule for long inputs": (
        own(
            lambda self, x: x + self.conv(F.pad(x.mT, (64, 0))).mT,
            parts={"conv": lambda: nn.Conv1d(D, D, 2, dilation=64)},
        ),
        "batch 2, length (97|300)",
    ),
    "a large batch": (own(lambda self, x: 2 * x if x.shape[0] >= 5 else x), "batch 5, length 5"),
    "batch == length": (
        own(lambda self, x: x.transpose(0, 1) if x.shape[0] == x.shape[1] else x), "batch 5, length 5",
    ),
    "returns more": (own(lambda self, x: (x, (x, x))), "it returns more than hidden states"),
    "returns a dict": (own(lambda self, x: {"states": x}), "it returns dict, expected hidden states"),
    "keeps states": (own(keeps_states), "it keeps tensors of a call in last"),
    "keeps weights": (own(base=Layer, heads=keeps_weights), "its code reads attention weights"),
    "reads weights": (own(base=Layer, heads=reads_weights), "its code reads attention weights"),
    "a gate in a buffer": (
        own(lambda self, x: x + self.gate * mixed(x), parts={"gate": lambda: nn.Buffer(torch.zeros(()))}),
        "with other values of equal parameters",
    ),
    "a branch that is zero at first": (
        own(lambda self, x: x + self.conv(x.mT).mT, parts={"conv": zero_convolution}), "the largest error",
    ),
    "a bias by position": (
        with_a_bias(lambda bias, x: bias[: x.shape[1], : x.shape[1]]), "has a mask that is not padding alone",
    ),
    "a bias by key": (
        with_a_bias(lambda bias, x: bias[0, : x.shape[1]].expand(len(x), 1, 1, -1)), "in the gradient of bias",
    ),
    "causal": (own(base=Layer, heads=causal), "has a mask that is not padding alone"),
    "ignores its mask": (
        own(base=Layer, heads=lambda self, x, mask: self.attention(x, x, x)[0]), "the largest error",
    ),
    "by hand": (
        own(base=Layer, heads=by_hand),
        "0 attentions inside it run on the kernels; register the class of its attention first",
    ),
    "half by hand": (own(base=Layer, heads=half_by_hand), "the largest error"),
    "positions": (own(lambda self, x: x + torch.arange(x.shape[1]).to(x)[:, None]), "the largest error"),
}  # fmt: skip
"""Class of the layer, and the reason why it is refused."""


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, D), torch.arange(length).expand(batch, -1) >= length - 1


def register(kind: type[nn.Module], check: Any = None, **options: Any) -> Any:
    """Register a layer whose mask is True at padding."""
    options = {"mask": "mask", "mask_means": "blocked", "tokens": True, **options}
    return tfast.register(kind, check=(kind(), inputs) if check is None else check, **options)


def test_the_base_of_the_layers_is_taken() -> None:
    register(Ends).remove()


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_read_more_than_their_tokens(name: str) -> None:
    kind, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as raised:
        register(kind)
    assert str(raised.value).startswith("register: ") and kind not in TOKENS


PAIR = torch.randn(3, 5, D), torch.arange(5).expand(3, -1) >= 4
STATES, BLOCKED = PAIR
MISTAKES: dict[str, tuple[type[Exception], str, type[nn.Module], Any, dict[str, Any]]] = {
    "the other meaning": (ValueError, "or mask does not mean 'keep'", Layer, inputs, {"mask_means": "keep"}),
    "the other layout": (ValueError, "does not compute each token alone", Layer, inputs, {"batch_first": False}),
    "the other layout, B == L": (
        ValueError, "does not compute each token alone", Layer, lambda b, n: inputs(n, n), {"batch_first": False},
    ),
    "no meaning": (
        TypeError, 'what mask means: "keep", "blocked" or "added", got None', Layer, inputs, {"mask_means": None},
    ),
    "an unknown meaning": (TypeError, "got 'hidden'", Layer, inputs, {"mask_means": "hidden"}),
    "no such argument": (
        TypeError, "has no argument 'keep' after its hidden states; it has mask", Layer, inputs, {"mask": "keep"},
    ),
    "hidden states as mask": (TypeError, "has no argument 'x' after its hidden states", Layer, inputs, {"mask": "x"}),
    "tokens not said": (TypeError, "the name of its mask and tokens=True", Layer, inputs, {"tokens": False}),
    "no mask given": (ValueError, "a tensor mask", Layer, (STATES,), {}),
    "two dimensions": (ValueError, r"must have x \(B, L, d\)", Layer, (STATES[0], BLOCKED[0]), {}),
    "a mask of other sizes": (ValueError, "has not the sizes", SpeechLayer, (STATES, BLOCKED.T), {}),
    "scores": (
        ValueError, "holds scores, not padding alone", Layer, (STATES, torch.rand(3, 5)), {"mask_means": "added"},
    ),
    "a bool that is added": (ValueError, "is bool, and is added to scores", Layer, PAIR, {"mask_means": "added"}),
    "no room for padding": (ValueError, "give at least 2 sequences", Layer, (STATES[:, :1], BLOCKED[:, 4:] < 0), {}),
    "known already": (
        TypeError, "knows TransformerEncoderLayer already", nn.TransformerEncoderLayer, inputs, {"mask": "src_mask"},
    ),
}  # fmt: skip


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
        assert TOKENS[Two].now.reads == {1, 2}
