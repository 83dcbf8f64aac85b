"""The command `measure`: a model of Hugging Face from a folder, plain and accelerated, on texts of the user."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import BackendError
from ..swap.accelerate import accelerate

TEXTS = (
    "Yes, of course.",
    "The meeting starts at nine.",
    "A batch has as many positions as its longest sentence, and short sentences are padded to that length.",
    "Please send the report to everybody who was there yesterday.",
    "Nobody knows.",
    "When the rain had stopped, the children ran down to the river, where the water stood so high that the old bridge, "
    "which had carried carts for a hundred years, was closed, and they had to take the long way home by the fields.",
    "The train to the coast leaves from platform four in twenty minutes.",
    "She reads two books a week, one of them in French.",
    "It is cheaper to repair the roof now than to replace the whole ceiling after the next storm.",
    "What does it cost?",
    "Padding is computed like any other position, although nothing reads what comes out of it, so a model that leaves "
    "it out computes the same with less work.",
    "The museum is closed on Mondays, but the garden behind it is open every day until sunset.",
    "He forgot his keys again.",
    "The second experiment was repeated three times with the same result, and the third one could not be repeated at "
    "all because the instrument had been sent back to its maker.",
    "Two tickets, please.",
    "The recipe asks for flour, butter, three eggs, a little salt and a lot of patience.",
)
"""Texts of this project, of 2 to 45 words."""

LANGUAGE, ROW, POSITION = "language", "row", "position"
TASKS = (
    ("MASKED_LM", "AutoModelForMaskedLM", LANGUAGE),
    ("CAUSAL_LM", "AutoModelForCausalLM", LANGUAGE),
    ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", LANGUAGE),
    ("SEQUENCE_CLASSIFICATION", "AutoModelForSequenceClassification", ROW),
    ("TOKEN_CLASSIFICATION", "AutoModelForTokenClassification", POSITION),
)
"""Tables of transformers with the classes of a task, its loader, and the kind of its labels."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.usage = "%(prog)s --model FOLDER [options]"
    command.description = (
        "Compare and time a model of Hugging Face transformers on one batch of texts, plain and after "
        "accelerate(model, packed=True): a training step and an evaluation, in turn. Nothing is downloaded or written."
    )
    command.add_argument(
        "--model", required=True, metavar="FOLDER", help="folder of the model and its tokenizer, by save_pretrained"
    )
    command.add_argument("--data", metavar="FILE", help="texts, one per line (default: sentences of this project)")
    command.add_argument("--batch-size", type=int, default=16, metavar="N", help="number of texts (default: 16)")
    command.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="tokens of a text at most (default: 512)"
    )
    command.add_argument("--rounds", type=int, default=5, metavar="N", help="samples of each model (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        FileNotFoundError: no model in the folder, or no file with the data.
        ValueError: a wrong number, or a file without a text.
        BackendError: nothing was swapped, as on a machine without kernels.
        FloatingPointError: results of the plain and of the accelerated model differ.
    """
    for name in ("batch_size", "max_length"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {args.rounds}")
    if not (config := Path(args.model, "config.json")).is_file():
        raise FileNotFoundError(
            f"{config} is missing; --model is a folder to which save_pretrained wrote the model and its tokenizer"
        )
    texts = _texts(args.data, args.batch_size)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, kind = _load(transformers, args.model)
    batch = _batch(transformers, args.model, texts, min(args.max_length, _positions(model)), args.device)
    batch |= _also(model.config, kind, batch)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # a cache has one row per sentence, padding included
    report = accelerate(model.to(args.device), packed=True)
    print(report)
    if not report.swapped:
        raise BackendError("nothing of this model was swapped, so nothing is measured; the report has the reasons")
    print(report.measure(batch, loss=None if "labels" in batch else _size_of_states, rounds=args.rounds))
    return 0


def _texts(file: str | None, size: int) -> list[str]:
    """Texts of a batch: as many as wanted, from all parts of the file."""
    lines = TEXTS if file is None else Path(file).read_text(encoding="utf-8").splitlines()
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{file} has no text")
    if len(texts) < size:
        return (texts * -(-size // len(texts)))[:size]
    return [texts[place * len(texts) // size] for place in range(size)]


def _load(transformers: Any, folder: str) -> tuple[nn.Module, str]:
    """The model, by its task, and the kind of its labels, "" if it computes no loss."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    tables = transformers.models.auto.modeling_auto
    for table, loader, kind in TASKS:
        known = getattr(tables, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type)
        if known is not None and known in (config.architectures or ()):
            return getattr(transformers, loader).from_pretrained(folder, local_files_only=True), kind
    return transformers.AutoModel.from_pretrained(folder, local_files_only=True), ""


def _also(config: Any, kind: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs besides the texts: labels, or the text of a decoder."""
    if kind:
        return {"labels": _labels(config, kind, batch)}
    return {"decoder_input_ids": batch["input_ids"]} if config.is_encoder_decoder else {}


def _labels(config: Any, kind: str, batch: dict[str, Tensor]) -> Tensor:
    """Labels that say nothing: the texts themselves, or the first class."""
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    if kind == LANGUAGE:
        return ids.masked_fill(~mask, -100)
    if kind == POSITION:
        return torch.zeros_like(ids).masked_fill(~mask, -100)
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return torch.zeros(len(ids), config.num_labels, device=ids.device)
    is_number = config.num_labels == 1 or getattr(config, "problem_type", None) == "regression"
    size = (len(ids),) if config.num_labels == 1 or not is_number else (len(ids), config.num_labels)
    return torch.zeros(size, dtype=torch.float32 if is_number else torch.int64, device=ids.device)


def _batch(transformers: Any, folder: str, texts: list[str], length: int, device: torch.device) -> dict[str, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return {
        name: encoded[name].to(device) for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded
    }


def _positions(model: nn.Module) -> int:
    """Number of positions that a model has, without those that its padding takes."""
    number = getattr(model.config, "max_position_embeddings", None)
    return number - 2 if isinstance(number, int) and number > 2 else 10**9


def _size_of_states(output: Any) -> Tensor:
    """A loss for a model without one: the mean square of its last hidden states."""
    return output.last_hidden_state.square().mean()
