"""accelerate where torch's own modes disagree: what torch does, and what an accelerated module does.

The tests hold each statement of the table in docs/models/torch_nn.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import pair
from torch import Tensor, nn
from torch_attention import E, H, L, N, as_float, look_ahead

import transformer_fast as tfast
from transformer_fast.layers.torch_masks import is_look_ahead

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.nn's own, of mismatched mask types and nested tensors

AHEAD = torch.ones(L, L, dtype=torch.bool).triu(1)
OTHER = (AHEAD | torch.ones(L, L, dtype=torch.bool).tril(-2)).index_fill(1, torch.tensor([0]), False)
"""Mask that is not the look-ahead mask, and leaves each query its first key."""

X = torch.randn(N, L, E, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(L) >= torch.tensor([L, 3, 5])[:, None]
Call = Callable[[nn.Module, Tensor | None, bool, Tensor | None], Tensor]


def layer(decoder: bool = False, **options: Any) -> nn.Module:
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    return kind(E, H, 24, 0.0, **{"batch_first": True, **options})


def attention_call(batch_first: bool, need_weights: bool) -> Call:
    x = X if batch_first else X.transpose(0, 1)

    def call(m: nn.Module, mask: Tensor | None, causal: bool, padding: Tensor | None) -> Tensor:
        options = {"key_padding_mask": padding, "need_weights": need_weights}
        return m(x, x, x, attn_mask=mask, is_causal=causal, **options)[0].transpose(0, 0 if batch_first else 1)

    return call


def turned_encoder_call(m: nn.Module, mask: Tensor | None, causal: bool, padding: Tensor | None) -> Tensor:
    return m(X.transpose(0, 1), mask, is_causal=causal, src_key_padding_mask=padding).transpose(0, 1)


def encoder_call(m: nn.Module, mask: Tensor | None, causal: bool, padding: Tensor | None) -> Tensor:
    return m(X, mask, is_causal=causal, src_key_padding_mask=padding)


def decoder_call(m: nn.Module, mask: Tensor | None, causal: bool, padding: Tensor | None) -> Tensor:
    return m(X, X, mask, tgt_is_causal=causal, tgt_key_padding_mask=padding)


MODULES: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "attention": (lambda: nn.MultiheadAttention(E, H, batch_first=True), attention_call(True, False)),
    "attention, weights": (lambda: nn.MultiheadAttention(E, H, batch_first=True), attention_call(True, True)),
    "attention, length first": (lambda: nn.MultiheadAttention(E, H), attention_call(False, False)),
    "encoder layer": (layer, encoder_call),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), encoder_call),
    "encoder, length first": (
        lambda: nn.TransformerEncoder(layer(batch_first=False), 2),
        turned_encoder_call,
    ),
    "decoder layer": (lambda: layer(True), decoder_call),
    "decoder": (lambda: nn.TransformerDecoder(layer(True), 2), decoder_call),
}
STACKS = nn.TransformerEncoder | nn.TransformerDecoder
MODES = {"training": (True, True), "evaluation": (False, True), "evaluation without gradients": (False, False)}
"""Training, and gradients, by name."""


def results(name: str, mode: str, *calls: tuple[Any, ...], packed: bool = False) -> list[list[Tensor | Exception]]:
    """Return the results of torch's module and of its accelerated copy, an exception for a call that raises."""
    make, call = MODULES[name]
    torch.manual_seed(0)
    plain, training, gradients = make(), *MODES[mode]
    fast = copy.deepcopy(plain)
    assert tfast.accelerate(fast, packed=packed).swapped
    found: list[list[Tensor | Exception]] = []
    for m in (plain.train(training), fast.train(training)):
        found.append([])
        for given in calls:
            with torch.set_grad_enabled(gradients):
                try:
                    found[-1].append(call(m, *given))
                except RuntimeError as error:
                    found[-1].append(error)
    return found


def torch_takes_the_hint(name: str, mode: str, mask: Tensor, padding: Tensor | None) -> bool:
    """Return True if torch follows ``is_causal`` and not the mask, as the page says."""
    if padding is not None or name == "attention, weights":
        return False
    if mode != "evaluation without gradients" or "length first" in name:
        return True
    return not name.startswith("encoder") and mask.is_floating_point()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["no padding", "padding"])
