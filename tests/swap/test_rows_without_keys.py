"""Queries whose keys are all blocked, in accelerated models of transformers.

NaN, zeros or the mean: the plain model is the oracle, at every position, for each implementation of attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
PARTS = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "init_std": 0.3,
    "max_position_embeddings": 16, "pad_token_id": 31, "decoder_start_token_id": 31,
}  # fmt: skip
T5 = {
    "vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "pad_token_id": 0,
    "decoder_start_token_id": 0,
}  # fmt: skip


def make(name: str, attention: str, **config: Any) -> nn.Module:
    """Return a model with random weights of its own seed."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**config, attn_implementation=attention)).eval()


@torch.no_grad()
def check(name: str, attention: str, config: dict[str, Any], inputs: dict[str, Tensor]) -> Tensor:
    """Compare an accelerated model with the plain one, at every position; return what came out."""
    plain, model = make(name, attention, **config), make(name, attention, **config)
    assert any(row.now and "attn_implementation" in row.now for row in tfast.accelerate(model).rows)
    out = model(**inputs)[0]
    torch.testing.assert_close(out, plain(**inputs)[0], atol=1e-5, rtol=1e-5)
    return out


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_sentence_of_padding_alone(attention: str) -> None:
    ids = torch.arange(3, 15).view(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 6])
    check("BertModel", attention, SIZES, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padding_of_a_causal_model(attention: str) -> None:
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.arange(3, 15).view(2, 6), "attention_mask": mask}
    check("LlamaForCausalLM", attention, {**SIZES, "num_key_value_heads": 1}, inputs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float])
def test_a_mask_of_four_axes_with_an_empty_row(kind: torch.dtype, attention: str) -> None:
    """An eager model adds a bool mask, so that True is 1 there; the accelerated one must do the same."""
    keep = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    keep[:, :, 2], keep[:, :, :, 4:] = False, False
    mask = keep if kind == torch.bool else torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float).min)
    check("BertModel", attention, SIZES, {"input_ids": torch.arange(3, 15).view(2, 6), "attention_mask": mask})


@torch.no_grad()
def test_a_bool_mask_of_four_axes_keeps_where_it_is_true() -> None:
    """In our attention; a model with eager attention adds the mask, and does not stay causal."""
    tfast.integrations.transformers.register()
    ids = torch.arange(3, 9)[None].repeat(2, 1)
    ids[1, 4:] += 8
    keep = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    changed = {}
    for attention in ("transformer_fast", "sdpa", "eager"):
        first, second = make("BertModel", attention, **SIZES)(input_ids=ids, attention_mask=keep)[0][:, :4]
        changed[attention] = not torch.allclose(first, second, atol=1e-5)
    assert changed == {"transformer_fast": False, "sdpa": False, "eager": True}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MarianMTModel"])
def test_the_first_position_of_a_decoder(name: str, attention: str) -> None:
    """The start token is the padding token, and a mask of the padding blocks it: the plain model may see the target."""
    config, seen = (T5 if name.startswith("T5") else PARTS), []
    for end in ([7, 8, 9], [10, 11, 12]):
        ids = torch.tensor([[config["decoder_start_token_id"], 5, 6, *end]])
        mask = (ids != config["pad_token_id"]).long()
        inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "decoder_input_ids": ids, "decoder_attention_mask": mask}
        seen.append(check(name, attention, config, inputs))
    torch.testing.assert_close(seen[0][:, 1:3], seen[1][:, 1:3], atol=1e-4, rtol=1e-4)
