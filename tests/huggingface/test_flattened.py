"""Flattened batches: one row of several sequences equals each sequence alone, for every language model that can."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from accelerated import from_one_seed
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.huggingface import interface

transformers = pytest.importorskip("transformers", "5")
import huggingface_models as models  # noqa: E402

LENGTHS = (3, 7, 1, 5)
STARTS = torch.tensor([0, 3, 10, 11, 16], dtype=torch.int32)
BOUNDS = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 7, "max_length_k": 7}
FIRST = 2  # position of the first token, as RoBERTa counts
TRIED = ["BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM", "LlamaForCausalLM", "MistralForCausalLM",
         "GPT2LMHeadModel", "Gemma3ForCausalLM"]  # fmt: skip


def build(case: models.Case, implementation: str = "eager") -> Any:
    """Make a model with weights that leave no score at zero."""
    return models.scattered(models.make(case, implementation), std=0.3)


def ours(plain: nn.Module, how: str) -> nn.Module:
    """Return a copy with our attention: by its name, or by accelerate of a model with another name."""
    model = copy.deepcopy(plain)
    model.set_attn_implementation(how.removeprefix("accelerated "))
    if how.startswith("accelerated"):
        tfast.accelerate(model)
    return model


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, models.VOCABULARY, (1, n), generator=generator) for n in LENGTHS]


def places(n: int) -> Tensor:
    return torch.arange(FIRST, FIRST + n)[None]


def flat() -> dict[str, Tensor]:
    return {"input_ids": torch.cat(sentences(), 1), "position_ids": torch.cat([places(n) for n in LENGTHS], 1)}


def alone(model: nn.Module) -> Tensor:
    """Logits of the plain model, sentence by sentence: (1, T, V)."""
    return torch.cat([model(input_ids=ids, position_ids=places(ids.shape[1])).logits for ids in sentences()], 1)


def by_a_dense_mask(model: Any) -> Tensor:
    """Logits of the plain model for the flattened batch, with the mask that keeps the sentences apart."""
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = numbers[:, None] == numbers
    if (
        getattr(model.config, "is_decoder", False)
        or "CausalLM" in type(model).__name__
        or "LMHead" in type(model).__name__
    ):
        seen = seen.tril()
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(**flat(), attention_mask=mask).logits


@pytest.mark.parametrize("given", ["bounds", "bounds and weights"])
@pytest.mark.parametrize("how", ["transformer_fast", "accelerated sdpa", "accelerated eager"])
@pytest.mark.parametrize("name", TRIED)
def test_a_flattened_batch_equals_each_sentence_alone(name: str, how: str, given: str) -> None:
    plain = build(models.named(name))
    model = ours(plain, how)
    call = flat() | (BOUNDS if "bounds" in given else {}) | {"output_attentions": "weights" in given}
    generator = torch.Generator().manual_seed(5)
    expected = alone(plain)
    weight = torch.randn(expected.shape, generator=generator)
    (expected * weight).sum().backward()
    out = model(**call).logits
    (out * weight).sum().backward()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    for (which, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, atol=2e-4, rtol=1e-3, msg=which)


@pytest.mark.slow("every language model of transformers")
@pytest.mark.filterwarnings("ignore")
def test_every_model_that_a_dense_mask_keeps_apart() -> None:
    """Models that mix tokens otherwise, by convolutions or by states, are kept apart by no attention.

    A model whose text layers compute attention by themselves, or that makes a padding mask of its own, gets what the
    plain model gives it.
    """
    apart: list[str] = []
    wrong = []
    for case in models.language_models():
        try:
            plain = build(case)
            if "position_ids" not in inspect.signature(plain.forward).parameters:
                continue
            if not any(interface.calls_the_interface(module) for module in plain.modules()):
                continue
            expected = alone(plain)
            if not torch.allclose(by_a_dense_mask(plain), expected, atol=1e-3, rtol=1e-3):
                continue
            model = ours(plain, "transformer_fast")
            out = model(**flat(), **BOUNDS).logits
        except Exception:  # not made, refused by name, or without masks of four dimensions
            continue
        if torch.allclose(out, expected, atol=1e-3, rtol=1e-3):
            apart.append(case.name)
        elif not torch.allclose(out, plain(**flat()).logits, atol=1e-3, rtol=1e-3):
            wrong.append(case.name)
    assert not wrong, wrong
    assert len(apart) >= 80, apart


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_dropout_is_that_of_the_padded_batch(name: str) -> None:
    """Query i and key j of sentence b draw the same, flattened or padded."""
    option = {"BertForMaskedLM": "attention_probs_dropout_prob", "LlamaForCausalLM": "attention_dropout"}[name]
    model = models.scattered(models.make(models.named(name), "transformer_fast", **{option: 0.3}), std=0.3).train()
    keep = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.zeros(keep.shape, dtype=torch.int64).masked_scatter(keep, flat()["input_ids"][0])
    positions = places(max(LENGTHS)).expand(len(LENGTHS), -1)
    padded, flattened = from_one_seed(
        lambda: model(input_ids=ids, attention_mask=keep.long(), position_ids=positions).logits,
        lambda: model(**flat(), **BOUNDS).logits,
    )
    torch.testing.assert_close(flattened[0], padded[keep], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_compiled(name: str) -> None:
    plain = build(models.named(name))
    compiled = torch.compile(ours(plain, "transformer_fast"), backend="aot_eager", fullgraph=True)
    out = compiled(**flat(), **BOUNDS, use_cache=False).logits
    torch.testing.assert_close(out, alone(plain), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_positions_alone_mean_what_they_mean_in_the_plain_model(name: str) -> None:
    """Images or padding with equal positions after a text are no sequences; a decoder's mask is that of
    transformers."""
    plain = build(models.named(name))
    plain.set_attn_implementation("sdpa")
    model, ids = ours(plain, "accelerated sdpa"), flat()["input_ids"]
    skipping = torch.cat([torch.arange(8), torch.arange(20, 28)])[None]
    equal = torch.cat([torch.arange(8), torch.zeros(8, dtype=torch.int64)])[None]
    for positions in (skipping, torch.zeros_like(skipping), equal, flat()["position_ids"]):
        for mask in ({}, {"attention_mask": torch.ones_like(ids)}):
            call = {"input_ids": ids, "position_ids": positions, "use_cache": False, **mask}
            call = call if "Llama" in name else {key: call[key] for key in call if key != "use_cache"}
            torch.testing.assert_close(model(**call).logits, plain(**call).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("weights", [False, True])
def test_what_cannot_be_is_refused_by_name(weights: bool) -> None:
    bert = build(models.named("BertForMaskedLM"), "transformer_fast")
    for wrong in ([0, 3, 10], [2, 16], [0, 10, 3, 16], [0, -3, 16], [16], []):
        starts = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"BertSelfAttention: cu_seq_lens_q .* rise from 0"):
            bert(**flat(), **BOUNDS | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}, output_attentions=weights)
    for kind in (STARTS.tolist(), STARTS.float(), STARTS[None], None):
        with pytest.raises(TypeError, match="BertSelfAttention: cu_seq_lens_q must be an integer tensor"):
            bert(**flat(), **BOUNDS | {"cu_seq_lens_q": kind})
    with pytest.raises(ValueError, match=r"BertSelfAttention: cu_seq_lens_q .* 2 rows of 8 tokens"):
        bert(input_ids=flat()["input_ids"].view(2, 8), **BOUNDS)
    with pytest.raises(ValueError, match="must be equal"):
        bert(**flat(), **BOUNDS | {"cu_seq_lens_k": STARTS + 1})
    bart = build(models.named("BartForConditionalGeneration"), "transformer_fast")
    with pytest.raises(NotImplementedError, match=r"BartAttention: cu_seq_lens_q .* cross-attention"):
        bart(input_ids=flat()["input_ids"], decoder_input_ids=flat()["input_ids"], **BOUNDS)


def test_the_collator_of_transformers() -> None:
    """A step with the collator's batch as it is, labels included."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": ids[0]} for ids in sentences()])
    plain = build(models.named("LlamaForCausalLM"))
    loss = ours(plain, "accelerated sdpa")(**batch, use_cache=False).loss
    logits = torch.cat([plain(input_ids=ids).logits for ids in sentences()], 1)
    labels = batch["labels"][0, 1:]
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits[0, :-1], labels), atol=1e-5, rtol=1e-5)
