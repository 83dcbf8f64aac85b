"""Compare classification with int8 weights to fp32: accuracy of a BERT that is trained here, on made sentences.

    python benchmarks/compare_int8.py --out results

A sentence has more good words than bad ones, or the reverse; the label says which. The exit code is 1 if int8 loses
more than --loss points of accuracy. With --out, compare_int8.json is written there.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import records
import torch
import transformers
from torch import Tensor

import transformer_fast as tfast
from transformer_fast.accelerate import Int8

NEUTRAL, SIDE = 80, 5
"""Number of neutral words, and of good words and of bad ones; ids are 2 and on, in this order."""


def batch(random: torch.Generator, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make sentences: arguments of the model, and labels (count,)."""
    longest = 96
    ids, labels = torch.zeros(count, longest, dtype=torch.long), torch.randint(2, (count,), generator=random)
    for row, label in zip(ids, labels.tolist(), strict=True):
        length = int(torch.randint(12, longest, (1,), generator=random))
        few = length // 8
        many = few + 1 + int(torch.randint(3, (1,), generator=random))
        good, bad = (many, few) if label else (few, many)
        words = torch.cat([
            2 + NEUTRAL + torch.randint(SIDE, (good,), generator=random),
            2 + NEUTRAL + SIDE + torch.randint(SIDE, (bad,), generator=random),
            2 + torch.randint(NEUTRAL, (length - good - bad,), generator=random),
        ])  # fmt: skip
        row[0] = 1
        row[1 : 1 + length] = words[torch.randperm(length, generator=random)][: longest - 1]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}, labels


def trained(steps: int, random: torch.Generator) -> transformers.PreTrainedModel:
    """Return a model that was trained on made sentences."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=2 + NEUTRAL + 2 * SIDE, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=32,  # with two, the head would stay in fp32
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for _ in range(steps):
        given, labels = batch(random, 32)
        optimizer.zero_grad()
        model(**given, labels=labels).loss.backward()
        optimizer.step()
    return model.eval()


@torch.inference_mode()
def logits_of(model: torch.nn.Module, batches: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """Logits of all sentences, (sentences, labels)."""
    return torch.cat([model(**given).logits for given, _ in batches])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=4096, help="test sentences (default: %(default)s)")
    parser.add_argument("--loss", type=float, default=0.5, help="largest loss of points (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for compare_int8.json")
    args = parser.parse_args(arguments)
    random = torch.Generator().manual_seed(1)
    model = trained(args.steps, random)
    batches = [batch(random, 64) for _ in range(max(1, args.sentences // 64))]
    labels = torch.cat([label for _, label in batches])
    weights: dict[str, Int8 | None] = {"fp32": None, "int8": Int8(keep=["classifier"]), "int8 with its head": Int8()}
    results: dict[str, dict[str, Any]] = {}
    exact = None
    print("| weights | accuracy | answers as in fp32 | error of the logits |\n| --- | --- | --- | --- |")
    for name, quantize in weights.items():
        one = copy.deepcopy(model)
        tfast.accelerate(one, packed=True, quantize=quantize)
        logits = logits_of(one, batches)
        exact = logits if exact is None else exact
        result = {
            "accuracy": (logits.argmax(1) == labels).float().mean().item(),
            "same": (logits.argmax(1) == exact.argmax(1)).float().mean().item(),
            "error": ((logits - exact).norm() / exact.norm()).item(),
        }
        results[name] = result
        print(f"| {name} | {result['accuracy']:.2%} | {result['same']:.2%} | {result['error']:.4f} |", flush=True)
    if args.out:
        what = "classification with int8 weights against fp32"
        run = {"what": what, "sentences": len(labels), "results": results}
        records.save(args.out / "compare_int8.json", run, "transformers")
    return int(any(r["accuracy"] < results["fp32"]["accuracy"] - args.loss / 100 for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
