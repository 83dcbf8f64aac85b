"""Generation from The Annotated Transformer's model, whose generator is a module of its own, against its own loop."""

from __future__ import annotations

from collections.abc import Callable

import handwritten as hw
import handwritten_rms as rms
import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import GenerationConfig, extension
from transformer_fast.generation.decoding import Decoding, check_request
from transformer_fast.generation.steps import CachedStep, UncachedStep

BOS, EOS, VOCAB, D, LONGEST = 0, 1, 30, 32, 24


class NoMethods(hw.EncoderDecoder):
    """The five modules alone, called by forward."""

    encode = decode = None

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor | None, tgt_mask: Tensor | None) -> Tensor:
        return self.decoder(self.tgt_embed(tgt), self.encoder(self.src_embed(src), src_mask), src_mask, tgt_mask)


class SaysMore(hw.EncoderDecoder):
    """A decode that does more than the annotated text's."""

    def decode(self, memory: Tensor, src_mask: Tensor | None, tgt: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return super().decode(memory, src_mask, tgt, tgt_mask) + torch.linspace(-3, 3, D)


class OtherArguments(hw.EncoderDecoder):
    def decode(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None) -> Tensor:
        return super().decode(memory, None, tgt, tgt_mask)


def annotated(seed: int = 0, kind: type[nn.Module] = hw.EncoderDecoder) -> nn.Module:
    """A model whose choices are far from ties, and depend on what was read and said."""
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


def with_layer_norms(m: nn.Module) -> None:
    for layer in (*m.encoder.layers, *m.decoder.layers):
        for sublayer in layer.sublayer:
            sublayer.norm = nn.LayerNorm(D)
    m.encoder.norm, m.decoder.norm = nn.LayerNorm(D), nn.LayerNorm(D)


def with_llama_norms(m: nn.Module) -> None:
    rms.with_rms(m)


def with_torch_s_rms_norms(m: nn.Module) -> None:
    rms.with_rms(m, nn.RMSNorm)


def with_gelu(m: nn.Module) -> None:
    for layer in m.decoder.layers:
        layer.feed_forward = hw.BertFeedForward(D, 48)


def tied(m: nn.Module) -> None:
    m.generator.proj.weight = m.tgt_embed[0].lut.weight = m.src_embed[0].lut.weight


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (6, 7), generator=generator), torch.randint(1, 8, (6,), generator=generator)


def own_loop(m: nn.Module, src: Tensor, lengths: Tensor) -> list[list[int]]:
    """``greedy_decode`` of the annotated text, a sentence at a time."""
    found = []
    for ids, length in zip(src, lengths.tolist(), strict=True):
        ids = ids[None, :length]
        mask = torch.ones(1, 1, length, dtype=torch.bool)
        memory, ys = m.encode(ids, mask), torch.full((1, 1), BOS)
        for _ in range(LONGEST):
            out = m.decode(memory, mask, ys, tfast.layers.subsequentmask(ys.shape[1]))
            ys = torch.cat((ys, m.generator(out[:, -1]).argmax(dim=1, keepdim=True)), dim=1)
            if ys[0, -1] == EOS:
                break
        found.append([token for token in ys[0, 1:].tolist() if token != EOS])
    return found


def given(lengths: Tensor) -> dict:
    return {"src_lengths": lengths, "bos": BOS, "eos": EOS, "max_length": LONGEST}


def steps(m: nn.Module, src: Tensor, lengths: Tensor, longest: int = LONGEST) -> object:
    """What takes the steps of this model, which is left in evaluation mode."""
    m.eval()
    options = {**given(lengths), "max_length": longest, "src_mask": None, "pad": None}
    with torch.inference_mode():
        return Decoding([m], check_request(m, src, **options), GenerationConfig(), rows=len(src))._steps[0]


CHANGES = [None, with_layer_norms, with_llama_norms, with_torch_s_rms_norms, with_gelu, tied]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: getattr(f, "__name__", "-"))
@pytest.mark.parametrize("seed", [0, 2])
def test_tokens_are_those_of_the_model_s_own_loop(seed: int, change: Callable[[nn.Module], None] | None) -> None:
    m, (src, lengths) = annotated(seed), batch(seed)
    if change is not None:
        change(m)
    m.eval()
    with torch.no_grad():
        expected = own_loop(m, src, lengths)
    assert change is tied or len({tuple(tokens) for tokens in expected}) > 2, "the source decides nothing"
    for fast in (False, True):
        if fast:
            tfast.accelerate(m)
        assert isinstance(steps(m, src, lengths), CachedStep if fast else UncachedStep)
        for cache in (True, False):
            assert tfast.greedy(m, src, cache=cache, **given(lengths)) == expected


def test_a_step_of_the_accelerated_model_is_one_call_of_the_extension() -> None:
    if not extension.load():
        pytest.skip("needs the extension")
    m = annotated()
    tfast.accelerate(m)
    assert steps(m, *batch())._fused is not None


