"""accelerate on hand-written modules: modules that it leaves alone, stored weights, hooks, whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from accelerated import from_one_seed, pair
from form_arguments import B, D, L, S, called_once, fresh, ids, keep, x
from handwritten_forms import FORMS
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.dialects.common import LAST_WEIGHTS
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import bert, d2l, tensorflow
from transformer_fast.testing import fixed_dropout_seed


def test_the_dropout_mask_is_the_one_of_our_layers() -> None:
    """A swapped layer draws the masks that transformer_fast.layers draws, exactly."""
    m = reference.DecoderLayer(D, 2, dropout=0.3)
    ours = tfast.layers.DecoderLayer(D, 2, dropout=0.3)
    ours.load_state_dict(m.state_dict())
    tfast.accelerate(m)
    args = x(), x(S), keep(B, 1, S), keep(1, L, L)
    with fixed_dropout_seed(11):
        assert torch.equal(m(*args), ours(*args))


@pytest.mark.parametrize("name", ["bert", "tensorflow"])
def test_other_families_as_whole_models(name: str) -> None:
    tokens = ids()
    make, call = {
        "bert": (
            lambda: nn.ModuleList([bert.BERTEmbedding(11, D), bert.MultiHeadedAttention(2, D)]),
            lambda m: m[1](*[m[0](tokens)] * 3, mask=keep(B, 1, 1, L)),
        ),
        "tensorflow": (
            lambda: tensorflow.Transformer(1, D, 2, 12, 11, 11, 20, 20),
            lambda m: m(tokens, tokens, *tensorflow.create_masks(tokens, tokens))[0],
        ),
    }[name]
    m, fast, report = pair(make().eval())
    assert len(report.swapped) > 1
    runs = []
    for model in (fast, m):
        (out,) = from_one_seed(lambda model=model: call(model))  # which draws a mask
        runs.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    torch.testing.assert_close(*runs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["annotated attention", "d2l encoder, the chapter's", "d2l decoder, the chapter's"])
def test_a_model_that_was_called_before_is_swapped_and_gets_its_attributes_back(name: str) -> None:
    make, arguments = FORMS[name]
    m, args = make(), arguments()
    m(*map(fresh, args))
    left = {key: value for key, value in m.__dict__.items() if "att" in key}
    assert left
    report = tfast.accelerate(m)
    assert report.rows[0].now, report
    for key in left:
        assert getattr(m, key) is left[key]
    m(*map(fresh, args))
    assert all(getattr(m, key) is not left[key] for key in left)
    report.undo()
    assert {key: m.__dict__[key] for key in left} == left
    assert not any(LAST_WEIGHTS in vars(part) for part in m.modules())


def test_weights_of_a_whole_stack_are_computed_when_looked_at() -> None:
    stack = (11, D, 12, 2, 2, 0.1)
    encoder, decoder = d2l.TransformerEncoder(*stack).eval(), hw.D2lDecoder(*stack).eval()
    tokens, memory, lens = ids(), x(S), torch.tensor([2, 4])

    def weights(encoder: nn.Module, decoder: nn.Module) -> tuple[Any, ...]:
        encoder(tokens, lens), decoder(tokens, [memory, lens, [None, None]])
        return encoder.attention_weights, *decoder.attention_weights

    fast = pair(encoder)[1], pair(decoder)[1]
    torch.testing.assert_close(weights(*fast), weights(encoder, decoder))


def test_an_author_s_property_of_weights_stays() -> None:
    plain, m, _ = pair(d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1).eval())
    m.embedding.register_forward_hook(lambda *_: None)  # the stack runs as it was written, the blocks do not
    tokens, lens = ids(), torch.tensor([2, 4])
    torch.testing.assert_close(m(tokens, lens), plain(tokens, lens))
    torch.testing.assert_close(m.attention_weights, plain.attention_weights)


def test_a_lazy_module_is_left_until_its_sizes_are_known() -> None:
    m = hw.D2lHeads(D, 2, 0.1)
    found = {row.path: row.why for row in tfast.accelerate(m).left}
    assert found == {"": "its sizes are not known before its first call"}
    called_once(m, x(), x(), x(), None)
    assert tfast.accelerate(m).rows[0].now


def test_keyword_arguments_by_the_module_s_own_names() -> None:
    plain, m, _ = pair(hw.AnnotatedAttention(2, D).eval())
    q, k, mask = x(), x(S), keep(B, 1, S)
    for found in (m(value=k, query=q, key=k, mask=mask), m(q, k, mask=mask, value=k)):
        torch.testing.assert_close(found, plain(q, k, k, mask))
    for args, wrong in (((q, k), {}), ((q, k), {"valu": k}), ((q, k, k), {"valu": k})):
        with pytest.raises(TypeError):
            m(*args, **wrong)


def test_weights_left_behind_are_computed_when_looked_at() -> None:
    args, mask, lens = (x(), x(S), x(S)), keep(B, 1, S), torch.tensor([1, 4])
    m, fast, _ = pair(hw.AnnotatedAttention(2, D).eval())
    by_lengths = pair(hw.DotProductAttention(0.1).eval())[:2]
    for model in (m, fast):
        model(*args, mask)
    for model in by_lengths:
        model(*args, lens)
    torch.testing.assert_close(fast.attn, m.attn)
    torch.testing.assert_close(*(model.attention_weights for model in by_lengths))
    fast.dropout.register_forward_hook(lambda *_: None)  # the module runs as it was written
    fast(*args, mask)
    torch.testing.assert_close(fast.attn, m.attn)


@pytest.mark.parametrize("name", ["d2l encoder", "d2l decoder that counts on"])
def test_a_hook_inside_a_d2l_stack_s_attention(name: str) -> None:
    """The block then runs its own forward on lengths, since its attention does not take a mask."""
    make, arguments = FORMS[name]
    (plain, m, _), args = pair(make().eval()), arguments()
    seen: list[int] = []
    dropout = next(m for path, m in m.blks[1].named_modules() if path.endswith("attention.dropout"))
    dropout.register_forward_hook(lambda *_: seen.append(1))
    for training in (False, True):
        m.train(training)(*map(fresh, args))
    assert len(seen) == 2
    torch.testing.assert_close(m.eval()(*map(fresh, args)), plain(*map(fresh, args)))


def test_an_argument_that_the_text_s_module_does_not_have() -> None:
    class Own(hw.AnnotatedAttention):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, cache: Any = None) -> Tensor:
            return super().forward(query, key, value, mask) if cache is None else cache

    (plain, m, report), q, cached = pair(Own(2, D).eval()), x(), x()
    assert report.rows[0].now
    torch.testing.assert_close(m(q, q, q), plain(q, q, q))
    assert m(q, q, q, cache=cached) is cached and m(q, q, q, None, cached) is cached


def test_a_norm_of_two_arguments_keeps_its_code() -> None:
    class Shifted(hw.AnnotatedNorm):
        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return super().forward(x) if shift is None else super().forward(x) + shift

    plain, m, _ = pair(Shifted(D))
    args = x(), x()
    torch.testing.assert_close(m(*args), plain(*args))


@pytest.mark.parametrize("own", [lambda: nn.Linear(1, 1), lambda: nn.Parameter(torch.ones(1))])
def test_a_module_with_something_of_its_own_is_left(own: Callable[[], Any]) -> None:
    m = hw.AnnotatedAttention(2, D)
    m.own = own()
    assert tfast.accelerate(m).rows[0].now is None


def test_padding_of_embeddings_gets_no_gradient() -> None:
    m = hw.Embeddings(D, 11)
    m.lut.padding_idx = 3
    assert tfast.accelerate(m).rows[0].now
    m(torch.arange(11)).sum().backward()
    assert m.lut.weight.grad[3].eq(0).all() and m.lut.weight.grad[4].ne(0).all()


def test_an_attribute_of_a_module_is_not_hidden() -> None:
    """Attributes of a module stay visible, even those with the name of a pattern's attribute."""

    class Own(hw.AnnotatedAttention):
        def calls(self) -> str:
            return "mine"

        def fits(self) -> str:
            return "mine"

        weights = parts = keywords = "mine"

    m = Own(2, D)
    assert tfast.accelerate(m).rows[0].now == "fused AnnotatedHeads"
    assert {m.calls(), m.fits(), m.weights, m.parts, m.keywords} == {"mine"}


