"""Hugging Face folders of small random Marian models, in the form of OPUS-MT.

Random, and far from ties: what is said depends on what was read and said. Left alone such a model says one word again
and again; where no two words may be said twice in a row, its answers end at many lengths.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer
from transformers.utils import logging

from transformer_fast.translation.numbers import make_numbers_corpus

logging.set_verbosity_error()
logging.disable_progress_bar()

TINY = {"d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 56}
TINY |= {"encoder_attention_heads": 2, "decoder_attention_heads": 4, "max_position_embeddings": 64}
BASE = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
BASE |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "max_position_embeddings": 512}

TEXT = [
    "one hundred two",
    "seven",
    "nine hundred ninety-nine thousand three hundred fifty-nine",
    "zero",
    "twenty-one thousand",
    "six hundred",
]


@functools.cache
def sentencepieces() -> tuple[bytes, bytes]:
    """Return two sentencepiece models, of English and of German numbers; each has pieces that the other lacks."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = make_numbers_corpus(folder, train_size=200, held_out=8)
        texts = [Path(paths[f"train_{side}"]).read_text(encoding="utf-8").splitlines() for side in ("source", "target")]
    models = []
    for lines in texts:
        model = io.BytesIO()
        options: dict[str, Any] = {"vocab_size": 60, "hard_vocab_limit": False, "pad_id": -1, "bos_id": -1}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, minloglevel=2, num_threads=1, **options
        )
        models.append(model.getvalue())
    return models[0], models[1]


def vocabulary(models: Iterable[bytes], *, tags: Iterable[str] = (">>deu<<",)) -> dict[str, int]:
    """Return one map of all pieces: EOS first and padding last, as Marian has it; ids are not sentencepiece's."""
    pieces = ["</s>", "<unk>", *tags]
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        found = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        pieces += [piece for piece in reversed(found) if piece not in pieces]
    return {piece: i for i, piece in enumerate([*pieces, "<pad>"])}


def write_marian(folder: Path, *, generation: dict[str, Any] | None = None, seed: int = 0, **changes: Any) -> Path:
    """Write a folder with a tiny model. `generation`: settings of generation_config.json besides the ids."""
    folder.mkdir(parents=True, exist_ok=True)
    models = sentencepieces()
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    separate = changes.get("share_encoder_decoder_embeddings") is False
    vocab = vocabulary(models[:1] if separate else models)
    target = vocabulary(models[1:], tags=[f"filler {i}" for i in range(20)]) if separate else vocab
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps(target), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": separate, "model_max_length": 512}))
    pad, size = vocab["<pad>"], max(vocab.values()) + 1
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    config = MarianConfig(
        vocab_size=size,
        decoder_vocab_size=max(target.values()) + 1,
        **{**TINY, **ids, "activation_function": "swish", "scale_embedding": True, "forced_eos_token_id": 0, **changes},
    )
    model = random_marian(config, seed)
    model.generation_config = GenerationConfig(**ids, **(generation or {"max_length": 24, "bad_words_ids": [[pad]]}))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def random_marian(config: MarianConfig, seed: int) -> MarianMTModel:
    """Return a model with weights scaled so that answers have many lengths."""
    model = MarianMTModel(config).eval()
    torch.manual_seed(seed)  # set again, because the model's own initial weights depend on more than the seed
    tables = {id(module.weight) for module in (*_embeddings(model), model.lm_head)}
    for name, parameter in model.named_parameters():
        if id(parameter) in tables:
            parameter.normal_(std=2.2 * config.d_model**-0.5)
            parameter[config.pad_token_id] = 0
        elif parameter.dim() == 2 and "embed_positions" not in name:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
    model.final_logits_bias.normal_(std=0.5)
    model.final_logits_bias[0, 0] += 3
    return model


def _embeddings(model: MarianMTModel) -> list[torch.nn.Module]:
    return [model.model.encoder.embed_tokens, model.model.decoder.embed_tokens]


def load(folder: Path) -> tuple[MarianMTModel, MarianTokenizer]:
    """Load a folder with transformers, in fp32."""
    model = MarianMTModel.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), MarianTokenizer.from_pretrained(folder)


@torch.no_grad()
def answers(folder: Path, lines: list[str], **options: Any) -> tuple[list[list[int]], list[str]]:
    """Return the tokens, without begin, end and padding, and the texts of transformers' `generate`."""
    model, tokenizer = load(folder)
    found = model.generate(**tokenizer(lines, return_tensors="pt", padding=True), **options)
    eos, pad, tokens = tokenizer.eos_token_id, tokenizer.pad_token_id, []
    for ids in found[:, 1:].tolist():
        ids = ids[: ids.index(eos)] if eos in ids else ids
        while ids and ids[-1] == pad:
            ids.pop()
        tokens.append(ids)
    return tokens, tokenizer.batch_decode(found, skip_special_tokens=True)
