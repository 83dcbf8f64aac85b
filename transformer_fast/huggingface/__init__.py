"""Models of Hugging Face transformers: the table of classes, and their fast forwards."""

from .blocks import Fast
from .door import Stack
from .heads import output_layer
from .inside import has_code_of_a_user
from .sentence_transformers import arguments_of, readers
from .table import fast_class, is_packed, model_class, not_in_the_table, note, packed_class, reads_padding

__all__ = [
    "Fast", "Stack", "arguments_of", "fast_class", "has_code_of_a_user", "is_packed", "model_class", "not_in_the_table",
    "note", "output_layer", "packed_class", "readers", "reads_padding",
]  # fmt: skip
