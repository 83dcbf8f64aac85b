"""``accelerate(model)``: the fused ops inside a model that somebody already has."""

from .report import Report, Row
from .swap import accelerate

__all__ = ["Report", "Row", "accelerate"]