def test_positions_past_the_table_and_of_other_types_are_the_module_s_own_affair() -> None:
    m = hw.Positions(D, 0.0, max_len=4)
    tfast.accelerate(m)
    assert m(x(3).to(torch.bfloat16)).dtype == torch.float32
    with pytest.raises(RuntimeError):
        m(x(5))


class DoubledAttention(hw.AnnotatedAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return 2 * super().forward(query, key, value, mask)


class DoubledPositions(hw.Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * D**0.5 + self.pe[:, : x.size(1)])


class DroppedBeforeRelu(hw.AnnotatedFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.gelu(self.dropout(self.w_1(x))))


class DropsElsewhere(hw.Sublayer):
    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        return self.dropout(x + sublayer(self.norm(x)))


class Unscaled(hw.Embeddings):
    def forward(self, x: Tensor) -> Tensor:
        return self.lut(x)


OTHER_FORMULAS = [
    DoubledAttention(2, D), hw.InvertedAttention(2, D), DoubledPositions(D, 0.1), DroppedBeforeRelu(D, 12),
    DropsElsewhere(D, 0.1), Unscaled(D, 11),
]  # fmt: skip


@pytest.mark.parametrize("m", OTHER_FORMULAS, ids=lambda m: type(m).__name__)
def test_known_names_with_another_formula_are_left(m: nn.Module) -> None:
    before, state = type(m), torch.get_rng_state()
    report = tfast.accelerate(m)
    assert (
        type(m) is before and report.rows[0].why == "it has the names of a known module, but computes something else"
    ), report
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were used up"
