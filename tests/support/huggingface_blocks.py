"""Models of transformers whose blocks ``accelerate`` recognises, and accelerated copies of them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerated
import huggingface_models as models
from torch import Tensor, nn

from transformer_fast.accelerate.patterns.base import Accelerated

DENSE_NORM = "fused dense, dropout, LayerNorm"
BERT, BART, MARIAN = "BertForMaskedLM", "BartForConditionalGeneration", "MarianMTModel"
M2M, T5, GPT2 = "M2M100ForConditionalGeneration", "T5ForConditionalGeneration", "GPT2LMHeadModel"
BLOCKS = {  # class before and class after, by the class of the model
    BERT: {"BertSelfOutput": DENSE_NORM, "BertOutput": DENSE_NORM},
    "RobertaForMaskedLM": {"RobertaSelfOutput": DENSE_NORM, "RobertaOutput": DENSE_NORM},
    "DistilBertForMaskedLM": {"TransformerBlock": "fused DistilBertBlock", "FFN": "fused DistilBertFeedForward"},
    MARIAN: {"MarianEncoderLayer": "fused BartEncoderLayer", "MarianDecoderLayer": "fused BartDecoderLayer"},
    BART: {"BartEncoderLayer": "fused BartEncoderLayer", "BartDecoderLayer": "fused BartDecoderLayer"},
    M2M: {
        "M2M100EncoderLayer": "fused PreNormBartEncoderLayer", "M2M100DecoderLayer": "fused PreNormBartDecoderLayer",
    },
    "WhisperForConditionalGeneration": {
        "WhisperEncoderLayer": "fused PreNormBartEncoderLayer", "WhisperDecoderLayer": "fused PreNormBartDecoderLayer",
    },
    "ViTForImageClassification": {"ViTLayer": "fused VitLayer"},
    "CLIPForImageClassification": {"CLIPEncoderLayer": "fused ClipLayer"},
    "Dinov2ForImageClassification": {"Dinov2Layer": "fused DinoLayer"},
    T5: {
        "T5Block": "fused T5Block", "T5LayerSelfAttention": "fused T5SelfAttention", "T5DenseActDense": "fused T5Dense",
        "T5LayerCrossAttention": "fused T5CrossAttention", "T5LayerFF": "fused T5FeedForward",
    },
    GPT2: {"GPT2Block": "fused Gpt2Block", "GPT2MLP": "fused Gpt2FeedForward"},
}  # fmt: skip


def case(name: str) -> models.Case:
    """Return the case of a class, or of classes that are joined by a plus."""
    return models.named(*name.split("+"))


@functools.cache
def pair_and_report(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """Return a model, its accelerated copy and the report, made once."""
    return accelerated.pair(models.scattered(models.make(case(name), "eager")))


def pair(name: str) -> tuple[Any, Any]:
    """Return a model of transformers, and a copy after accelerate."""
    eager, fast, _ = pair_and_report(name)
    return copy.deepcopy(eager), copy.deepcopy(fast)


def given(name: str, side: str = "right") -> dict[str, Tensor]:
    """Return the padded inputs of a model."""
    return models.inputs(case(name), side)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that run on a pattern."""
    return [m for m in model.modules() if isinstance(m, Accelerated)]


def set_dropout(model: nn.Module, p: float) -> None:
    """Set every dropout except that of attention weights, whose mask eager draws differently."""
    for path, m in model.named_modules():
        if isinstance(m, nn.Dropout) and not path.endswith(("self.dropout", "attention.dropout", "attn_dropout")):
            m.p = p
        if hasattr(m, "activation_dropout"):
            m.dropout = m.activation_dropout = p
