"""The command `translate`: lines of text in, their translations out, in order, for a file of any length."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ...generation import GenerationConfig
from .. import ConfigError, load_trained
from ..averaging import average_models
from ..errors import DataError
from ..progress import LineProgress
from ..text import decode_line, open_text
from ..translator import CHUNK_LINES, Translation, Translator


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.usage = "%(prog)s --model DIR [DIR ...] [options]"
    command.add_argument(
        "--model",
        required=True,
        nargs="+",
        metavar="DIR",
        help="folder that `train --save` or `import --save` wrote; the mean probabilities of several models decide",
    )
    command.add_argument(
        "--average", action="store_true", help="translate with one model, whose weights are the mean of all models"
    )
    command.add_argument(
        "--which", choices=("best", "last", "average"), default="best", help="checkpoint to use (default: %(default)s)"
    )
    command.add_argument("--input", metavar="F", help="file to read, plain or .gz (default: standard input)")
    command.add_argument("--output", metavar="F", help="file to write (default: standard output)")
    command.add_argument(
        "--batch-tokens",
        type=int,
        metavar="N",
        default=8192,
        help="largest number of source tokens x beam per batch (default: %(default)s)",
    )
    command.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=1,
        help="number of batches translated at a time; each gets an equal share of the CPU cores (default: 1)",
    )
    command.add_argument("--quiet", action="store_true", help="print no progress, only errors")
    number = {"type": int, "metavar": "N", "default": argparse.SUPPRESS}
    real = {"type": float, "metavar": "X", "default": argparse.SUPPRESS}
    flag = {"action": "store_true", "default": argparse.SUPPRESS}
    searching = command.add_argument_group(
        "search", "the defaults are those of the run (its recipe, or the imported model), else those named here"
    )
    searching.add_argument("--beam", **number, help="number of hypotheses; 1: greedy search (default: 5)")
    searching.add_argument("--length-penalty", **real, help="alpha of the length penalty (default: 0.6)")
    searching.add_argument(
        "--length-norm",
        choices=("gnmt", "power"),
        default=argparse.SUPPRESS,
        help="divide scores by the GNMT penalty (default) or by length^alpha",
    )
    searching.add_argument("--no-repeat-ngram", **number, help="never repeat a sequence of N tokens (default: off)")
    searching.add_argument(
        "--repetition-penalty", **real, help="penalty on tokens that the translation already has (default: 1, off)"
    )
    span = {"type": _span, "metavar": "N|A,B", "default": argparse.SUPPRESS}
    limit = "end token included: a number, or A,B for A * source length + B (default: 2,20)"
    searching.add_argument("--max-length", **span, help=f"largest number of tokens in a translation, {limit}")
    searching.add_argument("--min-length", **span, help="smallest number of tokens, in the same two forms")
    searching.add_argument("--patience", **real, help="stop after X * beam finished hypotheses (default: 1)")
    searching.add_argument(
        "--slots",
        choices=("close", "keep"),
        default=argparse.SUPPRESS,
        help="close: a finished hypothesis narrows the beam (default); keep: the beam stays as wide",
    )
    searching.add_argument(
        "--early-stop", **flag, help="stop at the first --n-best finished hypotheses (--slots keep: --beam)"
    )
    searching.add_argument("--no-unk", action="store_true", help="never write the unknown token")
    command.add_argument(
        "--quantize", choices=("int8",), default=argparse.SUPPRESS, help="quantise the weights to int8 (CPU only)"
    )
    drawing = command.add_argument_group("sampling (random translations instead of a search)")
    drawing.add_argument("--sample", **flag, help="draw --n-best random translations per line")
    drawing.add_argument(
        "--temperature", **real, help="divide logits by X: above 1 more random, below 1 less (default: 1)"
    )
    drawing.add_argument("--top-k", **number, help="draw from the N most likely tokens (default: all)")
    drawing.add_argument(
        "--top-p", **real, help="draw from the fewest tokens whose probabilities sum to X (default: 1)"
    )
    drawing.add_argument("--seed", **number, help="seed of the random draws")
    telling = command.add_argument_group(
        "output", "tab-separated columns: line number (with --n-best), score, text, alignment"
    )
    telling.add_argument(
        "--n-best", type=int, metavar="N", default=1, help="number of translations per line, best first"
    )
    telling.add_argument("--scores", action="store_true", help="write the score before each translation")
    telling.add_argument(
        "--alignments",
        action="store_true",
        help="write the alignment after each translation: source-target pairs of word numbers, from 0",
    )


def _span(text: str) -> int | tuple[float, float]:
    """A number of tokens, or two numbers a,b for a * source length + b."""
    slope, comma, base = text.partition(",")
    try:
        return (float(slope), float(base)) if comma else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor two numbers a,b") from None


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 if a line could not be translated (its line of the output is empty).

    Raises:
        DataError: the text breaks off; the lines before are translated.
    """

    if args.input and args.output and Path(args.output).exists() and os.path.samefile(args.input, args.output):
        raise ValueError(f"--input and --output are the same file, {args.input}; it would be lost")
    name, failed = args.input or "standard input", False
    # For interactive input, translate each line at once and show no progress.
    typed = not args.input and sys.stdin.buffer.isatty()
    with contextlib.ExitStack() as stack:
        source = _Input(stack.enter_context(open_text(args.input or sys.stdin.buffer, name=name)))
        translator = _translator(args)
        target = stack.enter_context(open(args.output, "wb")) if args.output else sys.stdout.buffer
        progress = stack.enter_context(LineProgress(lambda: _count(args.input), hidden=typed or args.quiet))

        def report(number: int, reason: str) -> None:
            nonlocal failed
            failed = True
            progress.message(f"{name}, line {number}: {reason}; its translation is left empty")

        # Workers read ahead, which would block on interactive input.
        chunk_lines, workers = (1, 1) if typed else (CHUNK_LINES, args.workers)
        answers = translator.translations(source, chunk_lines=chunk_lines, workers=workers, on_error=report)
        for number, found in enumerate(answers, start=1):
            for translation in found:
                target.write(_columns(args, number, translation).encode("utf-8") + b"\n")
            progress.update()
            if typed:
                target.flush()
        target.flush()
    if source.damage:
        raise source.damage
    return 1 if failed else 0


