"""Queries whose keys are all blocked, in accelerated models of transformers.

NaN, zeros or the mean: the plain model is the oracle, at every position, for each implementation of attention.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerated import pair
from torch import Tensor

import transformer_fast as tfast

pytest.importorskip("transformers")
import huggingface_models as models

every_implementation = pytest.mark.parametrize("attention", ["eager", "sdpa"])
IDS = torch.arange(3, 15).view(2, 6)


@torch.no_grad()
def check(name: str, attention: str, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    """Compare an accelerated model with the plain one, at every position; return what came out."""
    plain, model, report = pair(models.scattered(models.make(models.named(name), attention, **settings)))
    assert any(row.now and "attn_implementation" in row.now for row in report.rows)
    out = model(**inputs)[0]
    torch.testing.assert_close(out, plain(**inputs)[0], atol=1e-5, rtol=1e-5)
    return out


@every_implementation
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_gradients_where_a_loss_reads_such_a_row(name: str, packed: bool, attention: str) -> None:
    """The first token of a left-padded sentence is predicted at padding. With "eager", which adds its mask, such a row
    passes gradients on to queries and keys; a window makes more such rows."""
    is_gemma = name.startswith("Gemma2")  # which transformers lets have eager attention alone
    settings, attention = ({"sliding_window": 2}, "eager") if is_gemma else ({}, attention)
    plain = models.scattered(models.make(models.named(name), attention, **settings)).train()
    model, results = copy.deepcopy(plain), []
    tfast.accelerate(model, packed=packed)
    mask = torch.tensor([[1] * 6, [0] * 6 if name.startswith("Bert") else [0, 0, 0, 1, 1, 1]])
    for each in (model, plain):
        each(input_ids=IDS, attention_mask=mask, labels=IDS).loss.backward()
        results.append([p.grad for p in each.parameters()])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()) + 1e-7)


@every_implementation
@pytest.mark.parametrize("kind", [torch.bool, torch.float])
def test_a_mask_of_four_axes_with_an_empty_row(kind: torch.dtype, attention: str) -> None:
    """An eager model adds a bool mask, so that True is 1 there; the accelerated one must do the same."""
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[:, :, 2], keep[:, :, :, 4:] = False, False
    mask = keep if kind == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float).min)
    check("BertModel", attention, {"input_ids": IDS, "attention_mask": mask})


@torch.no_grad()
def test_a_bool_mask_of_four_axes_keeps_where_it_is_true() -> None:
    """In our attention; a model with eager attention adds the mask, and does not stay causal."""
    tfast.integrations.transformers.register()
    ids = IDS[:1].repeat(2, 1)
    ids[1, 4:] += 8
    keep, changed = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), {}
    for attention in ("transformer_fast", "sdpa", "eager"):
        model = models.make(models.named("BertModel"), attention)
        first, second = model(input_ids=ids, attention_mask=keep)[0][:, :4]
        changed[attention] = not torch.allclose(first, second, atol=1e-5)
    assert changed == {"transformer_fast": False, "sdpa": False, "eager": True}


@every_implementation
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MarianMTModel"])
def test_the_first_position_of_a_decoder(name: str, attention: str) -> None:
    """The start token is the padding token, and a mask of the padding blocks it: the plain model may see the target."""
    seen = []
    for end in ([7, 8, 9], [10, 11, 12]):
        ids = torch.tensor([[models.PAD, 5, 6, *end]])
        inputs = {"input_ids": IDS[:1], "decoder_input_ids": ids, "decoder_attention_mask": (ids != models.PAD).long()}
        seen.append(check(name, attention, inputs, decoder_start_token_id=models.PAD))
    torch.testing.assert_close(seen[0][:, 1:3], seen[1][:, 1:3], atol=1e-4, rtol=1e-4)
