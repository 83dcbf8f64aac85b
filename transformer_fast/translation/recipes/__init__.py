"""Named recipes of training: the files of this folder, or your own of the same form.

A recipe is a TOML file: `about`, a text; `[training]`, settings of `TrainConfig` by their names; `[translation]`,
options of `GenerationConfig` with which its published figure was decoded. A run keeps these options as the defaults of
`translate`.
"""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import TrainConfig, generation_config, parse_duration
from ..errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """A recipe by its `name`: what it is `about`, and settings for `training` and for `translation`."""

    name: str
    about: str
    training: dict[str, Any]
    translation: dict[str, Any]


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """The recipe of that name, or in the file `name` if it ends in .toml.

    Raises:
        ConfigError: there is no such recipe, the file is not TOML, or a table or setting in it is unknown.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and path.stem not in recipe_names():
        raise ConfigError(f"recipe is {name!r}; expected one of {', '.join(recipe_names())}, or a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {name}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"the recipe {name} is not TOML: {error}") from None
    recipe = Recipe(path.stem, content.pop("about", ""), content.pop("training", {}), content.pop("translation", {}))
    if content:
        raise ConfigError(
            f"the recipe {name} may only hold about, [training] and [translation]; it also has {sorted(content)}"
        )
    for table, found in (("training", recipe.training), ("translation", recipe.translation)):
        if not isinstance(found, dict):
            raise ConfigError(f"{table} in the recipe {name} is {found!r}; expected a table of settings")
    if unknown := sorted(recipe.training.keys() - TrainConfig.__dataclass_fields__.keys()):
        raise ConfigError(
            f"the recipe {name} sets {', '.join(unknown)}, which training does not know; see train --help"
        )
    if "max_time" in recipe.training:
        recipe.training["max_time"] = parse_duration(recipe.training["max_time"])
    try:
        generation_config(recipe.translation)
    except ConfigError as error:
        raise ConfigError(f"[translation] of the recipe {name}: {error}") from None
    return recipe


def format_recipes() -> str:
    """Return all recipes as text, each with its settings as command-line flags."""
    parts = []
    for name in recipe_names():
        recipe = load_recipe(name)
        flags = " ".join(_flag(setting, value) for setting, value in recipe.training.items())
        paragraphs = [recipe.about, flags, f"translate: {recipe.translation}"]
        parts.append("\n".join([name, *(textwrap.indent(textwrap.fill(p, 100), "    ") for p in paragraphs if p)]))
    return "\n\n".join(parts)


def _flag(setting: str, value: Any) -> str:
    flag = setting.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
