"""Types of numbers and flags among the arguments of the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def as_number(function: str, name: str, given: Any) -> float:
    """Convert an option to float.

    Raises:
        TypeError: for a bool, a string or another type that is no number.
    """
    if not isinstance(given, bool):
        if isinstance(given, int | float):
            return float(given)
        if hasattr(given, "__float__") and not (isinstance(given, Tensor) and given.numel() != 1):  # or a NumPy scalar
            return float(given)
    raise _error(function, name, "a number", given)


def check_int(function: str, name: str, given: Any) -> None:
    """Raise unless an option is an integer."""
    if isinstance(given, bool) or not (isinstance(given, int) or hasattr(given, "__index__")):
        raise _error(function, name, "an int", given)


def check_flag(function: str, name: str, given: Any) -> None:
    """Raise unless an option is True or False."""
    if not isinstance(given, bool):
        raise _error(function, name, "True or False", given)


def _error(function: str, name: str, expected: str, given: Any) -> TypeError:
    return TypeError(f"{function}: {name} must be {expected}, got {given!r}")
