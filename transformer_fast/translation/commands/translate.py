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
        help="what `train --save` or `import --save` wrote; of several, the mean of their probabilities decides",
    )
    command.add_argument("--average", action="store_true", help="one model with the mean weights of all that are given")
    command.add_argument(
        "--which", choices=("best", "last", "average"), default="best", help="checkpoint (default: %(default)s)"
    )
    command.add_argument("--input", metavar="F", help="read this file, plain or .gz, not standard input")
    command.add_argument("--output", metavar="F", help="write this file, not standard output")
    command.add_argument(
        "--batch-tokens", type=int, metavar="N", default=8192, help="source tokens x beam in a batch, at most"
    )
    command.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=1,
        help="how many batches are translated at a time, each with its share of the processors (default: 1)",
    )
    command.add_argument("--quiet", action="store_true", help="no progress, only errors")
    number = {"type": int, "metavar": "N", "default": argparse.SUPPRESS}
    real = {"type": float, "metavar": "X", "default": argparse.SUPPRESS}
    flag = {"action": "store_true", "default": argparse.SUPPRESS}
    searching = command.add_argument_group(
        "search", "defaults: those of the run, from its recipe or the imported model; else those named here"
    )
    searching.add_argument("--beam", **number, help="hypotheses; 1 is greedy (default: 5)")
    searching.add_argument("--length-penalty", **real, help="alpha of the length penalty (default: 0.6)")
    searching.add_argument(
        "--length-norm",
        choices=("gnmt", "power"),
        default=argparse.SUPPRESS,
        help="divide by the GNMT penalty (default) or by length^alpha",
    )
    searching.add_argument("--coverage-penalty", **real, help="beta of the GNMT penalty (default: 0)")
    searching.add_argument("--no-repeat-ngram", **number, help="no N tokens in a row twice (default: off)")
    searching.add_argument("--repetition-penalty", **real, help="on tokens already there (default: 1, off)")
    span = {"type": _span, "metavar": "N|A,B", "default": argparse.SUPPRESS}
    limit = "at most, end included: a number, or A,B for A * source length + B (default: 2,20)"
    searching.add_argument("--max-length", **span, help=f"tokens of a translation {limit}")
    searching.add_argument("--min-length", **span, help="tokens at least, in the same two forms")
    searching.add_argument("--patience", **real, help="stop after X * beam have finished (default: 1)")
    searching.add_argument(
        "--slots",
        choices=("close", "keep"),
        default=argparse.SUPPRESS,
        help="of hypotheses that finish: close them (default), or keep the beam wide",
    )
    searching.add_argument("--early-stop", **flag, help="stop at the first that finish: --n-best, or the whole beam")
    searching.add_argument("--no-unk", action="store_true", help="never say the unknown token")
    command.add_argument(
        "--quantize", choices=("int8",), default=argparse.SUPPRESS, help="multiply with int8 weights, on a CPU"
    )
    drawing = command.add_argument_group("drawing random translations, instead of searching for the best")
    drawing.add_argument("--sample", **flag, help="draw --n-best translations of every line")
    drawing.add_argument("--temperature", **real, help="below 1 bolder, above 1 wilder (default: 1)")
    drawing.add_argument("--top-k", **number, help="from the N most likely tokens (default: all)")
    drawing.add_argument("--top-p", **real, help="from the fewest tokens that make up X (default: 1)")
    drawing.add_argument("--seed", **number, help="seed of the random draws")
    telling = command.add_argument_group(
        "output", "tab-separated columns: the line's number (--n-best), score, text, alignment"
    )
    telling.add_argument(
        "--n-best", type=int, metavar="N", default=1, help="number of translations per line, best first"
    )
    telling.add_argument("--scores", action="store_true", help="the score before each translation")
    telling.add_argument(
        "--alignments", action="store_true", help="after each translation, pairs source-target of words, from 0"
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
