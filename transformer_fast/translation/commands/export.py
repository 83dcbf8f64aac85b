"""The command `export`: a run as a folder of another program."""

from __future__ import annotations

import argparse

from .. import ConfigError
from ..checkpoints import export_ctranslate2, export_hf

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.description = "Write a run as a folder that Hugging Face transformers or CTranslate2 load."
    command.add_argument(
        "--model",
        "--run",
        dest="model",
        required=True,
        metavar="DIR",
        help="folder of the run, which `train` or `import` wrote",
    )
    command.add_argument("--to", choices=("hf", "ctranslate2"), required=True, help="target program")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")
    command.add_argument(
        "--which",
        choices=("best", "last", "average"),
        default="best",
        help="checkpoint to export (default: %(default)s)",
    )
    command.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="type of the weights, with --to ctranslate2 (default: float32)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.to == "hf":
        if args.quantization is not None:
            raise ConfigError("--quantization is for --to ctranslate2; a Hugging Face folder has fp32 weights")
        export_hf(args.model, args.out, which=args.which)
    else:
        export_ctranslate2(args.model, args.out, which=args.which, quantization=args.quantization)
    print(f"{args.out}: {args.model} for {'transformers' if args.to == 'hf' else 'CTranslate2'}")
    return 0
