"""``accelerate(model, packed=True)`` on stacks of torch.nn, hand-written stacks and `Transformer`: equal at every
token."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import handwritten
import pytest
import torch
from accelerated import assert_copied_and_undone, pair, state
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import transformer_fast as tfast
from examples import examples
from transformer_fast.layers.padded_calls import NO_SOURCE, padded_calls
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import d2l, tensorflow
from transformer_fast.swap.form import form_of
from transformer_fast.testing import ULPS, errors

D, VOCABULARY = 16, 40
SOURCE, TARGET = 9, 7
SOURCES, TARGETS = torch.tensor([9, 2, 6, 4]), torch.tensor([7, 3, 5, 1])

Call = Callable[[nn.Module], Tensor]


def lengths(numbers: Tensor, longest: int) -> Tensor:
    return torch.arange(longest) < numbers[:, None]


def outcome(model: nn.Module, call: Call, keep: Tensor) -> list[Tensor]:
    """Return the output at tokens, and the gradients of a weighted sum of it."""
    model.zero_grad(set_to_none=True)
    out = call(model)[keep]
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), *(p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters())]


def hold(plain: nn.Module, call: Call, keep: Tensor, *, reasons: tuple[str, ...] = ()) -> tfast.accelerate.Report:
    """Compare a model with its copy without padding by the gate."""
    (_, fast, report), exact = pair(plain, packed=True), copy.deepcopy(plain).double()
    found = [outcome(model, call, keep) for model in (fast, plain, exact)]
    scale = max(t.abs().max().item() for t in found[2][1:])
    for number, (ours, eager, true) in enumerate(zip(*found, strict=True)):
        error, allowed, _ = errors(ours, eager, true)
        allowed += ULPS * torch.finfo(ours.dtype).eps * scale * (number > 0)
        assert error <= allowed, f"{number}: error {error:.3e}, allowed {allowed:.3e}"
    assert tuple(report.padded_calls.reasons) == reasons
    assert any(row.now == "without padding" for row in report.rows)
    return report


def like(model: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = next(model.parameters()).dtype
    return tuple(t.to(dtype) for t in tensors)


@pytest.mark.parametrize("float_masks", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_models_of_torch(norm_first: bool, batch_first: bool, activation: str, float_masks: bool) -> None:
    model = nn.Transformer(
        D, 2, 2, 3, 32, 0.0, activation=activation, norm_first=norm_first, batch_first=batch_first
    )  # fmt: skip
    turned = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    src, trg = torch.randn(4, SOURCE, D), torch.randn(4, TARGET, D)
    masks = [~lengths(SOURCES, SOURCE), ~lengths(TARGETS, TARGET)]
    if float_masks:
        masks = [torch.zeros(mask.shape).masked_fill(mask, float("-inf")) for mask in masks]
    look_ahead = nn.Transformer.generate_square_subsequent_mask(TARGET)

    def call(m: nn.Module) -> Tensor:
        x, y, ahead, padding, trg_padding = like(m, src, trg, look_ahead, *masks) if float_masks else (
            *like(m, src, trg, look_ahead), *masks)  # fmt: skip
        options = {"src_key_padding_mask": padding, "tgt_key_padding_mask": trg_padding}
        return turned(m(turned(x), turned(y), tgt_mask=ahead, memory_key_padding_mask=padding, **options))

    hold(model, call, lengths(TARGETS, TARGET))


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize("last_norm", [False, True])
def test_an_encoder_of_torch_returns_zeros_at_padding(last_norm: bool, evaluation: bool) -> None:
    layer = nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D) if last_norm else None).train(not evaluation)
    if last_norm:
        nn.init.normal_(model.norm.bias)
    keep = lengths(SOURCES, SOURCE)
    x = torch.randn(4, SOURCE, D)
    hold(model, lambda m: m(*like(m, x), src_key_padding_mask=~keep), keep)
    tfast.accelerate(model, packed=True)
    assert not model(x, src_key_padding_mask=~keep)[~keep].any()


class Tensorflow(nn.Module):
    """The tutorial's model with keep masks as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tensorflow.Transformer(2, D, 2, 32, VOCABULARY, VOCABULARY, 20, 20, 0.0)

    def forward(self, src: Tensor, trg: Tensor, src_mask: Tensor, trg_mask: Tensor) -> Tensor:
        return self.results(src, trg, src_mask, trg_mask)[0]

    def weights(self, *given: Tensor) -> list[Tensor]:
        return list(self.results(*given)[1].values())

    def results(self, src: Tensor, trg: Tensor, *masks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        padding, look_ahead = ((mask == 0).float().unsqueeze(1) for mask in masks)
        return self.model(src, trg, padding, look_ahead, padding)


class D2l(nn.Module):
    """The textbook's encoder and decoder with keep masks as arguments."""

    def __init__(self) -> None:
        super().__init__()
        sizes = VOCABULARY, D, 32, 2, 2, 0.0
        self.encoder, self.decoder = d2l.TransformerEncoder(*sizes), d2l.TransformerDecoder(*sizes)

    def forward(self, src: Tensor, trg: Tensor, src_mask: Tensor, trg_mask: Tensor) -> Tensor:
        valid_lens = (src_mask != 0).sum(-1)[:, 0]
        return self.decoder(trg, self.decoder.init_state(self.encoder(src, valid_lens), valid_lens))[0]

    def weights(self, *given: Tensor) -> list[Tensor]:
        self(*given)
        return self.encoder.attention_weights


class BertEncoder(handwritten.Annotated):
    """Blocks of BERT before an annotated decoder; their masks are (B, 1, L, L), with equal rows."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, D, 2, 32, 2, 0.0)
        self.encoder = nn.ModuleList(handwritten.BertBlock(D, 2, 32, 0.0) for _ in range(2))

    def forward(self, src: Tensor, trg: Tensor, src_mask: Tensor, trg_mask: Tensor) -> Tensor:
        memory, mask = self.src_embed(src), src_mask.repeat(1, src.shape[1], 1).unsqueeze(1)
        for block in self.encoder:
            memory = block.forward(memory, mask)
        x = self.tgt_embed(trg)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, trg_mask)
        return self.generator(x)


def layers_alone(model: nn.Module) -> nn.Module:
    """Return the model with its stacks hidden, so that each layer removes the padding by itself."""
    for stack in (m for m in model.modules() if hasattr(m, "pos_encoding")):
        stack.add_module("other", nn.Identity())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "annotated": lambda: handwritten.make_model(VOCABULARY, VOCABULARY, 2, D, 32, 2, 0.0),
    "annotated, lists of layers": lambda: handwritten.Annotated(VOCABULARY, D, 2, 32, 2, 0.0),
    "classic": lambda: reference.Transformer(VOCABULARY, VOCABULARY, D, 2, 2, 0.0),
    "ours": lambda: tfast.Transformer(VOCABULARY, VOCABULARY, D, 2, 2, 0.0),
    "tensorflow": Tensorflow,
    "tensorflow, layers alone": lambda: layers_alone(Tensorflow()),
    "d2l": D2l,
    "d2l, layers alone": lambda: layers_alone(D2l()),
    "blocks of BERT": BertEncoder,
}


def ids_and_masks(src_keep: Tensor, trg_keep: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    src, trg = (torch.randint(1, VOCABULARY, keep.shape).masked_fill(~keep, 0) for keep in (src_keep, trg_keep))
    look_ahead = torch.ones(1, trg.shape[1], trg.shape[1], dtype=torch.bool).tril()
    return src, trg, src_keep[:, None], trg_keep[:, None] & look_ahead


@pytest.mark.parametrize("integers", [False, True], ids=["bool", "integers"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_classic_texts(name: str, integers: bool) -> None:
    keep, trg_keep = lengths(SOURCES, SOURCE), lengths(TARGETS, TARGET)
    given = list(ids_and_masks(keep, trg_keep))
    if integers:
        given[2:] = [mask.long() for mask in given[2:]]
    hold(MODELS[name](), lambda m: m(*given), trg_keep)


@functools.cache
def sides(name: str) -> tuple[nn.Module, nn.Module, tfast.accelerate.Report]:
    """Return a model without padding, the same on the fused ops with padding, and the report of the first."""
    padded, fast, report = pair(MODELS[name], packed=True)
    tfast.accelerate(padded)
    return fast, padded, report


@examples(25, 500)
@given(data=st.data())
def test_any_padding(data: st.DataObject) -> None:
    batch, src_length, trg_length = (data.draw(st.integers(1, n)) for n in (4, 6, 5))

    def keeps(length: int) -> Tensor:
        row = st.lists(st.booleans(), min_size=length, max_size=length)
        return torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch)))

    src_keep, trg_keep = keeps(src_length), keeps(trg_length)
    name = data.draw(st.sampled_from(["annotated", "classic", "tensorflow", "d2l", "blocks of BERT"]))
    if name == "d2l":
        src_keep = lengths(src_keep.sum(1), src_length)
    torch.manual_seed(data.draw(st.integers(0, 9)))  # of the ids
    trg_keep[:, 0] |= ~trg_keep.any()  # at least one token, whose output is compared
    given_ = ids_and_masks(src_keep, trg_keep)
    fast, padded, report = sides(name)
    report.padded_calls.reasons.clear()
    found = [outcome(m, lambda m: m(*given_), trg_keep) for m in (fast, padded)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
    assert (NO_SOURCE in report.padded_calls.reasons) == (not src_keep.any(1).all())


@pytest.mark.parametrize("left", [0, 1, 4])
def test_a_window_of_a_decoder_is_kept(left: int) -> None:
    """The window is an AttentionMask, which the plain model does not take; the stored weights show it too."""
    fast, padded, report = sides("annotated")
    report.padded_calls.reasons.clear()
    keep = lengths(TARGETS, TARGET)
    src, trg, src_mask, _ = ids_and_masks(lengths(SOURCES, SOURCE), keep)
    mask = tfast.AttentionMask.lengths(TARGETS) & tfast.AttentionMask.window(left)
    found = [outcome(m, lambda m: m(src, trg, src_mask, mask), keep) for m in (fast, padded)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
    weights = [m.decoder.layers[0].self_attn.attn.transpose(1, 2)[keep] for m in (fast, padded)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=2e-5)
    assert not report.padded_calls.reasons


def test_a_dropout_is_drawn_again_by_the_same_seed() -> None:
    keep = lengths(TARGETS, TARGET)
    given_ = ids_and_masks(lengths(SOURCES, SOURCE), keep)
    for name in MODELS:
        model = MODELS[name]()
        tfast.accelerate(model, packed=True)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        found = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            found.append(outcome(model, lambda m: m(*given_), keep))
        assert all(map(torch.equal, *found[:2])), name
        assert not torch.equal(found[0][0], found[2][0]), name


def test_a_mask_that_is_more_than_padding_stays() -> None:
    keep, trg_keep = lengths(SOURCES, SOURCE), lengths(TARGETS, TARGET)
    src, trg, src_mask, trg_mask = ids_and_masks(keep, trg_keep)
    trg_mask[:, 4, 1] = False
    padded, fast, report = pair(MODELS["annotated"], packed=True)
    found = (outcome(m, lambda m: m(src, trg, src_mask, trg_mask), trg_keep) for m in (fast, padded))
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
    (reason,) = report.padded_calls.reasons
    assert "is not padding and look-ahead alone" in reason
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 32, 0.0, batch_first=True), 1)
    report = tfast.accelerate(model, packed=True)
    model(torch.randn(4, SOURCE, D), torch.rand(SOURCE, SOURCE) > 0.5, ~keep)
    assert list(report.padded_calls.reasons) == ["its mask is not the look-ahead mask"]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "block of BERT": lambda: handwritten.BertBlock(D, 2, 32, 0.0),
    "annotated layer": lambda: handwritten.AnnotatedEncoderLayer(
        D, handwritten.BertAttention(2, D, 0.0), handwritten.AnnotatedFeedForward(D, 32, 0.0), 0.0
    ),
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("outer", [False, True], ids=["equal rows", "empty rows at padding"])
def test_a_dense_mask_of_an_encoder_is_padding_where_its_rows_are_the_tokens(outer: bool, block: str) -> None:
    keep, x = lengths(SOURCES, SOURCE).flip(1), torch.randn(4, SOURCE, D)
    mask = keep[:, None, None] & (keep[:, None, :, None] | torch.tensor(not outer))
    model = nn.ModuleList([BLOCKS[block]()])
    hold(model, lambda m: m[0](*like(m, x), mask.expand(4, 1, SOURCE, SOURCE).int()), keep)
    report = tfast.accelerate(model, packed=True)
    dense = mask.repeat(1, 1, SOURCE // mask.shape[2], 1)
    dense[0, 0, 2, 3] = False
    model[0](x, dense)
    assert list(report.padded_calls.reasons) == [
        "packed: the dense mask (4, 1, 9, 9) is not padding alone; pass (B, 1, 1, L)"
    ]


@pytest.mark.parametrize("name", ["tensorflow", "d2l"])
def test_weights_are_those_of_the_plain_model(name: str) -> None:
    """A decoder of the tutorial returns weights with gradients; an encoder of the textbook stores them."""
    src_keep, keep = lengths(SOURCES, SOURCE), lengths(TARGETS, TARGET)
    given_ = ids_and_masks(src_keep, keep)
    (plain, fast, report), found = pair(lambda: MODELS[name]().eval(), packed=True), []
    for model in (fast, plain):
        weights = model.weights(*given_)
        queries = src_keep if name == "d2l" else keep
        found.append([w.unflatten(0, (4, -1)) if w.dim() == 3 else w for w in weights])
        assert model is plain or not any(w.transpose(1, 2)[~queries].any() for w in found[-1])
        found[-1] = [w.transpose(1, 2)[queries] for w in found[-1]]
        if name == "tensorflow":
            sum((w**2).sum() for w in found[-1]).backward()
            found[-1].append(model.model.encoder.embedding.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert len(found[0]) > 1 and not report.padded_calls.reasons


@pytest.mark.parametrize(("name", "path", "width"), [
    ("annotated", "encoder.layers.0", D), ("classic", "encoder.layers.0", D), ("tensorflow", "enc_layers.0", D),
    ("d2l", "block0", D), ("torch", "encoder.layers.0", D), ("torch", "encoder.layers.1.linear1", 32),
])  # fmt: skip
def test_a_hook_on_a_layer_of_a_stack_or_inside_sees_padded_rows(name: str, path: str, width: int) -> None:
    keep, trg_keep, shapes = lengths(SOURCES, SOURCE), lengths(TARGETS, TARGET), []
    if name == "torch":
        model: nn.Module = nn.Transformer(D, 2, 2, 1, 32, 0.0, batch_first=True)
        given_ = torch.randn(4, SOURCE, D), torch.randn(4, TARGET, D)
        options = {"src_key_padding_mask": ~keep, "memory_key_padding_mask": ~keep}
    else:
        model, given_, options = MODELS[name](), ids_and_masks(keep, trg_keep), {}
    report = tfast.accelerate(model, packed=True)
    hooked = next(m for place, m in model.named_modules() if place.endswith(path))
    hooked.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
    model(*given_, **options)
    assert shapes == [(4, SOURCE, width)]
    (reason,) = report.padded_calls.reasons
    assert "has a hook" in reason


@pytest.mark.parametrize("name", MODELS)
def test_copies_a_second_call_and_undo(name: str) -> None:
    given_ = ids_and_masks(lengths(SOURCES, SOURCE), lengths(TARGETS, TARGET))
    plain, model, report = pair(MODELS[name], packed=True)
    assert_copied_and_undone(model, report, state(plain), lambda m: m(*given_), packed=True)
    assert torch.equal(model(*given_), plain(*given_))


def test_a_batch_without_padding_is_computed_as_before() -> None:
    given_ = ids_and_masks(*(torch.ones(4, n, dtype=torch.bool) for n in (SOURCE, TARGET)))
    for name in ("annotated", "classic"):
        padded, model, _ = pair(MODELS[name], packed=True)
        tfast.accelerate(padded)
        keep = torch.ones(4, TARGET, dtype=torch.bool)
        found = (outcome(m, lambda m: m(*given_), keep) for m in (model, padded))
        assert all(itertools.starmap(torch.equal, zip(*found, strict=True)))


class Around(nn.Module):
    """Module around attention, as adapters have it; a text may read attributes of the attention."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "base" else getattr(self.base, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.base(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


class Neighbours(nn.Conv1d):
    """Network that reads several positions."""

    def __init__(self, _: nn.Module) -> None:
        super().__init__(D, D, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


@pytest.mark.parametrize("name", ["annotated", "classic", "tensorflow", "d2l", "blocks of BERT"])
def test_what_is_replaced_afterwards_keeps_the_padding(name: str) -> None:
    """An attention, or a network that reads several positions."""
    keep = lengths(TARGETS, TARGET)
    given_ = ids_and_masks(lengths(SOURCES, SOURCE), keep)
    plain, fast, _ = pair(lambda: MODELS[name]().eval(), packed=True)
    places: dict[str, type[nn.Module]] = {
        path: Around for path, m in fast.named_modules() if (form := form_of(m)) is not None and form.attends
    }
    if name != "blocks of BERT":  # in a list of blocks, one reads what the block before has at padding, which is 0
        ends = (".ff", ".ffn", ".feed_forward")
        places |= {path: Neighbours for path, _ in plain.named_modules() if path.endswith(ends)}
        assert set(places.values()) == {Around, Neighbours}
    for path, kind in places.items():
        changed = [copy.deepcopy(m) for m in (fast, plain)]
        for m in changed:
            torch.manual_seed(1)
            m.set_submodule(path, kind(m.get_submodule(path)).eval())
        found = [outcome(m, lambda m: m(*given_), keep)[0] for m in changed]
        torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)
        reasons = {reason for m in changed[0].modules() if (calls := padded_calls(m)) for reason in calls.reasons}
        is_kept = kind is Around or (name, path.partition(".")[0]) == ("d2l", "decoder")  # the latter in any case
        assert is_kept or "its Neighbours may read several positions" in reasons
