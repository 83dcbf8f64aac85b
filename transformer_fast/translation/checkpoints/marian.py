"""A Hugging Face folder of a Marian or OPUS-MT model as a run that `translate` and `load_trained` take.

Source: Junczys-Dowmunt et al. 2018, "Marian: Fast Neural Machine Translation in C++"; Tiedemann and Thottingal 2020,
"OPUS-MT - Building open translation services for the World".
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...generation import GenerationConfig
from ..errors import CheckpointError, os_error_as_checkpoint_error
from ..imported import FILES, ModelConfig, build_imported, save_imported
from ..pair_tokenizer import PairFiles, PairTokenizer
from ..text import PathLike
from .marian_search import READ, REFUSED, from_settings
from .marian_weights import from_marian
from .weight_files import read_object, read_weights

ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}
# Defaults of transformers for settings missing in config.json.
DEFAULTS: dict[str, Any] = {
    **{f"{side}_layers": 12 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 4096 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 16 for side in ("encoder", "decoder")},
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "forced_eos_token_id": 0,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "vocab_size": 58101,
    "pad_token_id": 58100,
    "decoder_start_token_id": 58100,
}
SPECIAL = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def import_marian(folder: PathLike, save: PathLike) -> None:
    """Write the run `save` from a Hugging Face folder of a Marian model.

    The folder has config.json, the weights (`weight_files.NAMES`), source.spm, target.spm and vocab.json, and perhaps
    generation_config.json, tokenizer_config.json and target_vocab.json. Weights of 16 bits become fp32.

    Raises:
        CheckpointError: the folder is no Marian model or incomplete, a file is damaged or does not fit the others, a
            setting is not supported, or `save` exists. In these cases nothing is written.
    """
    folder, save = Path(folder), Path(save)
    if save.exists():
        raise CheckpointError(f"{save} is there already; nothing was written. Choose another folder, or remove it")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; expected one with the config.json of a Marian model")
    config = _read_config(folder)
    model_config = read_model_config(config, str(folder / "config.json"))
    tokenizer = _read_tokenizer(folder, config, model_config)
    generation = _read_generation(folder, config, tokenizer, model_config)
    model = build_imported(model_config)
    tensors = from_marian(model, model_config.layers, model_config.tie_weights, read_weights(folder))
    save_imported(save, "marian", model_config, tensors, tokenizer, generation)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; expected the folder of a Hugging Face Marian model")
    config = read_object(path)
    if config.get("model_type") != "marian":
        raise CheckpointError(f"{path} has model_type {config.get('model_type')!r}; expected 'marian'")
    return {**DEFAULTS, **config}


def read_model_config(config: dict[str, Any], where: str) -> ModelConfig:
    """The architecture that a config.json (`config`, with defaults filled in) describes.

    Raises:
        CheckpointError: a Marian model cannot have this architecture.
    """

    def number(name: str) -> int:
        value = config[name]
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{where} has {name} {value!r}; expected a whole number >= 1")
        return value

    for name in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):
        if config.get(name):
            raise CheckpointError(f"{where} has {name} {config[name]!r}; Marian has post-norm layers and no other norm")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        if type(config[name]) not in (int, float) or not 0 <= config[name] <= 1:
            raise CheckpointError(f"{where} has {name} {config[name]!r}; expected a probability")
    if config["activation_function"] not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"{where} has activation_function {config['activation_function']!r}; expected {expected}")
    shared, tied = config["share_encoder_decoder_embeddings"], config["tie_word_embeddings"]
    if shared and not tied:
        raise CheckpointError(
            f"{where} shares the embeddings of both languages but not with the output layer; expected"
            " tie_word_embeddings true"
        )
    sides = "encoder", "decoder"
    layers, heads, d_ff = (
        tuple(number(f"{side}_{name}") for side in sides) for name in ("layers", "attention_heads", "ffn_dim")
    )
    width, vocabulary = number("d_model"), number("vocab_size")
    if any(width % count for count in heads):
        raise CheckpointError(f"{where} has d_model {width}, which is no multiple of the heads, {heads}")
    config = {**config, "decoder_vocab_size": config.get("decoder_vocab_size") or vocabulary}
    if shared and config["decoder_vocab_size"] != vocabulary:
        raise CheckpointError(
            f"{where} shares the embeddings of two vocabularies: vocab_size is {vocabulary}, decoder_vocab_size"
            f" {config['decoder_vocab_size']}"
        )
    return ModelConfig(
        src_vocab=vocabulary,
        trg_vocab=number("decoder_vocab_size"),
        d_model=width,
        layers=layers,
        heads=heads,
        d_ff=d_ff,
        activation=ACTIVATIONS[config["activation_function"]],
        scale=math.sqrt(width) if config["scale_embedding"] else 1.0,
        positions="halves",
        max_positions=number("max_position_embeddings"),
        norm="layer",
        norm_first=False,
        tie_weights=True if shared else "decoder" if tied else False,
        dropout=config["dropout"],
        attention_dropout=config["attention_dropout"],
        activation_dropout=config["activation_dropout"],
        max_length=number("max_position_embeddings"),
    )


def _read_tokenizer(folder: Path, config: dict[str, Any], model: ModelConfig) -> PairTokenizer:
    options = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    separate = bool(options.get("separate_vocabs"))
    wanted = [name for part, name in FILES.items() if separate or part != "target_vocab"]
    if missing := [name for name in wanted if not (folder / name).exists()]:
        raise CheckpointError(f"{folder} has no {', '.join(missing)}; a Marian model needs {', '.join(wanted)}")
    with os_error_as_checkpoint_error(f"cannot read the tokenizer in {folder}"):
        source, target = ((folder / FILES[side]).read_bytes() for side in ("source", "target"))
    vocabs = [read_object(folder / name) for name in wanted[2:]]
    special = {name: _text(options.get(f"{name}_token"), piece) for name, piece in SPECIAL.items()}
    start = config["decoder_start_token_id"]
    tokenizer = PairTokenizer(PairFiles(source, target, *vocabs), start=start, special=special)
    for vocab, name, size in zip(vocabs, wanted[2:], (model.src_vocab, model.trg_vocab), strict=False):
        if max(vocab.values()) + 1 != size:
            raise CheckpointError(
                f"{folder / name} has ids up to {max(vocab.values())}, but the model of config.json has {size} of them"
            )
    if not separate and model.src_vocab != model.trg_vocab:
        raise CheckpointError(
            f"{folder} has one vocabulary for both languages, but config.json has two sizes, {model.src_vocab} and"
            f" {model.trg_vocab}"
        )
    for name, id_, found in (
        ("eos", config["eos_token_id"], tokenizer.eos),
        ("pad", config["pad_token_id"], tokenizer.pad),
    ):
        if id_ != found:
            raise CheckpointError(
                f"config.json has {name}_token_id {id_!r}, but vocab.json gives {special[name]} the id {found}"
            )
    if type(start) is not int or not 0 <= start < model.trg_vocab:
        raise CheckpointError(
            f"config.json has decoder_start_token_id {start!r}; expected an id below {model.trg_vocab}"
        )
    return tokenizer


def _text(token: Any, default: str) -> str:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    return str((token.get("content") if isinstance(token, dict) else token) or default)


def _read_generation(
    folder: Path, config: dict[str, Any], tokenizer: PairTokenizer, model: ModelConfig
) -> GenerationConfig:
    path = folder / "generation_config.json"
    if path.exists():
        settings = read_object(path)
    else:  # as transformers does: the value in config.json
        path = folder / "config.json"
        settings = {name: config[name] for name in READ | REFUSED if name in config}
    marks = ("eos_token_id", tokenizer.eos), ("decoder_start_token_id", tokenizer.bos), ("pad_token_id", tokenizer.pad)
    for name, expected in marks:
        if settings.get(name) not in (None, expected, [expected]):
            raise CheckpointError(f"{path} has {name} {settings[name]!r}; config.json has {expected}")
    return from_settings(settings, eos=tokenizer.eos, vocabulary=model.trg_vocab, where=str(path))
