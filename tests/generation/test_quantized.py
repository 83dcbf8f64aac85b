"""Generation with quantised weights: against linear layers of the reference, for any batch and threads; refusals."""

from __future__ import annotations

import copy
import dataclasses

import handwritten as hw
import pytest
import torch
from helpers import assert_as_exact_as_eager
from tiny_transformer import EOS, MARKS, VOCAB, batch, tiny
from torch import Tensor, nn

from transformer_fast import GenerationConfig, Transformer, accelerate, extension, generate
from transformer_fast.generation import quantization, steps
from transformer_fast.generation.continuous import ContinuousBatch, Sentence
from transformer_fast.generation.forms import form_of
from transformer_fast.generation.weights import QuantizedLinear, StepLinear, WeightLayout
from transformer_fast.reference.layers import Transformer as ReferenceTransformer
from transformer_fast.reference.quantized_linear import bf16_linear, int8_linear

CONFIGS = [
    {},
    {"beam": 4, "n_best": 2},
    {"beam": 3, "slots": "keep", "early_stop": "now"},
    {"sample": True, "n_best": 2, "seed": 5},
    {"beam": 3, "alignments": True},  # by the modules, not in one call
]


REFERENCES = {"int8": int8_linear, "bf16": bf16_linear}


class ReferenceLinear(nn.Module):
    """A linear layer as the reference computes it with quantised weights."""

    def __init__(self, linear: nn.Linear, quantize: str) -> None:
        super().__init__()
        self.linear, self.out_features, self.quantize = linear, linear.out_features, quantize

    def forward(self, x: Tensor) -> Tensor:
        return REFERENCES[self.quantize](x, self.linear.weight, self.linear.bias)


def with_reference_linears(model: nn.Module, quantize: str = "int8") -> nn.Module:
    """A copy of a model whose linear layers are those of the reference."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        if not isinstance(module, ReferenceLinear):
            for name, child in module.named_children():
                if type(child) is nn.Linear:
                    setattr(module, name, ReferenceLinear(child, quantize))
    return model


def answers(model: nn.Module, src: Tensor, lengths: Tensor, **options: object) -> list[list[list[int]]]:
    found = generate(model, src, src_lengths=lengths, **MARKS, config=GenerationConfig(**options))
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


@pytest.mark.parametrize("form", [{}, {"norm_first": False, "activation": "gelu"}, {"tie_weights": True}], ids=str)
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_linear_layers_are_those_of_the_reference(options: dict, form: dict) -> None:
    model, (src, lengths) = tiny(1, **form), batch()
    given = {"src_lengths": lengths, **MARKS}
    ours = generate(model, src, **given, config=GenerationConfig(quantize="int8", **options))
    # The reference decodes without a cache, so its sums of attention round differently.
    expected = generate(with_reference_linears(model), src, **given, config=GenerationConfig(cache=False, **options))
    for hypotheses, those in zip(ours, expected, strict=True):
        assert [h.tokens for h in hypotheses] == [h.tokens for h in those]
        for hypothesis, other in zip(hypotheses, those, strict=True):
            assert hypothesis.log_prob == pytest.approx(other.log_prob, abs=0.05)


@pytest.mark.parametrize("options", CONFIGS[:3], ids=str)
def test_the_same_in_any_batch_and_with_any_threads(options: dict) -> None:
    model, (src, lengths) = tiny(2), batch(12, 9)
    options = {"quantize": "int8", **options}
    together = answers(model, src, lengths, **options)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            alone = [answers(model, src[i : i + 1, :n], lengths[i : i + 1], **options) for i, n in enumerate(lengths)]
            assert [one for [one] in alone] == together
    finally:
        torch.set_num_threads(threads)
    sentences = [Sentence(ids[:n]) for ids, n in zip(src.tolist(), lengths.tolist(), strict=True)]
    found = dict(ContinuousBatch(model, sentences, config=GenerationConfig(**options), tokens=60, **MARKS))
    assert [[h.tokens for h in found[index]] for index in range(12)] == together


def test_every_linear_layer_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fused step and by modules; the encoder's, and that of the logits, too."""
    for module in ("layers.linear", "generation.weights"):
        monkeypatch.setattr(f"transformer_fast.{module}.linear", None)
    packed: list[QuantizedLinear] = []
    operand = QuantizedLinear.operand
    monkeypatch.setattr(QuantizedLinear, "operand", lambda self, rows: packed.append(self) or operand(self, rows))
    model, (src, lengths) = tiny(), batch()
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(steps, "fused_step", lambda *_: None)
        packed.clear()
        assert answers(model, src, lengths, quantize="int8", max_length=3)
        quantised = {id(weight) for one in packed for weight in one._weights}
        assert quantised == {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}


def test_the_model_is_as_it_was() -> None:
    model, (src, lengths) = tiny(), batch()
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    exact = answers(model, src, lengths, beam=3)
    answers(model, src, lengths, beam=3, quantize="int8")
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert answers(model, src, lengths, beam=3) == exact
    with torch.no_grad():  # and the next call quantises anew
        model.out.bias[EOS] = 1e4
    assert answers(model, src, lengths, quantize="int8") == [[[]]] * len(src)


