"""Existing models before and after ``tfast.accelerate``: an evaluation and a training step."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference import layers
from transformer_fast.reference.dialects import d2l, tensorflow

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from sdpa_models import Gpt, Vision

try:
    import transformers
except ImportError:
    transformers = None

SMALL_CASE = "test_before_and_after[cpu-nn.Transformer-evaluation]"
VOCAB, D, N, HEADS, D_FF, B, L = 4000, 256, 3, 4, 1024, 16, 32
SIZES = (VOCAB, D, D_FF, HEADS, N, 0.1)


def stock() -> nn.Module:
    return nn.Transformer(D, HEADS, N, N, D_FF, 0.1, batch_first=True)


def call_stock(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    blocked = torch.arange(L, device=ids.device) >= lengths[:, None]
    look_ahead = nn.Transformer.generate_square_subsequent_mask(L, device=ids.device)
    padding = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked}
    return m(x, x, tgt_mask=look_ahead, tgt_is_causal=True, **padding)


def call_classic(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    keep = (torch.arange(L, device=ids.device) < lengths[:, None]).unsqueeze(1)
    return m(ids, ids, keep, layers.subsequentmask(L).to(ids.device))


def call_tensorflow(m: nn.Module, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    padded = torch.where(torch.arange(L, device=ids.device) < lengths[:, None], ids, 0)
    return m(padded, ids, *(mask.to(ids.device) for mask in tensorflow.create_masks(padded, ids)))[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "nn.Transformer": (stock, call_stock),
    "classic": (lambda: layers.Transformer(VOCAB, VOCAB, D, N, HEADS, 0.1, d_ff=D_FF), call_classic),
    "tensorflow": (lambda: tensorflow.Transformer(N, D, HEADS, D_FF, VOCAB, VOCAB, 100, 100), call_tensorflow),
    "d2l": (
        lambda: d2l.EncoderDecoder(d2l.TransformerEncoder(*SIZES), d2l.TransformerDecoder(*SIZES)),
        lambda m, ids, lengths, x: m(ids, ids, lengths)[0],
    ),
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", MODELS)
def test_before_and_after(versus, name, training, device):
    """Dropout 0.1 in training; a batch of which a third is padding."""
    make, call = MODELS[name]
    torch.manual_seed(0)
    before = make().to(device)
    after = copy.deepcopy(before)
    assert tfast.accelerate(after).swapped

    def make_inputs():
        lengths = torch.randint(L // 4, L + 1, (B,), device=device)
        return torch.randint(1, VOCAB, (B, L), device=device), lengths, torch.randn(B, L, D, device=device)

    def check(inputs):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(call(after.eval(), *inputs), call(before.eval(), *inputs), atol=2e-3, rtol=2e-3)

    def run(model):
        def step(inputs):
            model.train(training)
            if not training:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch.nn's, of nested tensors
                    return call(model, *inputs)
            loss = call(model, *inputs).square().mean()
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return step

    versus(make_inputs, {"ours": run(after), "before": run(before)}, check=check)


class GptLoss(nn.Module):
    """d 256, 4 heads, 3 layers, 4 sequences."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.model, self.length = Gpt(VOCAB, D, N, HEADS, length, 0.1), length

    def inputs(self) -> tuple[Tensor, ...]:
        return (torch.randint(VOCAB, (4, self.length + 1)),)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class VisionLoss(nn.Module):
    """d 384, 6 heads, 4 layers, 8 images of 224 x 224: 197 places each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Vision(384, 4, 6, 0.1, size=224, patch=16)

    def inputs(self) -> tuple[Tensor, ...]:
        return torch.randn(8, 3, 224, 224), torch.randint(7, (8,))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), classes)


class XTransformersLoss(nn.Module):
    """d 256, 4 heads, 3 + 3 layers, 16 pairs of 128 ids, of which a third of the source is padding."""

    def __init__(self) -> None:
        super().__init__()
        x_transformers = pytest.importorskip("x_transformers")
        sizes = {"num_tokens": VOCAB, "depth": N, "heads": HEADS, "max_seq_len": 128}
        sizes |= {"attn_flash": True, "attn_dropout": 0.1, "ff_dropout": 0.1}
        parts = {f"{part}_{name}": size for part in ("enc", "dec") for name, size in sizes.items()}
        self.model = x_transformers.XTransformer(dim=D, **parts)

    def inputs(self) -> tuple[Tensor, ...]:
        ids = torch.randint(1, VOCAB, (2, 16, 128))
        return *ids, torch.arange(128) < torch.randint(43, 129, (16, 1))

    def forward(self, src: Tensor, trg: Tensor, keep: Tensor) -> Tensor:
        return self.model(src, trg, mask=keep)


CALLERS: dict[str, Callable[[], Any]] = {
    **{f"gpt {length}": functools.partial(GptLoss, length) for length in (128, 512, 1024)},
    "vision": VisionLoss,
    "x-transformers": XTransformersLoss,
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", CALLERS)
def test_callers(versus, name, training, device):
    """Models that call torch's attention in their own code, with dropout 0.1; each computes its loss."""
    torch.manual_seed(0)
    before = CALLERS[name]().to(device).train(training)
    after = copy.deepcopy(before)
    assert tfast.accelerate(after, functional=True, fused_loss=True).swapped

    def check(inputs):
        with torch.no_grad():
            torch.testing.assert_close(after.eval()(*inputs), before.eval()(*inputs), atol=2e-3, rtol=2e-3)
        after.train(training), before.train(training)

    def run(model):
        def step(inputs):
            if not training:
                with torch.no_grad():
                    return model(*inputs)
            loss = model(*inputs)
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return step

    def make_inputs():
        return tuple(t.to(device) for t in before.inputs())

    versus(make_inputs, {"ours": run(after), "before": run(before)}, check=check)


