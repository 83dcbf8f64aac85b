"""Models of transformers whose classes are in the table of ``accelerate``, and accelerated copies of them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerated
import huggingface_models as models
from torch import Tensor, nn

from transformer_fast.huggingface import Fast

BERT, BART, MARIAN = "BertForMaskedLM", "BartForConditionalGeneration", "MarianMTModel"
M2M, T5, GPT2 = "M2M100ForConditionalGeneration", "T5ForConditionalGeneration", "GPT2LMHeadModel"
BLOCKS = {  # class and its fast class, by the class of the model
    BERT: {"BertSelfOutput": "DropoutAddNorm", "BertOutput": "DropoutAddNorm", "BertIntermediate": "ActivatedLinear"},
    "RobertaForMaskedLM": {
        "RobertaSelfOutput": "DropoutAddNorm", "RobertaOutput": "DropoutAddNorm",
        "RobertaIntermediate": "ActivatedLinear",
    },
    "EsmForMaskedLM": {"EsmSelfOutput": "DropoutAdd", "EsmOutput": "DropoutAdd"},
    "DistilBertForMaskedLM": {"FFN": "DistilBertFeedForward"},
    MARIAN: {"MarianEncoderLayer": "EncoderLayer", "MarianDecoderLayer": "DecoderLayer"},
    BART: {"BartEncoderLayer": "EncoderLayer", "BartDecoderLayer": "DecoderLayer"},
    M2M: {"M2M100EncoderLayer": "PreNormEncoderLayer", "M2M100DecoderLayer": "PreNormDecoderLayer"},
    "WhisperForConditionalGeneration": {
        "WhisperEncoderLayer": "PreNormEncoderLayer", "WhisperDecoderLayer": "PreNormDecoderLayer",
    },
    "ViTForImageClassification": {"ViTMLP": "FeedForward"},
    "CLIPForImageClassification": {"CLIPMLP": "FeedForward"},
    T5: {"T5LayerNorm": "RMSNorm", "T5DenseActDense": "ReluFeedForward", "T5LayerFF": "FeedForwardAdd"},
    "LlamaForCausalLM": {"LlamaRMSNorm": "RMSNorm"},
    "CohereForCausalLM": {"CohereLayerNorm": "LayerNorm"},
    "MoshiForCausalLM": {"MoshiRMSNorm": "RMSNormOfEps"},
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
    """Return the modules that have a fast class."""
    return [m for m in model.modules() if isinstance(m, Fast)]


def set_dropout(model: nn.Module, p: float) -> None:
    """Set every dropout except that of attention weights, whose mask eager draws differently."""
    for path, m in model.named_modules():
        if isinstance(m, nn.Dropout) and not path.endswith(("self.dropout", "attention.dropout", "attn_dropout")):
            m.p = p
        if hasattr(m, "activation_dropout"):
            m.dropout, m.activation_dropout = p, 0.7 * p
