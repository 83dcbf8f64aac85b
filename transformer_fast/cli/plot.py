"""The command `plot`: pictures of the positional encoding and of a translation's attention."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.add_argument(
        "--out", default=".", metavar="DIR", help="folder for the pictures (default: the current folder)"
    )
    command.add_argument("--model", metavar="DIR", help="folder of a trained model; draws its attention too")
    command.add_argument("--text", help="sentence to translate, with --model")
    command.add_argument("--dark", action="store_true", help="draw on a dark ground")


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ValueError: only one of --model and --text.
    """
    if (args.model is None) != (args.text is None):
        raise ValueError("--model and --text belong together: the picture of attention needs both")
    from .plots import attention_picture, positional_picture

    out = Path(args.out)
    print(positional_picture(out / "positional_encoding.png", args.dark))
    if args.model:
        from ..translation import load_trained
        from ..translation.translator import Translator

        trained = load_trained(args.model, device=args.device)
        translator = Translator(trained.model, trained.tokenizer, config=trained.generation)
        ids = translator.decode_ids([args.text])[0]
        print(attention_picture(out / "attention.png", trained.model, trained.tokenizer, args.text, ids, args.dark))
    return 0
