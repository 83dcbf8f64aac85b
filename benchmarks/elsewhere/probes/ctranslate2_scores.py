"""CTranslate2 beside transformers: a BART with random weights, on a CPU, in float32."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.simplefilter("ignore")
import ctranslate2  # noqa: E402
import numpy as np  # noqa: E402
import shared  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers as hf  # noqa: E402
from torch.nn.functional import log_softmax  # noqa: E402

logging.disable(logging.WARNING)
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(4, 32))]
END, LENGTH = 2, 12
SOURCES = [[f"w{i}", f"w{35 - i}", "</s>"] for i in range(4, 32)]


def models(folder: str) -> tuple[Any, Any]:
    """Return the model of transformers and that of CTranslate2."""
    torch.manual_seed(0)
    config = hf.BartConfig(
        **shared.BART,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        normalize_before=False,
        add_final_layer_norm=False,
        normalize_embedding=True,
        static_position_embeddings=False,
    )
    model = hf.BartForConditionalGeneration(config).eval()
    model.final_logits_bias[0, END] = 2.0  # translations end
    model.save_pretrained(f"{folder}/hf")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    hf.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(f"{folder}/hf")
    ctranslate2.converters.TransformersConverter(f"{folder}/hf").convert(f"{folder}/ct2")
    return model, ctranslate2.Translator(f"{folder}/ct2", device="cpu", compute_type="float32", intra_threads=1)


@torch.no_grad()
def logs(model: Any, source: list[str], target: list[str]) -> tuple[np.ndarray, float]:
    """Return the log probability of each token of a target, the end included, and of the end in the first step."""
    ids = torch.tensor([[END, *(WORDS.index(w) for w in target), END]])
    out = model(torch.tensor([[WORDS.index(w) for w in source]]), decoder_input_ids=ids[:, :-1]).logits
    each = log_softmax(out, -1)
    return each.gather(2, ids[:, 1:, None])[0, :, 0].numpy(), float(each[0, 0, END])


def divisor(model: Any, source: list[str], result: Any) -> str:
    """Say of what the score of a translation is made."""
    target, score = result.hypotheses[0], result.scores[0]
    each, end = logs(model, source, target)
    total, barred = each.sum(), each.sum() - np.log1p(-np.exp(end))
    answers = {}
    for name, value in (("the sum", total), ("the sum, the end barred from the first step's softmax", barred)):
        answers[name] = value
        answers[f"{name}, by the tokens with the end"] = value / len(each)
        answers[f"{name}, by the tokens without the end"] = value / len(target)
    return next((word for word, answer in answers.items() if abs(answer - score) < 1e-4), "another number")


with tempfile.TemporaryDirectory() as folder:
    model, translator = models(folder)
    options = {"beam_size": 4, "max_decoding_length": LENGTH, "return_scores": True}
    found = {}
    for penalty, least in ((1, 1), (1, 0), (0, 0)):
        extra = {"length_penalty": penalty, "min_decoding_length": least}
        results = translator.translate_batch(SOURCES, **options, **extra)
        ended = [(s, r) for s, r in zip(SOURCES, results) if 0 < len(r.hypotheses[0]) < LENGTH]  # ends by itself
        each = {divisor(model, source, result) for source, result in ended}
        found[f"`length_penalty={penalty}`, `min_decoding_length={least}`"] = " or ".join(sorted(each))
    empty = translator.translate_batch([SOURCES[0], []], **options)[1].hypotheses[0]
    rows = {
        "CTranslate2, BART": {
            "empty": f"an empty source: {'an empty translation' if not empty else 'a translation'}",
            "mask": "none: it takes lists of words, and masks by their lengths",
            "dropout": "none",
            "scores": "; ".join(f"{name}: {word}" for name, word in found.items()),
        }
    }
shared.emit(rows, f"ctranslate2 {version('ctranslate2')}, transformers {version('transformers')}")
