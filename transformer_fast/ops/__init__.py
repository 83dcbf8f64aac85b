"""The doors: each op's argument checks, registration and choice of kernel."""

from .attention import attention
from .attention_decode import attention_decode
from .attention_packed import attention_packed
from .dropout import dropout
from .embedding import add_positional, embed, positional_table
from .norm import layer_norm

__all__ = [
    "add_positional",
    "attention",
    "attention_decode",
    "attention_packed",
    "dropout",
    "embed",
    "layer_norm",
    "positional_table",
]