def test_bf16() -> None:
    model, (src, lengths) = tiny(1), batch()
    if extension.build_info().get("instruction_set") != "avx512_bf16":
        with pytest.raises(ValueError, match="quantize='bf16' cannot be: it needs AVX512-BF16, and the kernels in use"):
            answers(model, src, lengths, quantize="bf16")
        return
    for options in CONFIGS:
        expected = answers(with_reference_linears(model, "bf16"), src, lengths, cache=False, **options)
        assert answers(model, src, lengths, quantize="bf16", **options) == expected


def test_an_ensemble() -> None:
    models, (src, lengths) = [tiny(1), tiny(2)], batch()
    expected = answers([with_reference_linears(m) for m in models], src, lengths, beam=2, cache=False)
    assert answers(models, src, lengths, beam=2, quantize="int8") == expected


def test_the_annotated_transformer_keeps_its_encoder() -> None:
    torch.manual_seed(0)
    model = hw.make_model(VOCAB, VOCAB, 2, 32, 48, 4).eval()
    accelerate(model)
    src, lengths = batch()
    assert quantization.apply(form_of(model), WeightLayout("int8")).model is model
    assert len(answers(model, src, lengths, quantize="int8", max_length=5)) == len(src)


def test_what_cannot_be() -> None:
    src, lengths = batch()

    def refused(model: nn.Module, **options: object) -> str:
        with pytest.raises(ValueError) as raised:
            answers(model, src, lengths, **options)
        return str(raised.value)

    assert refused(tiny(), quantize="int4") == """quantize must be None, "int8" or "bf16", got 'int4'"""
    assert refused(tiny(), quantize=8) == 'quantize must be None, "int8" or "bf16", got 8'
    assert "expected cache True, got False" in refused(tiny(), quantize="int8", cache=False)
    for dtype in (torch.bfloat16, torch.float64):
        reason = f"fp32 weights on a CPU, and these are {dtype} on cpu"
        assert reason in refused(tiny(dtype=dtype), quantize="int8")
    uncached = ReferenceTransformer(VOCAB, VOCAB, 32, 1, 4, 0.0, d_ff=48).eval()
    assert "no cached decoder for this model" in refused(uncached, quantize="int8")
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in refused(tiny(), quantize="int8")


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "obstacle", lambda: "no kernels here; run `make setup`")
    with pytest.raises(ValueError, match="quantize='int8' cannot be: no kernels here; run `make setup`"):
        answers(tiny(), *batch(), quantize="int8")


def test_sizes_at_which_every_unit_of_work_is_cut() -> None:
    """Wider than a panel, deeper than a group, more rows than one sum takes."""
    torch.manual_seed(3)
    model = Transformer(70, 70, 36, 1, 3, 0.1, d_ff=50, norm="layer").eval()
    with torch.no_grad():
        model.out.weight.mul_(8)
    src, lengths = torch.randint(2, 70, (30, 11)), torch.randint(1, 12, (30,))
    expected = answers(with_reference_linears(model), src, lengths, max_length=6, cache=False)
    assert answers(model, src, lengths, max_length=6, quantize="int8") == expected


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_kept_weights_follow_the_model(quantize: str | None) -> None:
    model, (src, lengths) = tiny().requires_grad_(False), batch()
    given = {"src_lengths": lengths, **MARKS}
    config = GenerationConfig(beam=3, quantize=quantize)
    kept = dataclasses.replace(config, keep_weights=True)
    answers = []
    for other in tiny(1), tiny(2):
        model.load_state_dict(other.state_dict())
        answers.append(generate(model, src, **given, config=config))
        for _ in range(2):
            found = generate(model, src, **given, config=kept)
            for one, other in zip(found, answers[-1], strict=True):
                assert [h.tokens for h in one] == [h.tokens for h in other]
                assert [h.score for h in one] == pytest.approx([h.score for h in other], rel=1e-5)
    assert answers[0] != answers[1]
    with pytest.raises(ValueError, match=r"keep_weights=True is for models that are no longer trained"):
        generate(tiny(), src, **given, config=kept)


def test_kept_weights_of_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are laid out once, and it computes as exactly with them; a model of another type stays as it is."""
    rearranged = []
    copied = StepLinear._copied
    monkeypatch.setattr(
        StepLinear,
        "_copied",
        lambda self, layout, copy_of: copied(self, layout, lambda: rearranged.append(layout) or copy_of()),
    )
    model, (src, _) = tiny().requires_grad_(False), batch()
    for _ in range(2):
        encoder = quantization.apply(form_of(model), WeightLayout(keep=True)).model.encoder
        wide = copy.deepcopy(model.encoder).double()
        found, plain, exact = (one(src, None) for one in (encoder, model.encoder, wide))
        assert encoder is not model.encoder
        assert_as_exact_as_eager(found, plain, exact)
    linears = sum(isinstance(module, nn.Linear) for module in model.encoder.modules())
    assert len(rearranged) in (0, linears)  # none without oneDNN
    double = tiny().double().requires_grad_(False)
    assert quantization.apply(form_of(double), WeightLayout(keep=True)).model is double
