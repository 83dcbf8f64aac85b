"""``accelerate(model)``: the fused ops inside a model that somebody already has."""

from .engine import accelerate
from .report import Report, Row

__all__ = ["Report", "Row", "accelerate"]
