"""The command `train`: one flag for each setting of `TrainConfig`, and recipes of settings."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from .. import ConfigError, TrainConfig, load_recipe, parse_duration, train
from ..progress import Silent
from ..recipes import format_recipes

# The first setting of each part of --help.
GROUPS = {
    "source": "text and folder",
    "max_time": "when to stop (whichever comes first)",
    "d_model": "the model",
    "lowercase": "words and batches",
    "lr": "learning",
    "seed": "the machine",
    "valid_every": "validation, checkpoints, reports",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    command.usage = "%(prog)s --source F --target F --save DIR [options]"
    command.description = (
        "Train a translator on two text files; line i of one translates line i of the other. The command learns a joint"
        " subword vocabulary, trains, and writes checkpoints to --save. Run it again to continue where it stopped."
        " Ctrl-C saves a checkpoint and ends."
    )
    command.add_argument(
        "--recipe",
        metavar="NAME",
        help="take the settings of this recipe, a name or a .toml file; other flags override them",
    )
    command.add_argument("--quiet", action="store_true", help="print no progress, only errors and warnings")
    command.add_argument("--list-recipes", action=_ListRecipes, nargs=0, help="show the named recipes and exit")
    group: Any = command
    for setting in dataclasses.fields(TrainConfig):
        if setting.name in GROUPS:
            group = command.add_argument_group(GROUPS[setting.name])
        flag, options = "--" + setting.name.replace("_", "-"), dict(setting.metadata["flag"])
        shown = ""
        if options.get("type") is parse_duration:
            options["type"] = duration
        if "choices" not in options and not isinstance(setting.default, bool):
            options.setdefault("metavar", _metavar(setting))
        if setting.default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = argparse.SUPPRESS  # only what was given overrides the recipe
            if isinstance(setting.default, bool):
                options["action"] = argparse.BooleanOptionalAction
                shown = f" (default: {'yes' if setting.default else 'no'})"
            elif setting.default is not None:
                options.setdefault("type", type(setting.default))
                shown = f" (default: {setting.default})"
        group.add_argument(flag, help=setting.metadata["help"] + shown, **options)


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """Build the configuration: given flags override the recipe's settings, which override the defaults.

    Raises:
        ConfigError: there is no such recipe, or a setting cannot work.
    """
    given = {s.name: getattr(args, s.name) for s in dataclasses.fields(TrainConfig) if hasattr(args, s.name)}
    return TrainConfig(**((load_recipe(args.recipe).training if args.recipe else {}) | given))


def duration(text: str) -> float:
    """The value of a flag that takes a duration, as `parse_duration` reads it."""
    try:
        return parse_duration(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 130 if it was interrupted."""
    translation = load_recipe(args.recipe).translation if args.recipe else None
    result = train(config_from_args(args), progress=Silent() if args.quiet else None, translation=translation)
    code = 130 if result.stopped == "interrupted" else 0
    if os.environ.get("RANK", "0") != "0":  # under torchrun only the first process reports
        return code
    scores = _format_scores(result.best_scores)
    print(f"{result.step:,} updates, {result.tokens:,} tokens, {result.seconds:.0f} s ({result.stopped})")
    print(f"{result.folder}" + (f": best at step {result.best_step:,}, {scores}" if scores else ""))
    if result.average_scores:
        print(f"mean of the last checkpoints: {_format_scores(result.average_scores)}")
    return code


def _format_scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in scores.items())


def _metavar(setting: dataclasses.Field) -> str:
    """Placeholder of a flag's value in --help."""
    if setting.name == "save":
        return "DIR"
    if setting.name.endswith(("source", "target")):
        return "F"
    kind = setting.metadata["flag"].get("type", type(setting.default))
    return {int: "N", float: "X", parse_duration: "T"}.get(kind, "NAME")


class _ListRecipes(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(format_recipes())
        parser.exit()
