"""Row of a report: one module."""

from __future__ import annotations

import dataclasses

ALREADY = "it runs on the fused ops already"
"""Reason for a module that was swapped earlier or that belongs to this package."""
OWN_FORWARD = "it keeps its own forward"
"""Reason of a module that no table has."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One module: path in the model, former class, new class (None: unchanged), and the reason to leave it.

    Attributes:
        is_stack: True for a row about layers that skip padding, or keep it for the reason.
    """

    path: str
    was: str
    now: str | None
    why: str = ""
    is_stack: bool = False

    @property
    def reason(self) -> str:
        """Reason to leave the module, without details of this single module."""
        return self.why.partition(";")[0]
