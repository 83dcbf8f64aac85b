"""Public functions of the ops, with documentation and argument checks. The ops themselves are in csrc/ops."""

import contextlib

from .. import extension
from .attention import attention
from .attention_decode import attention_decode
from .attention_packed import attention_packed
from .cross_entropy import linear_cross_entropy
from .dropout import dropout
from .embedding import add_positional, embed, positional_table
from .linear import linear
from .norm import layer_norm
from .registry import decompositions
from .scaled_dot_product_attention import scaled_dot_product_attention

__all__ = [
    "add_positional",
    "attention",
    "attention_decode",
    "attention_packed",
    "decompositions",
    "dropout",
    "embed",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "positional_table",
    "scaled_dot_product_attention",
]

# torch.export.load needs registered ops to load a saved program. The first call reports load errors.
with contextlib.suppress(ValueError):
    extension.load()
