"""Two processes train as one does: DDP and FSDP2 around the layers, the train command, activation checkpointing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_training
import torch
from small_training import log_of
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.translation import RunFolder, read_parallel
from transformer_fast.translation.batching import Corpus, TokenBatches
from transformer_fast.translation.numbers import make_numbers_corpus
from transformer_fast.translation.ranks import Ranks, seed_rank
from transformer_fast.translation.tokenizer import PAD, Tokenizer

SCRIPT = str(Path(__file__).parents[1] / "support" / "ranks_training.py")
ROOT = str(Path(__file__).parents[2])
TOLERANCE = 2e-4  # tolerance of a weight after a run, because gradients are summed in another order
NO_GRADIENT = "k_linear.bias"  # moves every score of a query alike: its gradient is rounding, which Adam makes a step


def run(processes: int, *args: str) -> None:
    if processes == 1:
        ranks_training.main(*args)
        return
    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, SCRIPT, *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow("starts three processes for half a minute")
def test_layers_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        run(processes, "layers", str(tmp_path / str(processes)))
    for file in sorted((tmp_path / "1").iterdir()):
        alone, together = (torch.load(tmp_path / p / file.name) for p in ("1", "2"))
        torch.testing.assert_close(torch.tensor(together["losses"]), torch.tensor(alone["losses"]), atol=1e-5, rtol=0)
        assert abs(alone["losses"][-1] - alone["losses"][0]) > 0.01
        prefix = "module." if next(iter(together["state"])).startswith("module.") else ""
        for name, tensor in alone["state"].items():
            torch.testing.assert_close(together["state"][prefix + name], tensor, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("corpus")
    make_numbers_corpus(folder, 120, 12)
    return {
        "source": str(folder / "train.en"), "target": str(folder / "train.de"),
        "valid_source": str(folder / "test.en"), "valid_target": str(folder / "test.de"),
        "vocab_size": 80, "d_model": 16, "heads": 2, "layers": 1, "d_ff": 24, "dropout": 0.0, "max_length": 60,
        "batch_tokens": 200, "accumulate": 2, "warmup": 4, "valid_every": 3, "bleu_sentences": 4, "device": "cpu",
    }  # fmt: skip


def groups(folder: Path, step: int = 6) -> dict[str, torch.Tensor]:
    """Return weights, moving average and Adam's moments."""
    loaded = RunFolder(folder).load(step).tensors
    names = [(group, name) for group in loaded for name in loaded[group] if not name.startswith("rng:")]
    return {f"{group}:{name}": loaded[group][name] for group, name in names}


@pytest.mark.slow("starts the command eight times")
def test_the_train_command_on_any_number_of_processes_whole_or_sharded(
    corpus: dict[str, object], tmp_path: Path
) -> None:
    """Two processes (DDP, FSDP2, FSDP2 with activation checkpointing) train as one does; a run that began in one of
    these ways continues in another."""
    shard, again = {"shard": True}, {"checkpoint_activations": True}

    def train(processes: int, *parts: tuple[str, int, dict[str, bool]]) -> None:
        common = corpus | {"ema": 0.9, "average_last": 2}
        options = [common | {"save": str(tmp_path / name), "max_steps": n, **how} for name, n, how in parts]
        run(processes, "command", json.dumps(options), str(tmp_path / f"{parts[-1][0]}-{processes}"))

    train(1, ("alone", 6, {}), ("one-shard", 3, shard))  # a single process has nothing to shard
    train(
        2,
        *(("ddp", 6, {}), ("ddp-one", 3, {})),
        *(("fsdp", 6, shard), ("fsdp-again", 6, shard | again), ("shard-ddp", 3, shard), ("shard-one", 3, shard)),
        ("one-shard", 6, shard),
    )
    train(2, ("shard-ddp", 6, again))  # joins its processes by itself
    train(1, ("ddp-one", 6, {}), ("shard-one", 6, {}))
    expected, log = groups(tmp_path / "alone"), log_of(tmp_path / "alone")
    assert [line["step"] for line in log] == [3, 6, 6]
    for name in ("ddp", "ddp-one", "fsdp", "fsdp-again", "shard-ddp", "shard-one", "one-shard"):
        found = groups(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            if NO_GRADIENT not in key:
                assert torch.allclose(tensor, expected[key], atol=TOLERANCE, rtol=0), (name, key)
        for ours, theirs in zip(log_of(tmp_path / name), log, strict=True):
            assert (ours["step"], ours["tokens"]) == (theirs["step"], theirs["tokens"])
            for loss in {"valid_loss", "average_valid_loss"} & theirs.keys():
                assert ours[loss] == pytest.approx(theirs[loss], abs=1e-4)
    first, second = (json.loads((tmp_path / f"shard-ddp-2.{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and [part["step"] for part in first] == [6] and first[0]["average_scores"]


def test_the_parts_of_a_batch_are_the_batch(corpus: dict[str, object]) -> None:
    text = read_parallel(corpus["source"], corpus["target"])
    pairs = Corpus(text, Tokenizer.train((*text.source, *text.target), 80))
    whole = TokenBatches(pairs, 60, seed=0)
    empty = 0
    for _ in range(20):
        place = whole.epoch, whole.position
        batch = whole.next_batch()[0]
        parts = []
        for rank in range(4):
            whole.seek(*place)
            part, tokens = whole.next_batch(rank, 4)
            assert tokens == batch.tokens and part.tokens == int((part.target_out != PAD).sum())
            empty += part.tokens == 0
            parts += [row[row != PAD].tolist() for row in part.target_out if part.tokens]
        assert sorted(parts) == sorted(row[row != PAD].tolist() for row in batch.target_out)
    assert empty, "no batch had fewer rows than there are processes"


def test_each_process_draws_its_own_dropout() -> None:
    ranks, drawn = Ranks(), []
    for rank in range(3):
        torch.manual_seed(1)
        ranks.rank = rank
        seed_rank(ranks, seed=0, step=0)
        drawn.append(torch.rand(4).tolist())
    torch.manual_seed(1)
    assert drawn[0] == torch.rand(4).tolist() and len(set(map(tuple, drawn))) == 3


def test_activation_checkpointing_draws_the_same_dropout() -> None:
    """The mask follows from a seed of torch's generator, so the second forward draws it again."""
    stock = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.3, batch_first=True)
    classic = reference.EncoderLayer(16, 2, dropout=0.3, d_ff=24)
    tfast.accelerate(stock), tfast.accelerate(classic)
    keep = torch.arange(7) < torch.tensor([7, 4, 1]).unsqueeze(1)
    x = torch.randn(3, 7, 16, requires_grad=True)
    for layer, mask in (
        (tfast.layers.EncoderLayer(16, 2, 0.3, d_ff=24), keep.unsqueeze(1)),
        (stock, None),
        (classic, keep.unsqueeze(1)),
    ):
        grads = []
        for again in (False, True):
            torch.manual_seed(4)
            out = checkpoint(layer, x, mask, use_reentrant=False) if again else layer(x, mask)
            grads.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
