"""Demo, end to end: make a corpus, train on it, translate unseen sentences, check and time the ops, and draw pictures.

The task is English number names to German ones ("two thousand forty-one" -> "zweitausendeinundvierzig"). The task needs
no data, but words change places, and nearly all of the million sentences are unseen.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import torch

from ..translation import load_trained, parse_duration, read_lines, train
from ..translation.numbers import english, make_numbers_corpus, numbers_config
from ..translation.translator import Translator
from .plots import attention_picture, positional_picture
from .speed import format_speed, speed
from .verification import describe, parity, print_parity

TRAINING_PAIRS, UNSEEN = 25_000, 1_000
GOAL = 0.98
PICTURED = 342_059  # a held-out number that reorders twice and has no word twice
EXAMPLES = 6

say = partial(print, flush=True)  # training reports on standard error; keep the order of both streams


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.add_argument(
        "--out", default="demo", metavar="DIR", help="folder for the model and the pictures (default: %(default)s)"
    )
    command.add_argument(
        "--max-steps", type=int, metavar="N", help="number of training updates (default: that of the recipe)"
    )
    command.add_argument(
        "--max-time",
        metavar="T",
        default="5m",
        help="stop training after this time, such as 90s or 20m (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if the accuracy missed its goal, or an op failed."""
    changes: dict[str, object] = {"max_time": parse_duration(args.max_time)}
    if args.max_steps is not None:
        changes["max_steps"] = args.max_steps
    return 0 if demo(args.out, device=args.device, **changes) else 1


def demo(folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", **changes: object) -> bool:
    """Run all parts and print their results; return True if the accuracy reached its goal and every op passed.

    folder: receives the corpus (data/), the run (run/) and the pictures. A run that is already there is used, or
        continued if it was interrupted.
    device: device for all parts. changes: training settings that override the recipe's.
    Raises KeyboardInterrupt if the training was interrupted; the run can be continued.
    """
    folder, device, started = Path(folder), torch.device(device), time.perf_counter()
    say(f"transformer_fast on {describe(device)}\n")

    say(f"1. train on {TRAINING_PAIRS:,} spelled-out numbers, English to German")
    corpus = make_numbers_corpus(folder / "data", TRAINING_PAIRS, UNSEEN)
    run = folder / "run"
    result = train(numbers_config(folder / "data", run, device=str(device), **changes))
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    say(f"   {result.step:,} updates, {result.tokens:,} tokens, {result.seconds:.0f} s\n")

    # The last weights, not the best on validation: the test numbers must not select the model.
    trained = load_trained(run, which="last", device=device)
    translator = Translator(trained.model, trained.tokenizer, beam=1)
    accurate = _translate(translator, read_lines(corpus["test_source"]), read_lines(corpus["test_target"]))

    say("\n3. error of every op and of the whole model")
    say("   error: largest difference to fp64. It may be twice that of plain PyTorch (eager), + 4 ulp.\n")
    passed = print_parity(parity(device, [torch.float32]), indent="   ")

    say("\n4. speed on this machine; fast and eager are timed in turn\n")
    for line in format_speed(speed(device)):
        say(f"   {line}")

    say("\n5. pictures")
    source = english(PICTURED)
    ids = translator.decode_ids([source])[0]
    say(f"   {attention_picture(folder / 'attention.png', trained.model, trained.tokenizer, source, ids)}")
    say(f"   {positional_picture(folder / 'positional_encoding.png')}")

    say(f"\n{time.perf_counter() - started:.0f} s in all. The model: {run}. Try it:")
    say(f'   echo "{source}" | python -m transformer_fast translate --model {run}')
    return accurate and passed


def _translate(translator: Translator, sources: list[str], expected: list[str]) -> bool:
    say(f"2. translate {len(sources):,} numbers it has never seen")
    start = time.perf_counter()
    answers = list(translator.translate(sources))
    seconds = time.perf_counter() - start
    wrong = [triple for triple in zip(sources, answers, expected, strict=True) if triple[1] != triple[2]]
    accuracy = 1 - len(wrong) / len(sources)
    by_length = sorted(zip(sources, answers, strict=True), key=lambda pair: -len(pair[0]))
    shown = by_length[:: -(-len(sources) // EXAMPLES)]
    for source, answer in shown:
        say(f"   {source}\n      -> {answer}")
    for source, answer, right in wrong[:3]:
        say(f"   wrong: {source}\n      -> {answer}\n   not -> {right}")
    verdict = "" if accuracy >= GOAL else f", below the goal of {GOAL:.0%}"
    say(f"   exactly right: {accuracy:.1%} ({len(sources) - len(wrong):,} of {len(sources):,}){verdict}")
    say(f"   {len(sources) / seconds:.0f} sentences per second, greedy")
    return accuracy >= GOAL
