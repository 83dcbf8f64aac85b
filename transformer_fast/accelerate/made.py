"""Names by which ``packed/classes.py`` makes its classes; see ``registered.py``."""

from __future__ import annotations

from functools import cache as cached_by_class  # noqa: F401
from typing import Any

from torch import nn

from .registered import Registered as Made  # noqa: F401
from .registered import registered_class


def make_class(
    bases: tuple[type, ...], former: type[nn.Module], recipe: tuple[Any, ...], **attributes: Any
) -> type[nn.Module]:
    """Make a class from a module's class, with a base of another kind in front."""
    return registered_class(former, (*bases, former), recipe, **attributes)
