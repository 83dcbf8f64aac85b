"""Models of Hugging Face transformers: the table of classes, and their fast forwards."""

from .blocks import Fast
from .table import fast_class, note

__all__ = ["Fast", "fast_class", "note"]
