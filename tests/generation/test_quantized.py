"""Generation with quantised weights: equal in any batch and with any number of threads; quantised layers; refusals.
test_answers.py tests the answers."""

from __future__ import annotations

import contextlib
import copy

import handwritten as hw
import pytest
import torch
from op_calls import on_threads
from tiny_transformer import EOS, VOCAB, answers, batch, by_modules, tiny, tokens_of
from torch import nn

from transformer_fast import accelerate, extension
from transformer_fast.generation import quantization
from transformer_fast.generation.forms import form_of
from transformer_fast.inference.prepacked import PrepackedLinear
from transformer_fast.ops.weight_layout import WeightLayout
from transformer_fast.reference.layers import Transformer as ReferenceTransformer
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.mark.parametrize(
    "options", [{}, {"beam": 4, "n_best": 2}, {"beam": 3, "slots": "keep", "early_stop": "now"}], ids=str
)
def test_the_same_in_any_batch_and_with_any_threads(options: dict) -> None:
    model, (src, lengths) = tiny(2), batch(12, 9)
    options = {"quantize": "int8", **options}
    together = tokens_of(answers(model, (src, lengths), **options))
    for count in (1, 3):
        with on_threads(count):
            each = ((src[i : i + 1, :n], lengths[i : i + 1]) for i, n in enumerate(lengths))
            assert tokens_of([answers(model, one, **options)[0] for one in each]) == together


def test_every_linear_layer_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of the encoder and of the logits are quantised too, in the fused step and by modules."""
    for product in ("layers.linear.product_of", "inference.prepacked.linear"):
        monkeypatch.setattr(f"transformer_fast.{product}", None)
    packed: list[PrepackedLinear] = []
    operand = PrepackedLinear.operand
    monkeypatch.setattr(PrepackedLinear, "operand", lambda self, rows: packed.append(self) or operand(self, rows))
    model = tiny()
    for steps in (contextlib.nullcontext, by_modules):
        packed.clear()
        with steps():
            assert answers(model, batch(), quantize="int8", max_length=3)
        quantised = {id(weight) for one in packed if one.is_int8 for weight in one._weights}
        assert quantised == {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}


def test_the_model_is_as_it_was() -> None:
    model, given = tiny(), batch()
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    exact = answers(model, given, beam=3)
    answers(model, given, beam=3, quantize="int8")
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert answers(model, given, beam=3) == exact
    with torch.no_grad():  # and the next call quantises anew
        model.out.bias[EOS] = 1e4
    assert tokens_of(answers(model, given, quantize="int8")) == [[[]]] * 6


def test_the_annotated_transformer_keeps_its_encoder() -> None:
    torch.manual_seed(0)
    model = hw.make_model(VOCAB, VOCAB, 2, 32, 48, 4).eval()
    accelerate(model)
    assert quantization.apply(form_of(model), WeightLayout("int8")).model is model
    assert len(answers(model, batch(), quantize="int8", max_length=5)) == 6


def test_what_cannot_be() -> None:

    def refused(model: nn.Module, **options: object) -> str:
        with pytest.raises(ValueError) as raised:
            answers(model, batch(), **options)
        return str(raised.value)

    for wrong in ("int4", "bf16", 8):
        assert refused(tiny(), quantize=wrong) == f'quantize must be None or "int8", got {wrong!r}'
    assert "expected cache True, got False" in refused(tiny(), quantize="int8", cache=False)
    for dtype in (torch.bfloat16, torch.float64):
        reason = f"fp32 weights on a CPU, got {dtype} on cpu"
        assert reason in refused(tiny(dtype=dtype), quantize="int8")
    uncached = ReferenceTransformer(VOCAB, VOCAB, 32, 1, 4, 0.0, d_ff=48).eval()
    assert "no cached decoder for this model" in refused(uncached, quantize="int8")
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in refused(tiny(), quantize="int8")


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "obstacle", lambda: "no kernels here; run `make setup`")
    with pytest.raises(ValueError, match="quantize='int8' is not possible: no kernels here; run `make setup`"):
        answers(tiny(), batch(), quantize="int8")


def test_kept_weights_of_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out once, with equal results; a model of another dtype stays as it is."""
    rearranged = []
    copied = PrepackedLinear._in_layout
    monkeypatch.setattr(
        PrepackedLinear,
        "_in_layout",
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
