"""A run as a folder for Hugging Face transformers or for CTranslate2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...generation import GenerationConfig
from ...ops import positional_table
from ..checkpoint import to_json, write_atomically
from ..config import TrainConfig
from ..errors import CheckpointError
from ..imported import FILES, ModelConfig, new_folder
from ..model import Trained, load_trained
from ..pair_tokenizer import PairFiles, PairTokenizer
from ..text import PathLike
from ..tokenizer import BOS, EOS, PAD, UNK, Tokenizer
from .exported import Exported
from .marian_search import to_settings
from .marian_weights import to_marian

TRAINED_SEARCH = GenerationConfig(
    beam=5, length_penalty=1.0, length_norm="power", slots="keep", early_stop="now", max_length=511
)
"""Search options of an exported model that was trained here: the closest settings to our defaults."""


def export_hf(run: PathLike, out: PathLike, *, which: str = "best") -> None:
    """Write the run as `out`, a folder from which `MarianMTModel` and `MarianTokenizer` load.

    which: as for `load_trained`. A run that was trained here must be post-norm with LayerNorm, in cased text.

    Raises:
        CheckpointError: the run is damaged or not representable as a Marian model, or `out` exists or cannot be
            written.
    """
    trained = load_trained(run, which=which)
    lowercase = isinstance(trained.config, TrainConfig) and trained.config.lowercase
    exported = _exported(trained)
    config, tokenizer = exported.config, exported.tokenizer
    obstacles = [
        (config.norm_first, "its layers are pre-norm (norm_first), and Marian's are post-norm"),
        (config.norm != "layer", f"its norm is {config.norm!r}, and Marian's is LayerNorm"),
        (lowercase, "it was trained on lower-cased text, and MarianTokenizer cannot lower-case"),
    ]
    if reasons := [reason for holds, reason in obstacles if holds]:
        raise CheckpointError(f"{run} cannot be a Marian model: {'; '.join(reasons)}")
    ours = positional_table(config.max_positions, config.d_model, layout="halves")
    same = all(torch.equal(side.pe.pe[0].cpu(), ours) for side in (exported.model.encoder, exported.model.decoder))
    tensors = to_marian(exported.model, config.layers, config.tie_weights, positions=not same)
    special = {f"{name}_token": piece for name, piece in tokenizer.special.items()}
    start = tokenizer.pieces([tokenizer.bos])[0]
    others = [] if start in tokenizer.special.values() else [start]
    files = {
        **_tokenizer_files(tokenizer.files),
        "config.json": to_json(_hf_config(exported)),
        "generation_config.json": to_json(
            {**_hf_ids(tokenizer), **to_settings(exported.generation, eos=tokenizer.eos), "use_cache": True}
        ),
        "tokenizer_config.json": to_json(
            {
                **special,
                "tokenizer_class": "MarianTokenizer",
                "additional_special_tokens": others,
                "model_max_length": config.max_length,
                "separate_vocabs": tokenizer.files.target_vocab is not None,
            }
        ),
        "model.safetensors": safetensors.torch.save(tensors, {"format": "pt"}),
    }
    with new_folder(Path(out)) as scratch:
        for name, data in files.items():
            write_atomically(scratch / name, data)


def export_ctranslate2(run: PathLike, out: PathLike, *, which: str = "best", quantization: str | None = None) -> None:
    """Write the run as `out`, a folder from which `ctranslate2.Translator` loads, with its sentencepiece models.

    which: as for `load_trained`. quantization: of CTranslate2, such as "int8"; None keeps fp32.

    Raises:
        ModuleNotFoundError: CTranslate2 is not installed.
        CheckpointError: the run is damaged or not representable in CTranslate2, or `out` exists.
    """
    from .ctranslate2_spec import make_spec  # needs the package

    exported = _exported(load_trained(run, which=which))
    if (norm := exported.config.norm) not in ("layer", "rms"):
        raise CheckpointError(f"{run} cannot run in CTranslate2: its norm is {norm!r}, neither LayerNorm nor RMSNorm")
    spec = make_spec(exported)
    with new_folder(Path(out)) as scratch:
        try:
            spec.validate()
            spec.optimize(quantization=quantization)
        except ValueError as error:
            raise CheckpointError(f"CTranslate2 does not take the model: {error}") from None
        spec.save(str(scratch))
        for name, data in _tokenizer_files(exported.tokenizer.files).items():
            if name.endswith(".spm"):
                write_atomically(scratch / name, data)


def _exported(trained: Trained) -> Exported:
    if isinstance(trained.config, ModelConfig):
        assert isinstance(trained.tokenizer, PairTokenizer)
        return Exported(trained.model, trained.config, trained.tokenizer, trained.generation)
    assert isinstance(trained.tokenizer, Tokenizer)
    config, vocabulary = trained.config, len(trained.tokenizer)
    pieces = trained.tokenizer.pieces(range(vocabulary))
    files = PairFiles(trained.tokenizer.model, trained.tokenizer.model, {piece: i for i, piece in enumerate(pieces)})
    special = {"eos": pieces[EOS], "unk": pieces[UNK], "pad": pieces[PAD]}
    dropouts = (config.attention_dropout, config.activation_dropout)
    attention_dropout, activation_dropout = (config.dropout if p is None else p for p in dropouts)
    described = ModelConfig(
        src_vocab=vocabulary,
        trg_vocab=vocabulary,
        d_model=config.d_model,
        layers=(config.layers, config.layers),
        heads=(config.heads, config.heads),
        d_ff=(config.d_ff, config.d_ff),
        activation="relu",
        scale=math.sqrt(config.d_model),
        positions="interleaved",
        max_positions=trained.model.encoder.pe.pe.shape[1],
        norm=config.norm,
        norm_first=config.norm_first,
        tie_weights=config.tie_weights,
        dropout=config.dropout,
        attention_dropout=attention_dropout,
        activation_dropout=activation_dropout,
        max_length=config.max_length,
    )
    return Exported(trained.model, described, PairTokenizer(files, start=BOS, special=special), TRAINED_SEARCH)


def _tokenizer_files(files: PairFiles) -> dict[str, bytes]:
    data = {FILES["source"]: files.source, FILES["target"]: files.target, FILES["vocab"]: to_json(files.vocab)}
    return data if files.target_vocab is None else {**data, FILES["target_vocab"]: to_json(files.target_vocab)}


def _hf_ids(tokenizer: PairTokenizer) -> dict[str, int]:
    return {
        "eos_token_id": tokenizer.eos,
        "pad_token_id": tokenizer.pad,
        "decoder_start_token_id": tokenizer.bos,
    }


def _hf_config(exported: Exported) -> dict[str, Any]:
    config = exported.config
    sides = {
        f"{side}_{name}": value
        for name, pair in (("layers", config.layers), ("attention_heads", config.heads), ("ffn_dim", config.d_ff))
        for side, value in zip(("encoder", "decoder"), pair, strict=True)
    }
    return {
        **_hf_ids(exported.tokenizer),
        **sides,
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": config.src_vocab,
        "decoder_vocab_size": config.trg_vocab,
        "d_model": config.d_model,
        "num_hidden_layers": config.layers[0],
        "activation_function": config.activation,
        "scale_embedding": config.scale != 1.0,
        "max_position_embeddings": config.max_positions,
        "static_position_embeddings": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "share_encoder_decoder_embeddings": config.tie_weights is True,
        "tie_word_embeddings": config.tie_weights is not False,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "forced_eos_token_id": exported.tokenizer.eos if exported.generation.force_eos else None,
        "bos_token_id": None,
    }
