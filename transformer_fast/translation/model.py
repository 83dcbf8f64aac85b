"""Build a model from settings, and load a model from a run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..generation import GenerationConfig
from ..models import Transformer
from .averaging import describe_average, load_average
from .checkpoint import RunFolder, Scores, Tensors, is_better, read_json
from .config import TrainConfig, saved_generation_config
from .errors import CheckpointError, ConfigError, os_error_as_checkpoint_error
from .imported import ModelConfig, build_imported, load_imported
from .pair_tokenizer import PairTokenizer
from .ranks import distribute_like, gather_full
from .text import PathLike
from .tokenizer import PAD, Tokenizer


def build_model(config: TrainConfig, vocab: int) -> nn.Module:
    """A freshly initialised `transformer_fast.Transformer` with one vocabulary of `vocab` pieces for both sides."""
    names = ("attention_dropout", "activation_dropout", "d_ff", "norm_first", "norm", "tie_weights")
    options = {name: getattr(config, name) for name in (*names, "checkpoint_activations", "packed")}
    sizes = vocab, vocab, config.d_model, config.layers, config.heads
    model = Transformer(*sizes, config.dropout, padding_idx=PAD, **options)
    init_weights(model, config.d_model)
    return model


@torch.no_grad()
def init_weights(model: nn.Module, d_model: int) -> None:
    """Draw new weights.

    Matrices are Glorot-uniform (with one draw for each of q, k, v, however they are stored), biases are zero. Matrices
    with one row per token are drawn from N(0, 1/d_model), so that embeddings times sqrt(d_model), and the first logits,
    have about unit variance. Padding rows stay zero. Norms keep their ones and zeros.

    Source: Glorot, Bengio 2010; the embedding scale is that of the paper, section 3.4.
    """
    tokens = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding) or hasattr(m, "padding_idx")}
    output = getattr(model, "out", None)
    for name, parameter in model.named_parameters():
        if id(parameter) in tokens or (output is not None and parameter is output.weight):
            nn.init.normal_(parameter, std=d_model**-0.5)
            padding = getattr(tokens.get(id(parameter)), "padding_idx", None)
            if padding is not None:
                parameter[padding] = 0
        elif parameter.dim() == 2:
            stacked = 3 if name.endswith("in_proj_weight") else 1
            for part in parameter.chunk(stacked):
                nn.init.xavier_uniform_(part)
        elif name.endswith("bias") and "norm" not in name:
            nn.init.zeros_(parameter)


def model_tensors(model: nn.Module) -> Tensors:
    """The state dict without second names of shared tensors: a tied matrix is there once. The tensors are full; of a
    sharded model, every process must call this."""
    return {name: gather_full(tensor) for name, tensor in _own_tensors(model).items()}


def _own_tensors(model: nn.Module) -> Tensors:
    named = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in named}


def load_model_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Copy `tensors` (from `model_tensors`) into `model`, which ties the same weights, and may be sharded.

    Raises:
        CheckpointError: names or shapes differ.
    """
    own = _own_tensors(model)
    expected = {name: tensor.shape for name, tensor in own.items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        name = differing[0]
        raise CheckpointError(
            f"the checkpoint is of another model: {len(differing)} tensors differ, the first is {name}:"
            f" {_shape(found.get(name))} in the checkpoint, {_shape(expected.get(name))} expected"
        )
    model.load_state_dict({name: distribute_like(tensor, own[name]) for name, tensor in tensors.items()}, strict=False)


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"shape {tuple(shape)}"


@dataclass(frozen=True)
class Trained:
    """A model ready to translate: `model` in eval mode on its device, its `tokenizer`, the run's `config` and the
    `step` of the weights; `scores` holds what validation measured there ("valid_loss", "bleu"), if anything;
    `generation` how to search, unless something else is asked for: as the run's recipe or its imported model says, else
    with a beam of 5."""

    model: nn.Module
    tokenizer: Tokenizer | PairTokenizer
    config: TrainConfig | ModelConfig
    step: int
    scores: Scores
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(beam=5))


