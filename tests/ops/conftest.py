"""In these tests every tensor that PyTorch leaves uninitialised starts as NaN."""

from helpers import poisoned  # noqa: F401
