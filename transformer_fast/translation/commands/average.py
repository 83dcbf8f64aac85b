"""The command `average`: the mean of a run's last checkpoints."""

from __future__ import annotations

import argparse

from .. import RunFolder, average_checkpoints, save_average


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.description = (
        "Average the weights of a run's last checkpoints (of epochs, if the run validates each) and write the result to"
        " the run's folder. `translate --which average` uses it."
    )
    command.add_argument("--model", required=True, metavar="DIR", help="folder of the run, which `train --save` wrote")
    command.add_argument(
        "--last", type=int, default=10, metavar="N", help="number of checkpoints (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    folder = RunFolder(args.model)
    average = average_checkpoints(folder, args.last)
    save_average(folder, average)
    print(f"{folder.average}: the mean of the checkpoints {', '.join(map(str, average.steps))}")
    print(f"translate with it: translate --model {args.model} --which average")
    return 0
