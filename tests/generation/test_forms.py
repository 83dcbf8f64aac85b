"""Generation from The Annotated Transformer's model, against the text's own decoding loop."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import handwritten as hw
import pytest
import torch
from tiny_transformer import BOS, EOS, MARKS, VOCAB, answers, assert_same, batch, tokens_of
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import GenerationConfig, extension
from transformer_fast.generation.decoding import CachedDecoding, Decoding, UncachedDecoding, start
from transformer_fast.generation.request import check_request

D, LONGEST = 32, 24


class NoMethods(hw.EncoderDecoder):
    """Model with the five modules only, called by forward."""

    encode = decode = None

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        return self.decoder(self.tgt_embed(tgt), self.encoder(self.src_embed(src), src_mask), src_mask, tgt_mask)


class SaysMore(hw.EncoderDecoder):
    """Model whose decode does more than that of the annotated text."""

    def decode(self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return super().decode(memory, src_mask, tgt, tgt_mask) + torch.linspace(-3, 3, D)


class OtherArguments(hw.EncoderDecoder):
    def decode(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return super().decode(memory, None, tgt, tgt_mask)


def annotated(seed: int = 0, kind: type[nn.Module] = hw.EncoderDecoder) -> nn.Module:
    """Return a model with choices far from ties, which depend on the source and the prefix."""
    torch.manual_seed(seed)
    m = hw.make_model(VOCAB, VOCAB, 2, D, 48, 4)
    with torch.no_grad():
        m.generator.proj.weight.mul_(8)
        m.decoder.norm.b_2.zero_()
        for layer in m.decoder.layers:
            for attention in (layer.self_attn, layer.src_attn):
                attention.linears[1].weight.mul_(4)
                attention.linears[2].weight.mul_(8)
            layer.feed_forward.w_2.weight.mul_(8)
    return m if kind is hw.EncoderDecoder else kind(*m.children())


@functools.cache
def accelerated_once() -> nn.Module:
    m = annotated()
    tfast.accelerate(m)
    return m


def accelerated() -> nn.Module:
    """Return an accelerated copy of the model; accelerate takes a second, so the copy is cached."""
    return copy.deepcopy(accelerated_once())


def with_norms(m: nn.Module, kind: type[nn.Module]) -> None:
    for layer in (*m.encoder.layers, *m.decoder.layers):
        for sublayer in layer.sublayer:
            sublayer.norm = kind(D)
    m.encoder.norm, m.decoder.norm = kind(D), kind(D)


def with_gelu(m: nn.Module) -> None:
    for layer in m.decoder.layers:
        layer.feed_forward = hw.BertFeedForward(D, 48)


def tied(m: nn.Module) -> None:
    m.generator.proj.weight = m.tgt_embed[0].lut.weight = m.src_embed[0].lut.weight


def own_loop(m: nn.Module, given: tuple[Tensor, Tensor]) -> list[list[int]]:
    """Decode a batch with ``greedy_decode`` of the annotated text: without a cache, cut at EOS."""
    src, lengths = given
    mask = (torch.arange(src.shape[1]) < lengths[:, None]).unsqueeze(1)
    with torch.no_grad():
        memory, ys = m.eval().encode(src, mask), torch.full((len(src), 1), BOS)
        for _ in range(LONGEST):
            out = m.decode(memory, mask, ys, tfast.layers.subsequentmask(ys.shape[1]))
            ys = torch.cat((ys, m.generator(out[:, -1]).argmax(dim=1, keepdim=True)), dim=1)
    return [ids[: ids.index(EOS)] if EOS in ids else ids for ids in ys[:, 1:].tolist()]


def said(m: nn.Module, given: tuple[Tensor, Tensor], **options: object) -> list[list[int]]:
    return [tokens for [tokens] in tokens_of(answers(m, given, max_length=LONGEST, **options))]


def steps(m: nn.Module, longest: int = LONGEST) -> Decoding:
    """Return the decoding of this model, which stays in evaluation mode."""
    src, lengths = batch()
    options = {"src_lengths": lengths, "max_length": longest, "src_mask": None, "pad": None, **MARKS}
    with torch.inference_mode():
        return start([m.eval()], check_request(m, src, **options), GenerationConfig(), rows=len(src))


CHANGES = {
    "as it is": lambda m: None,
    "layer norms": lambda m: with_norms(m, nn.LayerNorm),
    "rms norms of torch": lambda m: with_norms(m, nn.RMSNorm),
    "gelu": with_gelu,
    "tied": tied,
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", [0, 2])
def test_tokens_are_those_of_the_model_s_own_loop(seed: int, change: str) -> None:
    m, given = annotated(seed), batch(seed=seed)
    CHANGES[change](m)
    expected = own_loop(m, given)
    assert change == "tied" or len({tuple(tokens) for tokens in expected}) > 2, "the source decides nothing"
    for fast in (False, True):
        if fast:
            tfast.accelerate(m)
        assert isinstance(steps(m), CachedDecoding if fast else UncachedDecoding)
        for cache in (True, False) if fast else (True,):
            assert said(m, given, cache=cache) == expected


def test_a_step_of_the_accelerated_model_is_one_call_of_the_extension() -> None:
    if not extension.load():
        pytest.skip("needs the extension")
    assert steps(accelerated())._session is not None


def test_beams_scores_and_alignments_with_and_without_a_cache() -> None:
    m, given = annotated(2), batch(seed=2)
    options = {"beam": 4, "n_best": 4, "alignments": True, "max_length": LONGEST}
    plain = answers(m, given, **options)
    tfast.accelerate(m)
    for cache in (True, False):
        assert_same(answers(m, given, cache=cache, **options), plain)
    beams = answers(m, given, beam=4, n_best=4, length_penalty=0.0)
    assert all(h.log_prob <= 0.0 for hypotheses in beams for h in hypotheses)


def test_the_modules_alone_are_enough() -> None:
    m, given = annotated(), batch()
    expected = said(m, given)
    alone = NoMethods(*m.children())
    assert alone.encode is None and alone.decode is None
    assert said(alone, given) == expected
    tfast.accelerate(alone)
    assert isinstance(steps(alone), CachedDecoding)
    assert said(alone, given) == expected


def test_a_decode_that_does_more_is_called_at_every_step() -> None:
    m, given = annotated(2, SaysMore), batch(seed=2)
    expected = own_loop(m, given)
    assert expected != said(annotated(2), given), "its decode changes nothing"
    tfast.accelerate(m)
    assert isinstance(steps(m), UncachedDecoding)
    assert said(m, given) == expected


def test_past_its_table_the_model_speaks_for_itself() -> None:
    m = accelerated()
    assert isinstance(steps(m, longest=50), CachedDecoding)  # as many positions as the table has
    assert isinstance(steps(m, longest=51), UncachedDecoding)


def test_nothing_of_the_model_changes() -> None:
    m = accelerated()
    before, state = {k: v.clone() for k, v in m.state_dict().items()}, torch.get_rng_state()
    m.decoder.layers[0].feed_forward.eval()
    modes = [part.training for part in m.modules()]
    said(m, batch())
    assert [part.training for part in m.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in m.state_dict().items())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hw.Annotated(VOCAB, D, 4, 48, 1), r"Annotated\.encoder is a ModuleList, which cannot be called"),
        (lambda: annotated(kind=OtherArguments), r"OtherArguments\.decode takes \('tgt', 'memory', 'tgt_mask'\)"),
        (lambda: nn.ModuleDict({"generator": nn.Linear(2, 2)}), "generator, like The Annotated Transformer"),
    ],
    ids=["lists", "arguments", "generator alone"],
)
def test_what_cannot_be_decoded_is_named(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfast.greedy(make(), torch.ones(1, 3).long(), **MARKS)


def test_a_token_outside_the_generator_s_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=f"eos is token 99, outside the model's target vocabulary of {VOCAB}"):
        tfast.greedy(annotated(), torch.ones(1, 3).long(), bos=BOS, eos=99)
