"""The command `import`: a Marian or OPUS-MT model as a run."""

from __future__ import annotations

import argparse

from ..checkpoints import import_marian


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.description = (
        "Make a run from the Hugging Face folder of a Marian or OPUS-MT model. `translate --model` takes the run and"
        " searches as the folder's generation_config.json says."
    )
    command.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="folder with config.json, model.safetensors or pytorch_model.bin, source.spm, target.spm, vocab.json",
    )
    command.add_argument("--save", required=True, metavar="DIR", help="folder of the new run; must not exist")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    import_marian(args.source, args.save)
    print(f"{args.save}: imported from {args.source}")
    print(f"translate with it: translate --model {args.save}")
    return 0
