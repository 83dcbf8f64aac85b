"""Module paths of version 0.1.0 that moved. They work until 2027-06-30, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "carried": "layers.carried",
    "checkpoints": "translation.checkpoints",
    "cli.score": "translation.commands.score",
    "cli.train": "translation.commands.train",
    "cli.translate": "translation.commands.translate",
    "distance": "masks.distance",
    "mask_checks": "masks.checks",
    "mask_parts": "masks.parts",
    "mask_plots": "cli.mask_plots",
    "packing": "masks.packing",
    "padded_calls": "layers.padded_calls",
    "tile_share": "masks.tile_share",
}
"""Old and new path, both inside the package."""


class Finder(MetaPathFinder, Loader):
    """Finds a moved module, or one inside it, under its old path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if new_path(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new path in the place of the one that is being imported."""
        old, new = module.__name__, new_path(module.__name__)
        assert new is not None
        warnings.warn(f"{old} is {new} now; the old path works until 2027-06-30", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def new_path(fullname: str) -> str | None:
    """Return where a module of an old path is now; None for any other."""
    root, _, inside = fullname.partition(".")
    if root != __package__:
        return None
    for old, new in MOVED.items():
        if inside == old or inside.startswith(f"{old}."):
            return f"{root}.{new}{inside[len(old) :]}"
    return None


def attribute(name: str) -> ModuleType:
    """Return a moved module as an attribute of the package, for its ``__getattr__``."""
    if name not in MOVED:
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__package__}.{name}")


sys.meta_path.insert(0, Finder())  # before an empty folder of the old name
