"""Patterns of hand-written modules that ``accelerate`` knows, in the order of the search.

Every file of this folder is imported; ``PATTERNS`` of a file are its patterns, and ``KNOWS`` its rows of the table in
docs/accelerate.md (tools/pattern_table.py). A file that imports another one's patterns stands behind it, so the
patterns of children come first.
"""

import importlib
import pkgutil

from .base import Pattern, declared

_FILES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

PATTERNS = tuple(pattern for pattern in declared() if any(pattern in getattr(file, "PATTERNS", ()) for file in _FILES))
KNOWS: tuple[tuple[str, str], ...] = tuple(row for file in _FILES for row in getattr(file, "KNOWS", ()))

__all__ = ["KNOWS", "PATTERNS", "Pattern"]
