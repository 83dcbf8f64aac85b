"""The command `score`: BLEU of translations, by sacreBLEU's default and for tokenised text, as papers report it."""

from __future__ import annotations

import argparse

from .. import read_parallel
from ..evaluate import corpus_bleu

READING = {
    "detokenised, cased": {"lowercase": False, "tokenize": "13a"},
    "lower-cased, tokenised (13a)": {"lowercase": True, "tokenize": "13a"},
    "lower-cased, tokenised by you": {"lowercase": True, "tokenize": "none"},
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.description = (
        "BLEU of a corpus, one reference a line, twice: sacreBLEU's default, to compare systems by, and without case,"
        " as the papers on Multi30k report it. Under each stands sacreBLEU's signature, which says how it was"
        " computed. Those papers tokenise with Moses before they score: give such files with --tokenized; else both"
        " are split by sacreBLEU's own 13a, which is close to it, but not the same."
    )
    command.add_argument("--hypotheses", required=True, metavar="F", help="translations, one per line, plain or .gz")
    command.add_argument("--references", required=True, metavar="F", help="the right ones, line by line")
    command.add_argument(
        "--tokenized", action="store_true", help="the files are tokenised: also count their words as they stand"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    text = read_parallel(args.hypotheses, args.references, may_be_blank=True)
    for name, options in READING.items():
        if args.tokenized or options["tokenize"] != "none":
            bleu = corpus_bleu(text.source, text.target, **options)
            print(f"BLEU {bleu.score:6.2f}  {name}\n             {bleu.signature}")
    return 0