@pytest.mark.parametrize("mask", [OTHER, as_float(OTHER)], ids=["bool", "float"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_and_a_hint_that_differ(
    name: str, mode: str, padding: Tensor | None, mask: Tensor, packed: bool
) -> None:
    ahead = AHEAD if mask.dtype == torch.bool else as_float(AHEAD)
    calls = (mask, True, padding), (mask, False, padding), (ahead, False, padding)
    (torchs, by_mask, by_hint), (ours, *_) = results(name, mode, *calls, packed=packed)
    assert not torch.allclose(by_mask, by_hint)
    torch.testing.assert_close(torchs, by_hint if torch_takes_the_hint(name, mode, mask, padding) else by_mask)
    torch.testing.assert_close(ours, by_mask)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
@pytest.mark.parametrize("change", ["subclass", "hook", "subclass of the attention", "hook of the attention"])
def test_the_mask_wins_in_what_a_stack_calls(name: str, change: str) -> None:
    """A layer or an attention that was not swapped, or has a hook, gets the hint of the mask that it gets."""
    make, call = MODULES[name]
    _, fast, _ = pair(make)
    expected = call(fast, OTHER, False, None)
    former: type[nn.Module] = nn.TransformerDecoderLayer if name == "decoder" else nn.TransformerEncoderLayer
    changed = fast.layers[1]
    if "attention" in change:
        changed, former = changed.self_attn, nn.MultiheadAttention
    if "hook" in change:
        changed.register_forward_hook(lambda *_: None)
    else:
        changed.__class__ = type("Mine", (former,), {})
    torch.testing.assert_close(call(fast, OTHER, True, None), expected)


def test_the_hint_holds_where_an_encoder_leaves_the_padding_out() -> None:
    _, fast, _ = pair(MODULES["encoder"][0])
    expected = encoder_call(fast, AHEAD, False, PADDING).masked_fill(PADDING[..., None], 0.0)
    with torch.no_grad():
        torch.testing.assert_close(encoder_call(fast.eval(), None, True, PADDING), expected)


@pytest.mark.parametrize("form", ["square", "by head", "of a memory", "bf16"])
def test_a_hint_that_is_right_stays_the_look_ahead_mask(form: str) -> None:
    mask = {
        "square": AHEAD,
        "by head": as_float(AHEAD).expand(N * H, L, L).contiguous(),
        "of a memory": torch.ones(L, L + 2, dtype=torch.bool).triu(1),
        "bf16": as_float(AHEAD).bfloat16(),
    }[form]
    assert is_look_ahead(mask, True)
    wrong = mask.clone()
    wrong[..., 0, 0] = True if mask.dtype == torch.bool else 1.0
    assert not is_look_ahead(wrong, True)


def test_where_the_values_cannot_be_read_the_hint_decides() -> None:
    """The values are not read in graphs, inside torch.func, and on other devices, where reading would wait."""
    m = nn.MultiheadAttention(E, H, batch_first=True).eval().requires_grad_(False)
    tfast.accelerate(m)
    by_hint = m(X, X, X, attn_mask=AHEAD, need_weights=False)[0]

    def call(x: Tensor) -> Tensor:
        return m(x, x, x, attn_mask=OTHER, is_causal=True, need_weights=False)[0]

    assert not torch.allclose(call(X), by_hint)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = m

        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.export.export(Caller(), (X,)).module()(X), by_hint)
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(X), by_hint)
    for mask in (OTHER, as_float(OTHER)):
        assert is_look_ahead(mask.to("meta"), True) and not is_look_ahead(mask.to("meta"), None)


