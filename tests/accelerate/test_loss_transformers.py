"""accelerate's fused loss in the models of Hugging Face transformers: losses and gradients are those of eager ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate import lazy_logits, output_layer
from transformer_fast.accelerate.lazy_logits import LazyLogits

transformers = pytest.importorskip("transformers")

V = 61


@pytest.fixture(autouse=True)
def _small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "WORTH_IT", 1)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each fused loss."""
    calls: list[dict[str, Any]] = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(options)
        return tfast.linear_cross_entropy(*args, **options)

    monkeypatch.setattr(lazy_logits.ops, "linear_cross_entropy", counted)
    return calls


def seq2seq(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, decoder_start_token_id=1, encoder_ffn_dim=32, decoder_ffn_dim=32,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    kind = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return getattr(transformers, name + kind)(config)


def bert(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=32, pad_token_id=0,
        **options,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForMaskedLM")(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5(tied: bool = True) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        tie_word_embeddings=tied, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def accelerated(eager: nn.Module) -> nn.Module:
    """A copy with the fused loss alone, so that everything else computes the same."""
    fast = copy.deepcopy(eager)
    assert [row.now for row in tfast.accelerate(fast, fused_loss=True).swapped].count("fused loss") == 1
    for module, original in zip(fast.modules(), eager.modules(), strict=True):
        if type(module) is not output_layer.OutputLayer:
            module.__class__ = original.__class__
        if hasattr(original, "config"):  # attention is chosen there
            module.config = original.config
    return fast


def ids() -> Tensor:
    return torch.randint(3, V, (3, 8))


def masked(some: Tensor) -> Tensor:
    labels = torch.full_like(some, -100)
    labels[:, 2::5] = some[:, 2::5]
    return labels


def padded(some: Tensor) -> Tensor:
    some = some.clone()
    some[0, 5:] = -100
    return some


def text() -> dict[str, Tensor]:
    some = ids()
    return {"input_ids": some, "labels": padded(some)}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": ids(), "labels": padded(ids())}


def mlm() -> dict[str, Tensor]:
    some = ids()
    return {"input_ids": some, "labels": masked(some)}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(3, 80, 32, dtype=torch.float64), "labels": padded(ids())}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "Marian": (lambda: seq2seq("Marian"), pairs),
    "BART": (lambda: seq2seq("Bart"), pairs),
    "T5": (t5, pairs),
    "T5 untied": (lambda: t5(tied=False), pairs),
    "GPT-2": (gpt2, text),
    "Llama": (llama, text),
    "BERT": (lambda: bert("Bert"), mlm),
    "RoBERTa": (lambda: bert("Roberta"), mlm),
    "Whisper": (
        lambda: seq2seq(
            "Whisper", max_source_positions=16, max_target_positions=32, suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        speech,
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS, ids=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Callable[[], dict[str, Tensor]]]:
    """An eager model, an accelerated copy, and what makes batches."""
    make, batch = MODELS[request.param]
    eager = make().double().train()
    for name, buffer in eager.named_buffers():
        if name == "final_logits_bias":
            buffer.copy_(torch.linspace(-1, 1, V))
    return eager, accelerated(eager), batch


def compare(eager: nn.Module, fast: nn.Module) -> None:
    """Models of one stack convert their logits to float32 before the loss, also those in float64."""
    tolerances = {"rtol": 1e-9, "atol": 1e-13} if eager.config.is_encoder_decoder else {"rtol": 1e-5, "atol": 1e-7}
    expected = {name: p.grad for name, p in eager.named_parameters()}
    actual = {name: p.grad for name, p in fast.named_parameters()}
    assert sum(g is not None for g in expected.values()) > 5
    torch.testing.assert_close(actual, expected, **tolerances)


def test_gradients_over_two_batches(case: Any, fused: list[Any]) -> None:
    eager, fast, batch = case
    for _ in range(2):
        given = batch()
        expected, actual = eager(**given), fast(**given)
        assert type(actual.logits) is LazyLogits and not actual.logits.node.is_read()
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
        (expected.loss / 2).backward()
        (actual.loss / 2).backward()
        assert not actual.logits.node.is_read()
        torch.testing.assert_close(actual.logits.detach(), expected.logits.detach(), rtol=1e-9, atol=1e-12)
    assert len(fused) == 2
    compare(eager, fast)


def test_a_loss_of_one_s_own(case: Any, fused: list[Any]) -> None:
    eager, fast, batch = case
    given = batch()
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    losses = []
    for model in (eager, fast):
        labels = given["labels"]
        logits = model(**given).logits
        losses.append(loss_fn(logits.view(-1, logits.size(-1)), labels.view(-1)))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    assert [options["label_smoothing"] for options in fused] == [0.0, 0.1]
    compare(eager, fast)


def test_evaluation_and_generation(case: Any, fused: list[Any]) -> None:
    eager, fast, batch = case
    given = batch()
    with torch.no_grad():
        assert type(fast(**given).logits) is Tensor
    outputs = [model.eval()(**given) for model in (eager, fast)]
    assert type(outputs[1].logits) is Tensor
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, rtol=0, atol=0)
    if eager.can_generate():
        fast.train()  # generate() computes without gradients in training too
        name = next(name for name in given if name.startswith("input"))
        texts = [model.generate(given[name], max_new_tokens=4, do_sample=False) for model in (eager, fast)]
        assert torch.equal(texts[0], texts[1])
    assert not fused


def test_steps_with_the_number_of_items(fused: list[Any]) -> None:
    """As transformers.Trainer counts them over gradient accumulation, and with logits that are read after the step."""
    eager = gpt2().double().train()
    fast = accelerated(eager)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (eager, fast)]
    for _ in range(3):
        batches = [text(), text()]
        items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
        last = []
        for model, optimizer in zip((eager, fast), optimizers):
            for given in batches:
                outputs = model(**given, num_items_in_batch=items)
                outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last.append(outputs.logits.argmax(-1))
        assert torch.equal(last[0], last[1])
    assert {options["reduction"] for options in fused} == {"sum"} and len(fused) == 6
    for a, b in zip(eager.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_bfloat16(fused: list[Any]) -> None:
    eager = gpt2().to(torch.bfloat16).train()
    fast, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    head = next(row for row in tfast.accelerate(fast, fused_loss=True).rows if row.path == "lm_head")
    assert head.now == "fused loss"
    given = text()
    losses = [model(**given).loss for model in (eager, fast, exact)]
    for loss in losses:
        loss.backward()
    assert len(fused) == 1 and losses[1].dtype == losses[0].dtype == torch.float32
    grads = [model.lm_head.weight.grad.double() for model in (eager, fast, exact)]
    errors = [float((grad - grads[2]).abs().max()) for grad in grads]
    assert errors[1] <= 2 * errors[0]
    assert abs((losses[1] - losses[2]).item()) <= 2 * abs((losses[0] - losses[2]).item()) + 1e-2


def test_a_head_with_an_adapter_is_left_to_it(fused: list[Any]) -> None:
    """Low-rank adaptation puts a module of its own around the head, before or after accelerate."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(16, 2, bias=False).double(), nn.Linear(2, V, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.b(self.a(x))

    for accelerate_first in (False, True):
        eager = gpt2().double().train()
        fast = copy.deepcopy(eager)
        if accelerate_first:
            tfast.accelerate(fast, fused_loss=True)
        eager.lm_head = Adapter(eager.lm_head)
        fast.lm_head = Adapter(fast.lm_head)
        fast.lm_head.load_state_dict(eager.lm_head.state_dict())
        if not accelerate_first:
            assert "fused loss" not in {row.now for row in tfast.accelerate(fast, fused_loss=True).rows}
        given = text()
        for model in (eager, fast):
            model(**given).loss.backward()
        compare(eager, fast)
    assert not fused


def test_gradient_checkpointing(fused: list[Any]) -> None:
    """Of the layers, as the library does it: the head is outside, and stays fused."""
    eager = gpt2().double().train()
    fast = accelerated(eager)
    given = text()
    for model in (eager, fast):
        model.gradient_checkpointing_enable()
        model(**given).loss.backward()
    assert len(fused) == 1
    compare(eager, fast)


def test_label_smoothing_of_the_trainer(fused: list[Any]) -> None:
    """It takes log_softmax of the logits by itself."""
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
    eager = seq2seq("Bart").double().train()
    fast = accelerated(eager)
    given = pairs()
    decoder = eager.prepare_decoder_input_ids_from_labels(given["labels"])
    losses = [smoother(m(given["input_ids"], decoder_input_ids=decoder), given["labels"]) for m in (eager, fast)]
    for loss in losses:
        loss.backward()
    assert not fused
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    compare(eager, fast)


def test_without_the_loss_module(fused: list[Any]) -> None:
    """A loop that shifts by itself."""
    eager = gpt2().double().train()
    fast = accelerated(eager)
    given = text()
    for model in (eager, fast):
        logits = model(given["input_ids"]).logits[:, :-1]
        F.cross_entropy(logits.reshape(-1, V), given["labels"][:, 1:].flatten(), reduction="sum").backward()
    assert len(fused) == 1
    compare(eager, fast)
