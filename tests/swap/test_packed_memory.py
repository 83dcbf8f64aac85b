"""``accelerate(model, packed=True)``: a decoder that reads what its encoder has left out as padding."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.layers.torch_stacks import Transformer

D, SOURCE, TARGET = 16, 9, 7
PADDING = torch.arange(SOURCE) >= torch.tensor([[9], [2], [6], [4]])
LESS = torch.arange(SOURCE) >= torch.tensor([[9], [5], [6], [4]])
MORE = torch.arange(SOURCE) >= torch.tensor([[8], [1], [6], [4]])
MASKS: dict[str, tuple[Tensor | None, bool]] = {
    "the same": (PADDING, True), "equal": (PADDING.clone(), True), "more": (MORE, True), "less": (LESS, False),
    "none": (None, False),
    "float": (torch.zeros(PADDING.shape).masked_fill(PADDING, float("-inf")), True),
    "scores": (torch.zeros(PADDING.shape).masked_fill(PADDING, -1.0), False),
}  # fmt: skip
"""Masks of the decoder's source, and True for one that hides what the encoder leaves out."""


def transformer(batch_first: bool) -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(D, 4, 2, 2, 32, 0.0, batch_first=batch_first)


def step(model: nn.Transformer, memory: Tensor | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    src, tgt = torch.randn(4, SOURCE, D, generator=generator), torch.randn(4, TARGET, D, generator=generator)
    masks = {"src_key_padding_mask": PADDING, "memory_key_padding_mask": memory, "tgt_is_causal": True}
    masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(TARGET)
    if not model.batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    out = model.train()(src, tgt, **masks)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_the_padding_stays_where_a_transformer_reads_it(kind: str, batch_first: bool) -> None:
    mask, is_left_out = MASKS[kind]
    plain = transformer(batch_first)
    fast = copy.deepcopy(plain)
    report = tfast.accelerate(fast, packed=True)
    torch.testing.assert_close(step(fast, mask), step(plain, mask), atol=1e-5, rtol=1e-4)
    reasons = [reason for reason in report.padded_calls.reasons if "decoder reads padding" in reason]
    assert bool(reasons) is not is_left_out and type(fast) is Transformer
    report.undo()
    assert type(fast) is nn.Transformer


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_encoder_and_a_decoder_that_are_called_one_by_one(mode: Callable[[], Any]) -> None:
    with mode():
        _call_one_by_one()


def _call_one_by_one() -> None:
    model = transformer(batch_first=True)
    plain = copy.deepcopy(model)
    tfast.accelerate(model, packed=True)
    src, tgt = torch.randn(4, SOURCE, D), torch.randn(4, TARGET, D)
    memory = model.encoder(src, src_key_padding_mask=PADDING)
    expected = plain.decoder(tgt, plain.encoder(src, src_key_padding_mask=PADDING), memory_key_padding_mask=PADDING)
    for masks in ({}, {"memory_key_padding_mask": LESS}):
        with pytest.raises(RuntimeError, match="reads positions that the layer before has left out"):
            model.decoder(tgt, memory, **masks)
    torch.testing.assert_close(model.decoder(tgt, memory, memory_key_padding_mask=PADDING), expected)
    model.decoder(tgt, memory * 1.0)  # a tensor of the caller's
    if not memory.requires_grad:
        model.decoder(tgt, memory.add_(0.0))  # and one that the caller wrote to


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_outputs_of_an_encoder_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    import huggingface_models as models

    plain = models.scattered(models.make(models.named(name), decoder_start_token_id=2))
    fast = copy.deepcopy(plain)
    tfast.accelerate(fast, packed=True)
    ids, keep = torch.randint(4, 40, (4, SOURCE)), (~PADDING).long()

    def call(model: nn.Module, given: Any, mask: Tensor | None) -> Tensor:
        return model(encoder_outputs=given, attention_mask=mask, decoder_input_ids=ids, use_cache=False).logits

    given, expected = (m.get_encoder()(input_ids=ids, attention_mask=keep) for m in (fast, plain))
    for mask in (None, (~LESS).long(), torch.ones_like(keep)):
        with pytest.raises(RuntimeError, match="reads positions that the layer before has left out"):
            call(fast, given, mask)
    for mask in (keep, (~MORE).long()):
        torch.testing.assert_close(call(fast, given, mask), call(plain, expected, mask), atol=1e-4, rtol=1e-4)
    torch.save(given.last_hidden_state, file := io.BytesIO())
    file.seek(0)
    call(fast, (torch.load(file, weights_only=True),), None)
    call(fast, (copy.deepcopy(given.last_hidden_state.detach()),), None)
    with torch.inference_mode():
        given = fast.get_encoder()(input_ids=ids, attention_mask=keep)
        given.last_hidden_state.add_(0.0)  # the caller wrote to it
        call(fast, given, None)
