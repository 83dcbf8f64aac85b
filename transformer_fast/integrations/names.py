"""Names of this package's attention among the implementations of transformers."""

from __future__ import annotations

NAME = "transformer_fast"
"""Name that a user chooses."""

NAMES = {"eager": f"{NAME}_eager", "sdpa": f"{NAME}_sdpa"}
"""Names that ``accelerate`` writes into a model's configs, by the former implementation. The model keeps its masks."""

registered: set[str] = set()
"""All names of our attention, once transformers knows them."""


def is_ours(name: str | None) -> bool:
    """Return True for a name of our attention."""
    return name in registered
