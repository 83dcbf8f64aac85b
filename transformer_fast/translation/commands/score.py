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
        "Compute the BLEU of a corpus, with one reference per line. Two scores are printed: sacreBLEU's default, to"
        " compare systems, and lower-cased BLEU, as papers on Multi30k report it. sacreBLEU's signature below each"
        " score tells how it was computed. Those papers tokenise with Moses before they score: pass such files with"
        " --tokenized. Other files are split by sacreBLEU's tokeniser 13a, which is similar but not the same."
    )
    command.add_argument(
        "--hypotheses", required=True, metavar="F", help="translations to score, one per line, plain or .gz"
    )
    command.add_argument("--references", required=True, metavar="F", help="reference translations, line by line")
    command.add_argument(
        "--tokenized", action="store_true", help="the files are tokenised already; also score them without tokenising"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    text = read_parallel(args.hypotheses, args.references, may_be_blank=True)
    for name, options in READING.items():
        if args.tokenized or options["tokenize"] != "none":
            bleu = corpus_bleu(text.source, text.target, **options)
            print(f"BLEU {bleu.score:6.2f}  {name}\n             {bleu.signature}")
    return 0
