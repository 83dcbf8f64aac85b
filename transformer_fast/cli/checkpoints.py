"""The commands `import` and `export`: models of other programs in, and ours out."""

from __future__ import annotations

import argparse

QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")


def add_import_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `import`."""
    command.description = (
        "Make a run of a Hugging Face folder of a Marian or OPUS-MT model. `translate --model` takes it and searches as"
        " the folder's generation_config.json says."
    )
    command.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="config.json, model.safetensors or pytorch_model.bin, source.spm, target.spm, vocab.json",
    )
    command.add_argument("--save", required=True, metavar="DIR", help="folder of the run; must not be there yet")


def add_export_arguments(command: argparse.ArgumentParser) -> None:
    """The flags of `export`."""
    command.description = "Write a run as a folder that Hugging Face transformers or CTranslate2 load."
    command.add_argument(
        "--model", "--run", dest="model", required=True, metavar="DIR", help="what `train` or `import --save` wrote"
    )
    command.add_argument("--to", choices=("hf", "ctranslate2"), required=True, help="for which program")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not be there yet")
    command.add_argument(
        "--which", choices=("best", "last", "average"), default="best", help="checkpoint (default: %(default)s)"
    )
    command.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="of the weights, with ctranslate2 (default: none, fp32)"
    )


def run_import(args: argparse.Namespace) -> int:
    """The command `import`."""
    from ..checkpoints import import_marian

    import_marian(args.source, args.save)
    print(f"{args.save}: imported from {args.source}")
    print(f"translate with it: translate --model {args.save}")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """The command `export`."""
    from ..checkpoints import export_ctranslate2, export_hf
    from ..translation import ConfigError

    if args.to == "hf":
        if args.quantization is not None:
            raise ConfigError("--quantization is for --to ctranslate2; a Hugging Face folder has fp32 weights")
        export_hf(args.model, args.out, which=args.which)
    else:
        export_ctranslate2(args.model, args.out, which=args.which, quantization=args.quantization)
    print(f"{args.out}: {args.model} for {'transformers' if args.to == 'hf' else 'CTranslate2'}")
    return 0