def _translator(args: argparse.Namespace) -> Translator:

    runs = [load_trained(folder, which=args.which, device=args.device) for folder in args.model]
    tokenizer = runs[0].tokenizer
    for folder, trained in zip(args.model, runs, strict=True):
        if trained.tokenizer.model != tokenizer.model:
            first = args.model[0]
            raise ConfigError(
                f"{folder} has another tokenizer than {first}; models that translate together must share one"
            )
    models = [trained.model.requires_grad_(False) for trained in runs]
    names = [field.name for field in dataclasses.fields(GenerationConfig)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    generation = runs[0].generation
    if given.get("sample") and "beam" not in given:
        given["beam"] = 1
    if given.get("slots") == "close" and generation.early_stop == "now":
        given.setdefault("early_stop", False)
    if args.no_unk:
        given["suppress"] = {*generation.suppress, tokenizer.unk}
    return Translator(
        average_models(models) if args.average else models,
        tokenizer,
        config=dataclasses.replace(generation, **given, keep_weights=True),
        batch_tokens=args.batch_tokens,
        longest=min(trained.config.max_length for trained in runs),
    )


def _columns(args: argparse.Namespace, number: int, translation: Translation) -> str:
    columns = [str(number)] if args.n_best > 1 else []
    if args.scores:
        columns.append("" if math.isnan(translation.score) else f"{translation.score:.4f}")
    columns.append(translation.text)
    if args.alignments:
        columns.append(" ".join(f"{source}-{target}" for source, target in translation.alignment or ()))
    return "\t".join(columns)


def _count(path: str | None) -> int | None:
    """The number of lines of a file; None for standard input, which cannot be read twice, and for a damaged file."""

    if not path:
        return None
    try:
        with open_text(path) as lines:
            return sum(1 for _ in lines)
    except DataError:
        return None


class _Input(Iterator["str | Exception"]):
    """Iterator over the lines of a text; yields the error for a line that is not UTF-8. A truncated text ends early and
    sets `damage`."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self._lines = lines
        self.damage: Exception | None = None

    def __next__(self) -> str | Exception:

        try:
            line = next(self._lines)
        except DataError as error:
            self.damage = error
            raise StopIteration from None
        try:
            return decode_line(line)
        except ValueError as error:
            return error
