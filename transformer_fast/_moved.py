"""Module paths of version 0.1.0 that moved. The old paths work until 2027-06-30, with a DeprecationWarning."""

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
    """Import finder for the old paths of moved modules and of their submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if new_path(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module under import by the module of the new path."""
        old, new = module.__name__, new_path(module.__name__)
        assert new is not None
        warnings.warn(f"{old} is {new} now; the old path works until 2027-06-30", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def new_path(fullname: str) -> str | None:
    """Return the new path of a moved module; None for other modules."""
    root, _, inside = fullname.partition(".")
    if root != __package__:
        return None
    for old, new in MOVED.items():
        if inside == old or inside.startswith(f"{old}."):
            return f"{root}.{new}{inside[len(old) :]}"
    return None


def attribute(name: str) -> ModuleType:
    """Return a moved module as an attribute of the package; the package's ``__getattr__`` calls this."""
    if name not in MOVED:
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__package__}.{name}")


sys.meta_path.insert(0, Finder())  # before the path finder, which would import an empty folder of the old name
