"""The doors: each op's argument checks, registration and choice of kernel."""

from .attention import attention
from .dropout import dropout
from .embedding import add_positional, embed, positional_table
from .norm import layer_norm

__all__ = ["add_positional", "attention", "dropout", "embed", "layer_norm", "positional_table"]
