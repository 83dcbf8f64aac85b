"""accelerate on hand-written modules: known by structure, and only where the numbers prove it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager, fixed_seed
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import bert, d2l, tensorflow

B, L, S, D = 2, 7, 5, 8


def keep(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = True
    return mask


def x(length: int = L) -> Tensor:
    return torch.randn(B, length, D, requires_grad=True)


def ids() -> Tensor:
    return torch.randint(0, 11, (B, L))


def fresh(value: Any) -> Any:
    """The same tensors in lists of their own: a decoder changes its state."""
    return [fresh(inner) for inner in value] if isinstance(value, list) else value


def annotated_layer(decoder: bool) -> nn.Module:
    heads, inner = [hw.AnnotatedAttention(2, D) for _ in range(1 + decoder)], hw.AnnotatedFeedForward(D, 12)
    return (hw.AnnotatedDecoderLayer if decoder else hw.AnnotatedEncoderLayer)(D, *heads, inner, 0.1)


def called_once(m: nn.Module, *args: Any) -> nn.Module:
    with torch.no_grad():
        m(*args)
    return m


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "annotated norm": (lambda: hw.AnnotatedNorm(D), lambda: (x(),)),
    "annotated attention": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, S))),
    "annotated attention, int": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).int())),
    "annotated attention, float": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).float())),
    "annotated feed forward": (lambda: hw.AnnotatedFeedForward(D, 12), lambda: (x(),)),
    "sublayer": (lambda: hw.Sublayer(D, 0.1), lambda: (x(), torch.tanh)),
    "post-norm sublayer": (lambda: hw.PostSublayer(D, 0.1), lambda: (x(), torch.tanh)),
    "embeddings": (lambda: hw.Embeddings(D, 11), lambda: (ids(),)),
    "positions": (lambda: hw.Positions(D, 0.1), lambda: (x(),)),
    "positions, length first": (lambda: hw.PositionsLengthFirst(D, 0.1), lambda: (x(),)),
    "bert attention": (lambda: hw.BertAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, 1, S))),
    "bert attention, dense": (lambda: hw.BertAttention(2, D), lambda: (x(), x(), x(), keep(B, 1, L, L))),
    "bert embedding": (lambda: hw.TokenEmbedding(11, D), lambda: (ids(),)),
    "tensorflow attention": (
        lambda: hw.TensorflowAttention(D, 2),
        lambda: (x(S), x(S), x(), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "tensorflow encoder layer": (
        lambda: tensorflow.EncoderLayer(D, 2, 12),
        lambda: (x(), 1.0 - keep(B, 1, 1, L).float()),
    ),
    "tensorflow decoder layer": (
        lambda: tensorflow.DecoderLayer(D, 2, 12),
        lambda: (x(), x(S), torch.ones(L, L).triu(1), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "annotated encoder layer": (lambda: annotated_layer(False), lambda: (x(), keep(B, 1, L))),
    "annotated decoder layer": (
        lambda: annotated_layer(True),
        lambda: (x(), x(S), keep(B, 1, S), tfast.layers.subsequentmask(L)),
    ),
    "bert feed forward": (lambda: hw.BertFeedForward(D, 12), lambda: (x(),)),
    "bert block": (lambda: hw.BertBlock(D, 2, 12), lambda: (x(), keep(B, 1, 1, L).expand(B, 1, L, L))),
    "bert token + position": (lambda: bert.BERTEmbedding(11, D), lambda: (ids(),)),
    "bert token + position + segment": (lambda: hw.BertEmbedding(11, D), lambda: (ids(), ids() % 3)),
    "tensorflow encoder": (
        lambda: tensorflow.Encoder(2, D, 2, 12, 11, 20),
        lambda: (ids(), 1.0 - keep(B, 1, 1, L).float()),
    ),
    "tensorflow decoder": (
        lambda: tensorflow.Decoder(2, D, 2, 12, 11, 20),
        lambda: (ids(), x(S), torch.ones(L, L).triu(1), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "d2l feed forward": (lambda: d2l.PositionWiseFFN(12, D, num_inputs=D), lambda: (x(),)),
    "d2l heads": (
        lambda: called_once(hw.D2lHeads(D, 2, 0.1), x(), x(), x(), None),
        lambda: (x(), x(S), x(S), torch.tensor([S + 2, 0])),
    ),
    "d2l heads, a length a query": (
        lambda: d2l.MultiHeadAttention(D, 2, 0.1, True),
        lambda: (x(), x(S), x(S), torch.randint(1, S + 1, (B, L))),
    ),
    "d2l encoder block": (lambda: d2l.EncoderBlock(D, 12, 2, 0.1), lambda: (x(), torch.tensor([3, 7]))),
    "d2l decoder block": (
        lambda: d2l.DecoderBlock(D, 12, 2, 0.1, 1),
        lambda: (x(), [x(S), torch.tensor([2, 4]), [None, x(3)]]),
    ),
    "d2l encoder": (lambda: d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1), lambda: (ids(), torch.tensor([3, 7]))),
    "d2l decoder, the chapter's": (
        lambda: hw.D2lDecoder(11, D, 12, 2, 2, 0.1),
        lambda: (ids(), [x(S), torch.tensor([2, 4]), [x(3), x(3)]]),
    ),
    "d2l decoder that counts on": (
        lambda: d2l.TransformerDecoder(11, D, 12, 2, 2, 0.1),
        lambda: (ids(), [x(S), None, [x(3), x(3)]]),
    ),
    "d2l attention": (lambda: hw.DotProductAttention(0.1), lambda: (x(), x(S), x(S), torch.tensor([2, 4]))),
    "d2l add and norm": (lambda: hw.AddNorm(D, 0.1), lambda: (x(), x())),
    "d2l positions": (lambda: hw.D2lPositions(D, 0.1), lambda: (x(),)),
    "classic encoder layer": (lambda: reference.EncoderLayer(D, 2), lambda: (x(), keep(B, 1, L))),
    "classic encoder layer, post-norm": (
        lambda: reference.EncoderLayer(D, 2, norm_first=False, norm="layer"),
        lambda: (x(), keep(B, 1, L)),
    ),
    "classic decoder layer": (lambda: reference.DecoderLayer(D, 2), lambda: (x(), x(S), keep(B, 1, S), keep(1, L, L))),
    "classic encoder": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), keep(B, 1, L))),
    "classic encoder without a mask": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), None)),
}  # fmt: skip


def results(m: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    out = m(*map(fresh, args))
    outs = list(out) if isinstance(out, tuple) else [out]
    trained = [t for t in (*args, *m.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad((outs[0] * torch.linspace(-1, 1, outs[0].numel()).view_as(outs[0])).sum(), trained)
    return [*outs, *grads]


@pytest.mark.parametrize("name", FORMS)
def test_same_numbers(name: str) -> None:
    make, arguments = FORMS[name]
    m = make().eval()
    args = arguments()
    expected, keys = results(m, args), list(m.state_dict())
    before = [(type(m), m.__dict__.keys()) for m in m.modules()]
    report = tfast.accelerate(m)
    assert report.rows[0].path == "" and report.rows[0].now, report
    assert isinstance(m, type(make())) and list(m.state_dict()) == keys
    torch.testing.assert_close(results(m, args), expected, atol=2e-5, rtol=2e-5)

    twin = copy.deepcopy(m)  # weights that were left are not copied: they are the last call's
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (twin, loaded):
        assert type(other) is type(m)
        torch.testing.assert_close(results(other, args), expected, atol=2e-5, rtol=2e-5)
    report.undo()
    assert [(type(m), m.__dict__.keys()) for m in m.modules()] == before
    torch.testing.assert_close(results(m, args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMS)
def test_dropout_is_where_it_was(name: str) -> None:
    make, arguments = FORMS[name]
    m = make()
    dropouts = [child for child in m.modules() if isinstance(child, nn.Dropout)]
    args = arguments()
    fast = copy.deepcopy(m)
    tfast.accelerate(fast)
    for dropout in dropouts:
        dropout.p = 1.0
    for child in fast.modules():
        if isinstance(child, nn.Dropout):
            child.p = 1.0
    torch.testing.assert_close(fast(*map(fresh, args)), m(*map(fresh, args)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_training_draws_the_reference_s_mask(name: str) -> None:
    """Exact with the shared mask: outputs and gradients of a step with dropout, fused and eager."""
    make, arguments = FORMS[name]
    m, args = make(), arguments()
    tfast.accelerate(m)
    found = []
    for backend in ("auto", "reference"):
        torch.manual_seed(4)
        with tfast.backend(backend):
            found.append(results(m, args))
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_bf16_by_the_gate(name: str) -> None:
    """In bfloat16 no further from fp64 than the module itself is."""
    make, arguments = FORMS[name]
    m, args = make().eval(), arguments()

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list):
            return [cast(inner, dtype) for inner in value]
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        return value.detach().bfloat16().to(dtype).requires_grad_(value.requires_grad)

    def typed(m: nn.Module, dtype: torch.dtype) -> nn.Module:
        for child in m.to(dtype).modules():
            if isinstance(getattr(child, "P", None), Tensor):  # no buffer: .to leaves it behind
                child.P = child.P.to(dtype)
        return m

    for part in m.modules():  # a ReLU at its kink falls either way, and takes a gradient along
        for first in ("linear_1", "w_1", "dense1", "0"):
            if isinstance(getattr(part, first, None), nn.Linear):
                nn.init.constant_(getattr(part, first).bias, 4.0)
    m = typed(m, torch.bfloat16)
    exact, fast = typed(copy.deepcopy(m), torch.float64), copy.deepcopy(m)
    assert tfast.accelerate(fast).rows[0].now
    runs = [results(model, cast(list(args), dtype)) for model, dtype in (
        (fast, torch.bfloat16), (m, torch.bfloat16), (exact, torch.float64))]  # fmt: skip
    for ours, theirs, true in zip(*runs, strict=True):
        if isinstance(true, Tensor) and true.abs().max() < 1e-10:  # the bias of keys cancels: rounding alone is left
            assert ours.abs().max() < 0.05
        elif isinstance(true, Tensor):
            assert_as_exact_as_eager(ours, theirs, true, ulps=4.0 * (B * L) ** 0.5)


def test_the_dropout_mask_is_the_one_of_our_layers() -> None:
    """A swapped layer draws what transformer_fast.layers draws: exact with the shared mask."""
    m = reference.DecoderLayer(D, 2, dropout=0.3)
    ours = tfast.layers.DecoderLayer(D, 2, dropout=0.3)
    ours.load_state_dict(m.state_dict())
    tfast.accelerate(m)
    args = x(), x(S), keep(B, 1, S), keep(1, L, L)
    with fixed_seed(11):
        assert torch.equal(m(*args), ours(*args))


@pytest.mark.parametrize("name", ["bert", "tensorflow", "d2l encoder", "d2l decoder"])
def test_the_other_families_as_whole_models(name: str) -> None:
    m, call = {
        "bert": (
            lambda: nn.ModuleList([bert.BERTEmbedding(11, D), bert.MultiHeadedAttention(2, D)]),
            lambda m: m[1](*[m[0](tokens)] * 3, mask=keep(B, 1, 1, L)),
        ),
        "tensorflow": (
            lambda: tensorflow.Transformer(1, D, 2, 12, 11, 11, 20, 20),
            lambda m: m(tokens, tokens, *tensorflow.create_masks(tokens, tokens))[0],
        ),
        "d2l encoder": (
            lambda: d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1),
            lambda m: m(tokens, torch.tensor([3, 7])),
        ),
        "d2l decoder": (
            lambda: d2l.DecoderBlock(D, 12, 2, 0.1, 0),
            lambda m: m(queries, [memory, torch.tensor([2, 4]), [None]])[0],
        ),
    }[name]
    tokens, queries, memory = ids(), x(), x(S)
    m = m().eval()
    results = []
    for fast in (False, True):
        torch.manual_seed(2)
        if fast:
            assert len(tfast.accelerate(m).swapped) > 1
        out = call(m)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(m.parameters()), allow_unused=True)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["annotated attention", "d2l encoder", "d2l decoder, the chapter's"])
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


def test_weights_of_a_whole_stack_are_computed_when_looked_at() -> None:
    encoder = d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1).eval()
    decoder = hw.D2lDecoder(11, D, 12, 2, 2, 0.1).eval()
    tokens, memory, lens = ids(), x(S), torch.tensor([2, 4])
    results = []
    for fast in (False, True):
        if fast:
            tfast.accelerate(encoder), tfast.accelerate(decoder)
        encoder(tokens, lens), decoder(tokens, [memory, lens, [None, None]])
        results.append((encoder.attention_weights, *decoder.attention_weights))
    torch.testing.assert_close(*results)


def test_a_lazy_module_is_left_until_its_sizes_are_known() -> None:
    m = hw.D2lHeads(D, 2, 0.1)
    found = {row.path: row.why for row in tfast.accelerate(m).left}
    assert found == {"": "its sizes are not known before its first call"}
    called_once(m, x(), x(), x(), None)
    assert tfast.accelerate(m).rows[0].now


def test_keyword_arguments_by_the_module_s_own_names() -> None:
    m = hw.AnnotatedAttention(2, D).eval()
    q, k, mask = x(), x(S), keep(B, 1, S)
    expected = m(q, k, k, mask)
    tfast.accelerate(m)
    torch.testing.assert_close(m(value=k, query=q, key=k, mask=mask), expected)
    torch.testing.assert_close(m(q, k, mask=mask, value=k), expected)
    for wrong in ({}, {"valu": k}):
        with pytest.raises(TypeError):
            m(q, k, **wrong)


def test_weights_left_behind_are_computed_when_looked_at() -> None:
    m = hw.AnnotatedAttention(2, D).eval()
    lens = hw.DotProductAttention(0.1).eval()
    args = x(), x(S), x(S)
    m(*args, keep(B, 1, S))
    mask = keep(B, 1, S)
    m(*args, mask), lens(*args, torch.tensor([1, 4]))
    expected = m.attn, lens.attention_weights
    tfast.accelerate(m), tfast.accelerate(lens)
    m(*args, mask), lens(*args, torch.tensor([1, 4]))
    torch.testing.assert_close((m.attn, lens.attention_weights), expected)
    m.dropout.register_forward_hook(lambda *_: None)  # the module runs as it was written
    m(*args, mask)
    torch.testing.assert_close(m.attn, expected[0])


def test_hooks_on_what_the_face_skips() -> None:
    m = reference.EncoderLayer(D, 2, dropout=0.0)
    seen: list[str] = []
    for name in ("norm_2", "dropout_1", "attn", "attn.dropout", "ff.linear_1"):
        m.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    args = x(), keep(B, 1, L)
    expected, before = m(*args), list(seen)
    tfast.accelerate(m)
    seen.clear()
    torch.testing.assert_close(m(*args), expected)
    assert seen == before


def test_positions_past_the_table_and_of_other_types_are_the_module_s_own_affair() -> None:
    m = hw.Positions(D, 0.0, max_len=4)
    tfast.accelerate(m)
    assert m(x(3).to(torch.bfloat16)).dtype == torch.float32
    with pytest.raises(RuntimeError):
        m(x(5))


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


@pytest.mark.parametrize("m", [
    hw.InvertedAttention(2, D), DoubledPositions(D, 0.1), DroppedBeforeRelu(D, 12), DropsElsewhere(D, 0.1),
    Unscaled(D, 11),
], ids=lambda m: type(m).__name__)  # fmt: skip
def test_known_names_with_another_formula_are_left(m: nn.Module) -> None:
    before, state = type(m), torch.get_rng_state()
    report = tfast.accelerate(m)
    assert type(m) is before and report.rows[0].why == "its names are known, but it computes something else", report
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were used up"


def losses(model: nn.Module, call: Callable[[nn.Module], Tensor], steps: int = 10) -> Tensor:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    values = []
    for _ in range(steps):
        loss = call(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return torch.stack(values)


def test_ten_steps_of_training_give_the_same_losses() -> None:
    src, tgt = torch.randint(1, 40, (4, 9)), torch.randint(1, 40, (4, 8))
    blocked = torch.arange(9) >= torch.tensor([9, 7, 4, 2]).unsqueeze(1)
    look_ahead = nn.Transformer.generate_square_subsequent_mask(8)
    a, b, target = torch.randn(4, 9, 16), torch.randn(4, 8, 16), torch.randn(4, 8, 16)

    def torch_step(m: nn.Module) -> Tensor:
        out = m(a, b, tgt_mask=look_ahead, src_key_padding_mask=blocked, memory_key_padding_mask=blocked)
        return (out - target).square().mean()

    def annotated_step(m: nn.Module) -> Tensor:
        logits = m(src, tgt, ~blocked.unsqueeze(1), tfast.layers.subsequentmask(8))
        return F.cross_entropy(logits.flatten(0, 1), tgt.flatten())

    models = (
        (nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True), torch_step),
        (hw.Annotated(40, 16, 2, 32, 2, dropout=0.0), annotated_step),
        (reference.Transformer(40, 40, 16, 2, 2, 0.0), annotated_step),
    )
    for model, step in models:
        fast = copy.deepcopy(model)
        assert tfast.accelerate(fast).swapped
        torch.testing.assert_close(losses(fast, step), losses(model, step), atol=1e-4, rtol=0)