def test_a_mask_that_is_learned_wins_and_gets_its_gradient() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    tfast.accelerate(m)
    for values in (look_ahead(L), torch.zeros(L, L)):
        mask = values.requires_grad_()
        out, _ = m(X, X, X, attn_mask=mask, is_causal=True, need_weights=False)
        torch.testing.assert_close(out, m(X, X, X, attn_mask=mask.detach(), need_weights=False)[0])
        (gradient,) = torch.autograd.grad(out.square().sum(), mask)
        assert gradient.any()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["no padding", "padding"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_hint_without_a_mask(name: str, mode: str, padding: Tensor | None, packed: bool) -> None:
    calls = (None, True, padding), (None, False, padding), (AHEAD, False, padding)
    (torchs, all_keys, ahead), (ours, *_) = results(name, mode, *calls, packed=packed)
    if mode == "evaluation without gradients" and "length first" not in name:
        torch.testing.assert_close(torchs, all_keys, equal_nan=True)
    else:
        assert isinstance(torchs, RuntimeError) and "Need attn_mask" in str(torchs)
    left_out = name == "encoder" and mode == "evaluation without gradients"
    if padding is not None and (left_out or (packed and isinstance(MODULES[name][0](), STACKS))):
        ahead = ahead.masked_fill(padding[..., None], 0.0)
    torch.testing.assert_close(ours, ahead)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stack", [False, True], ids=["layer", "stack"])
def test_the_form_of_gelu(mode: str, stack: bool) -> None:
    training, gradients = MODES[mode]
    for form in ("tanh", "none"):
        torch.manual_seed(0)
        m: nn.Module = layer(activation=nn.GELU(form))
        m = nn.TransformerEncoder(m, 2) if stack else m
        _, fast, _ = pair(m)
        twins = {kind: copy.deepcopy(m) for kind in ("none", "tanh")}
        for kind, twin in twins.items():
            for part in twin.modules():
                if isinstance(part, nn.TransformerEncoderLayer):  # a lambda has no fast path in torch
                    part.activation, part.activation_relu_or_gelu = Form(kind), 0
        with torch.set_grad_enabled(gradients):
            torchs, ours = (model.train(training)(X) for model in (m, fast))
            expected = {kind: twin.train(training)(X) for kind, twin in twins.items()}
        assert not torch.allclose(expected["none"], expected["tanh"], atol=1e-5)
        torch.testing.assert_close(torchs, expected[form if gradients else "none"])
        torch.testing.assert_close(ours, expected[form])


class Form(nn.Module):
    """GELU of a form, in a class that torch does not know."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.form)


EMPTY: dict[str, list[list[int]]] = {
    "beside tokens": [[0] * L, [1] * L, [1, 1, 1, 0, 0, 0, 0]],
    "beside padding in front": [[0] * L, [1] * L, [0, 0, 1, 1, 1, 1, 1]],
    "alone": [[0] * L] * N,
}
"""Batches with a sentence that is all padding; 1 = token."""


def torchs_answer(name: str, mode: str, batch: str) -> str:
    """Return what torch gives for a sentence that is all padding, as the page says."""
    if name == "attention, weights":
        return "NaN"
    if mode != "evaluation without gradients" or "length first" in name:
        return "finite"
    if name != "encoder":
        return "NaN"
    return {"beside tokens": "zeros", "beside padding in front": "NaN", "alone": "RuntimeError"}[batch]


def kind_of(result: Tensor | Exception) -> str:
    if isinstance(result, Exception):
        return type(result).__name__
    sentence = result[0]
    if sentence.isnan().any():
        return "NaN" if sentence.isnan().all() else "some NaN"
    return "finite" if sentence.any() else "zeros"


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", EMPTY)
def test_a_sentence_that_is_all_padding(name: str, mode: str, batch: str) -> None:
    padding = torch.tensor(EMPTY[batch]) == 0
    make, call = MODULES[name]
    torch.manual_seed(0)
    plain, fast, _ = pair(make())
    for part in (*plain.modules(), *fast.modules()):
        if isinstance(part, nn.MultiheadAttention):
            nn.init.constant_(part.out_proj.bias, 0.25)
    training, gradients = MODES[mode]
    usual = call(fast.eval(), None, False, padding)
    with torch.set_grad_enabled(gradients):
        ours = call(fast.train(training), None, False, padding)
        try:
            torchs: Tensor | Exception = call(plain.train(training), None, False, padding)
        except RuntimeError as error:
            torchs = error
    expected = torchs_answer(name, mode, batch)
    assert kind_of(torchs) == expected
    left_out = name == "encoder" and mode == "evaluation without gradients" and batch != "beside padding in front"
    assert kind_of(ours) == ("zeros" if left_out else "finite") and kind_of(usual) == "finite"
    if not left_out:
        torch.testing.assert_close(ours, usual)
    if expected in ("finite", "zeros"):
        torch.testing.assert_close(ours[0], torchs[0])
    elif "attention" in name:
        torch.testing.assert_close(ours[0], torch.full((L, E), 0.25))