def test_beams_scores_and_alignments_with_and_without_a_cache() -> None:
    m, (src, lengths) = annotated(2), batch(2)
    options = {"beam": 4, "n_best": 4, "alignments": True, "max_length": LONGEST}
    marks = {"src_lengths": lengths, "bos": BOS, "eos": EOS}
    plain = tfast.generate(m, src, config=GenerationConfig(**options), **marks)
    tfast.accelerate(m)
    for cache in (True, False):
        got = tfast.generate(m, src, config=GenerationConfig(cache=cache, **options), **marks)
        for ours, theirs in zip(got, plain, strict=True):
            assert [h.tokens for h in ours] == [h.tokens for h in theirs]
            for a, b in zip(ours, theirs, strict=True):
                assert a.log_prob == pytest.approx(b.log_prob, abs=1e-3)
                torch.testing.assert_close(a.alignment, b.alignment, atol=1e-4, rtol=1e-3)
    beams = tfast.beam_search(m, src, beam=4, n_best=4, length_penalty=0.0, **given(lengths))
    assert all(h.log_prob <= 0.0 for hypotheses in beams for h in hypotheses)


def test_the_modules_alone_are_enough() -> None:
    m, (src, lengths) = annotated(0), batch(0)
    expected = tfast.greedy(m, src, **given(lengths))
    alone = NoMethods(*m.children())
    for name in ("encode", "decode"):
        assert getattr(alone, name) is None
    assert tfast.greedy(alone, src, **given(lengths)) == expected
    tfast.accelerate(alone)
    assert isinstance(steps(alone, src, lengths), CachedStep)
    assert tfast.greedy(alone, src, **given(lengths)) == expected


def test_a_decode_that_does_more_is_called_at_every_step() -> None:
    m, (src, lengths) = annotated(2, SaysMore).eval(), batch(2)
    with torch.no_grad():
        expected = own_loop(m, src, lengths)
    assert expected != tfast.greedy(annotated(2), src, **given(lengths)), "its decode changes nothing"
    tfast.accelerate(m)
    assert isinstance(steps(m, src, lengths), UncachedStep)
    assert tfast.greedy(m, src, **given(lengths)) == expected


@pytest.mark.parametrize("name", ["decoder", "decoder.layers.1", "decoder.layers.0.sublayer.2.norm", "tgt_embed.0.lut"])
def test_a_hook_is_not_missed(name: str) -> None:
    m, (src, lengths) = annotated(), batch()
    tfast.accelerate(m)
    expected, seen = tfast.greedy(m, src, **given(lengths)), []
    m.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert isinstance(steps(m, src, lengths), UncachedStep)
    assert tfast.greedy(m, src, **given(lengths)) == expected and seen


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.decoder.layers[0], "self_attn", hw.AnnotatedAttention(4, D)),
        lambda m: setattr(m.decoder.layers[1], "forward", m.decoder.layers[1].forward),
        lambda m: m.tgt_embed.append(nn.Identity()),
        lambda m: m.decoder.layers.append(hw.AnnotatedDecoderLayer(
            D, hw.AnnotatedAttention(4, D), hw.AnnotatedAttention(4, D), hw.AnnotatedFeedForward(D, 48), 0.1)),
    ],
    ids=["attention", "forward", "embedding", "layer"],
)  # fmt: skip
def test_what_was_changed_since_is_called(change: Callable[[nn.Module], None]) -> None:
    m, (src, lengths) = annotated(), batch()
    tfast.accelerate(m)
    torch.manual_seed(5)
    change(m)
    assert isinstance(steps(m, src, lengths), UncachedStep)
    with torch.no_grad():
        expected = own_loop(m.eval(), src, lengths)
    assert tfast.greedy(m, src, **given(lengths)) == expected


def test_past_its_table_the_model_speaks_for_itself() -> None:
    m, (src, lengths) = annotated(), batch()
    tfast.accelerate(m)
    assert isinstance(steps(m, src, lengths, longest=50), CachedStep)  # as many rows as its table has
    assert isinstance(steps(m, src, lengths, longest=51), UncachedStep)


def test_nothing_of_the_model_changes() -> None:
    m, (src, lengths) = annotated(), batch()
    tfast.accelerate(m)
    before, state = {k: v.clone() for k, v in m.state_dict().items()}, torch.get_rng_state()
    m.decoder.layers[0].feed_forward.eval()
    modes = [part.training for part in m.modules()]
    tfast.greedy(m, src, **given(lengths))
    assert [part.training for part in m.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in m.state_dict().items())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hw.Annotated(VOCAB, D, 4, 48, 1), r"Annotated\.encoder is a ModuleList, which cannot be called"),
        (lambda: annotated(kind=OtherArguments), r"OtherArguments\.decode takes \('tgt', 'memory', 'tgt_mask'\)"),
        (lambda: nn.ModuleDict({"generator": nn.Linear(2, 2)}), "generator, like The Annotated Transformer"),
    ],
    ids=["lists", "arguments", "generator alone"],
)
def test_what_cannot_be_decoded_is_named(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tfast.greedy(make(), torch.ones(1, 3).long(), bos=BOS, eos=EOS)


def test_a_token_outside_the_generator_s_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=f"eos is token 99, outside the model's target vocabulary of {VOCAB}"):
        tfast.greedy(annotated(), torch.ones(1, 3).long(), bos=BOS, eos=99)
