"""Target tokens per second of training on a corpus: with padding in the layers, packed, and packed in bfloat16.

    python benchmarks/compare_training.py --source train.en.gz --target train.de.gz --out results

Each side makes whole updates (loss, gradients, clipping, Adam) of a recipe's model, on batches of the first epoch. Each
batch runs on every side before the next batch. The targets of a batch have nearly equal lengths, so packing skips
little more than the padding of the sources; the table shows its share. bfloat16 is timed if the CPU has instructions
for products of bfloat16.

The table is printed. With --out, compare_training.json is written there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import records
import torch

from transformer_fast.translation import Tokenizer, TrainConfig, build_model, load_recipe, read_parallel
from transformer_fast.translation.batching import Corpus, TokenBatches
from transformer_fast.translation.environment import choose_device, multiplies_bf16
from transformer_fast.translation.learner import Learner
from transformer_fast.translation.ranks import Ranks
from transformer_fast.translation.tokenizer import PAD

SIDES: dict[str, dict[str, Any]] = {
    "padded": {"packed": False, "amp": "off"},
    "packed": {"packed": True, "amp": "off"},
    "packed, bf16": {"packed": True, "amp": "bf16"},
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Result for one size of batches.

    Attributes:
        batch_tokens: most padded tokens of a batch, on either side.
        source_padding, target_padding: share of the positions that are padding.
        tokens_per_second: target tokens, by side.
    """

    batch_tokens: int
    source_padding: float
    target_padding: float
    tokens_per_second: dict[str, float]


def sides_of(device: torch.device) -> list[str]:
    """Return the sides that the device has instructions for."""
    bf16 = device.type == "cuda" or multiplies_bf16()
    return [side for side, settings in SIDES.items() if bf16 or settings["amp"] == "off"]


def compare(config: TrainConfig, corpus: Corpus, vocabulary: int, updates: int) -> Result:
    """Updates on every side, after one that warms up."""
    device = choose_device(config)
    learners = {}
    for side in sides_of(device):
        own = dataclasses.replace(config, **SIDES[side])
        learners[side] = Learner(own, build_model(own, vocabulary), device, Ranks())
    batches = TokenBatches(corpus, config.batch_tokens, config.seed)
    seconds = dict.fromkeys(learners, 0.0)
    tokens, padding, positions = 0, [0, 0], [0, 0]
    for step in range(updates + 1):
        batch, count = batches.next_batch()
        for side, learner in learners.items():
            start = time.perf_counter()
            loss, _ = learner.update(step + 1, [batch], count)
            float(loss)  # waits for a GPU
            seconds[side] += (time.perf_counter() - start) * (step > 0)
        if step > 0:
            tokens += count
            for n, ids in enumerate((batch.source, batch.target_in)):
                padding[n] += int((ids == PAD).sum())
                positions[n] += ids.numel()
    shares = (padding[n] / positions[n] for n in range(2))
    return Result(config.batch_tokens, *shares, {side: tokens / taken for side, taken in seconds.items()})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="file of sentences, one per line, plain or .gz")
    parser.add_argument("--target", required=True, help="file of translations, line by line")
    parser.add_argument("--recipe", default="multi30k-tiny", help="default: %(default)s")
    parser.add_argument("--batch-tokens", type=int, nargs="+", default=[2048, 8192], help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=20, help="timed updates of each side (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads (default: all cores)"
    )
    parser.add_argument("--out", type=Path, help="folder for compare_training.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    given = {"source": args.source, "target": args.target, "save": "not written"}
    config = TrainConfig(**{**load_recipe(args.recipe).training, **given})
    text = read_parallel(args.source, args.target)
    tokenizer = Tokenizer.train((*text.source, *text.target), config.vocab_size, lowercase=config.lowercase)
    corpus = Corpus(text, tokenizer, config.max_length)
    sides = sides_of(choose_device(config))
    print(f"| tokens per batch | padding: source | target | {' | '.join(sides)} |\n|{' --- |' * (3 + len(sides))}")
    results = []
    for size in args.batch_tokens:
        result = compare(dataclasses.replace(config, batch_tokens=size), corpus, len(tokenizer), args.updates)
        results.append(result)
        padded = result.tokens_per_second["padded"]
        speeds = (f"{speed:.0f} ({speed / padded:.2f})" for speed in result.tokens_per_second.values())
        shares = f"{result.source_padding:.1%} | {result.target_padding:.1%}"
        print(f"| {size} | {shares} | {' | '.join(speeds)} |", flush=True)
    if args.out:
        run = {
            "what": "target tokens per second of whole updates, each batch on every side before the next",
            "recipe": args.recipe,
            "updates": args.updates,
            "threads": args.threads,
            "results": [dataclasses.asdict(result) for result in results],
        }
        records.save(args.out / "compare_training.json", run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