def load_tokenizer(folder: RunFolder, saved: dict, config: TrainConfig) -> Tokenizer:
    """The tokenizer of a run, checked against its config.json (`saved`, and as settings `config`).

    Raises:
        CheckpointError: missing or altered.
    """
    with os_error_as_checkpoint_error(f"cannot read {folder.tokenizer}"):
        data = folder.tokenizer.read_bytes()
    if hashlib.sha256(data).hexdigest() != saved.get("tokenizer_sha256"):
        raise CheckpointError(f"{folder.tokenizer} is damaged: its SHA-256 differs from the one in config.json")
    return Tokenizer(data, lowercase=config.lowercase)


def load_config(folder: RunFolder, saved: dict) -> TrainConfig:
    """The settings in a run's config.json (`saved`).

    Raises:
        CheckpointError: this version does not have one of the settings, or the run was not trained.
    """
    if "imported" in saved:
        raise CheckpointError(f"{folder.root} is an imported model; training cannot be continued there")
    try:
        return TrainConfig(**saved["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder.config} does not hold the settings of a run: {error}") from None


def load_generation(folder: RunFolder, saved: dict) -> GenerationConfig:
    """Search options stored in a run's config.json (`saved`), from its recipe; a beam of 5 if none are stored.

    Raises:
        CheckpointError: this version does not have one of the options.
    """
    try:
        return saved_generation_config(saved.get("translation", {}), GenerationConfig(beam=5))
    except ConfigError as error:
        raise CheckpointError(f"{folder.config} does not hold options of translation: {error}") from None


def load_trained(
    folder: PathLike,
    *,
    which: str = "best",
    device: str | torch.device = "cpu",
    build: Callable[[TrainConfig, int], nn.Module] = build_model,
) -> Trained:
    """The model of a run folder; nothing else than the folder is needed.

    Args:
        folder: the run folder, `TrainConfig.save`.
        which: "best" by validation, a mean of checkpoints that was measured included (the newest checkpoint if there
            was no validation); "last"; or "average", the mean of the last checkpoints.
        device: device of the model.
        build: the argument `build` of `train`, if the run was trained with one.

    Raises:
        CheckpointError: the folder is not a run, has no such checkpoint, or a file in it is damaged.
        ValueError: another `which`.
    """
    if which not in ("best", "last", "average"):
        raise ValueError(f"which is {which!r}; expected 'best', 'last' or 'average'")
    run = RunFolder(folder)
    saved = read_json(run.config)
    config: TrainConfig | ModelConfig
    tokenizer: Tokenizer | PairTokenizer
    if "imported" in saved:
        config, tokenizer, generation = load_imported(run.root, saved)
        model = build_imported(config)
    else:
        config, generation = load_config(run, saved), load_generation(run, saved)
        tokenizer = load_tokenizer(run, saved, config)
        model = build(config, len(tokenizer))
    if which == "best":
        step = run.best_step()
        state = run.state(step)
        if (best := state.get("scores")) and run.average.exists():
            average = describe_average(run)
            same = average.bleu_sentences == state.get("best_sentences", 0)
            if is_better(average.scores, best, same_sentences=same):
                which = "average"
    if which == "average":
        average = load_average(run)
        step, tensors, scores = average.steps[-1], average.tensors, average.scores
    else:
        if which == "last":
            step = run.newest_step()
        tensors, state = run.load_eval_weights(step)
        scores = state.get("scores") or {}
    load_model_tensors(model, tensors)
    return Trained(model.to(device).eval(), tokenizer, config, step, scores, generation)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state as tensors named "<parameter>:<entry>", full as those of `model_tensors`.

    Processes must gather sharded tensors in one order, so the entries, which a file may give in any, are sorted.
    """
    return {
        f"{name}:{entry}": gather_full(torch.as_tensor(value))
        for name, parameter in model.named_parameters()
        for entry, value in sorted(optimizer.state[parameter].items())
    }


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`; tensors are moved to their parameter's device, and sharded as it is."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for key, tensor in tensors.items():
        name, entry = key.rsplit(":", 1)
        parameter = parameters[name]
        moment = tensor.shape == parameter.shape and entry != "step"
        optimizer.state[parameter][entry] = (
            distribute_like(tensor, parameter) if moment else tensor.to(parameter.device)
        )