WIDTH, LONG, PAD = 768, 128, 1
SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 12, "intermediate_size": 3072}
DROPPED = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def coder(d: int, heads: int, d_ff: int, layers: int) -> dict[str, Any]:
    """Config fields of BART's family, with dropout 0.1 at every place."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": d_ff}
    each = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    dropped = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.1)
    dropped |= dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0)  # a layer left out is no work
    return {"d_model": d, "max_position_embeddings": LONG, **each, **dropped, **IDS}


HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {  # by the names of a class and of its config's fields
    "bert": ("BertForMaskedLM", {**SHAPE, **DROPPED, "pad_token_id": PAD}),
    "roberta": ("RobertaForMaskedLM", {**SHAPE, **DROPPED, "pad_token_id": PAD, "max_position_embeddings": LONG + 2}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": WIDTH, "n_layers": 4, "n_heads": 12, "hidden_dim": 3072, "pad_token_id": PAD},
    ),
    "marian": ("MarianMTModel", coder(512, 8, 2048, 4)),
    "bart": ("BartForConditionalGeneration", coder(WIDTH, 12, 3072, 2)),
    "m2m100": ("M2M100ForConditionalGeneration", coder(WIDTH, 12, 3072, 2)),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**coder(WIDTH, 12, 3072, 2), "max_source_positions": LONG, "max_target_positions": LONG},
    ),
    "vit": ("ViTForImageClassification", {**SHAPE, **DROPPED, "image_size": 176}),  # 121 patches and one more
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": WIDTH, "d_kv": 64, "num_heads": 12, "d_ff": 3072, "num_layers": 2, "num_decoder_layers": 2, **IDS},
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": 4, "n_head": 12, "n_positions": LONG, **IDS}),
}


def hugging_face_inputs(name: str, device: str) -> dict[str, Tensor]:
    """Return 16 sequences of 32 to 128 ids, padded, as inputs and labels; sounds or pictures for models that take
    them."""
    ids = torch.randint(3, 8000, (16, LONG), device=device)
    mask = torch.arange(LONG, device=device) < torch.randint(LONG // 4, LONG + 1, (16, 1), device=device)
    ids, labels = ids.masked_fill(~mask, PAD), ids.masked_fill(~mask, -100)
    if name == "vit":
        return {"pixel_values": torch.randn(16, 3, 176, 176, device=device), "labels": ids[:, 0] % 2}
    if name == "whisper":
        return {"input_features": torch.randn(16, 80, 2 * LONG, device=device), "labels": labels}
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


@pytest.mark.skipif(transformers is None, reason="needs transformers")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training step"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(versus, name, training, device):
    """Models of transformers with their own loss: 4 layers or 2 + 2 of width 768 and 12 heads (Marian: 4 + 4, 512, 8),
    16 x 128 ids of a vocabulary of 8000, dropout 0.1. "before" is attn_implementation="eager"; "sdpa" is transformers'
    default."""
    kind, fields = HUGGING_FACE[name]
    config = getattr(transformers, kind).config_class(vocab_size=8000, **fields)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    before = getattr(transformers, kind)(config).to(device).train(training)
    sdpa, after = copy.deepcopy(before), copy.deepcopy(before)
    sdpa.set_attn_implementation("sdpa")
    assert tfast.accelerate(after, fused_loss=True).swapped

    def check(given):
        with torch.no_grad():
            losses = [model.eval()(**given).loss for model in (after, before, sdpa)]
        for model in (after, before, sdpa):
            model.train(training)
        torch.testing.assert_close(losses[0], losses[1], atol=2e-3, rtol=2e-3)

    def run(model):
        def step(given):
            if not training:
                with torch.no_grad():
                    return model(**given).logits
            loss = model(**given).loss
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss.detach()

        return step

    calls = {"ours": run(after), "before": run(before), "sdpa": run(sdpa)}
    versus(lambda: hugging_face_inputs(name, device), calls, check=check)
