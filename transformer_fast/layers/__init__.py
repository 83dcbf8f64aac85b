"""Drop-in layers: the classes of :mod:`transformer_fast.reference.layers` on the fused ops, and ``RMSNorm``, a
replacement of ``torch.nn.RMSNorm``.

Names, constructors, state-dict keys, outputs and gradients are those of the reference. A state dict of either class
loads into the other.
"""

from typing import Any

from ..reference.layers import subsequentmask
from . import functions as functions  # the import gives functional() its functions
from .attention import MultiHeadAttention, attention
from .decoder import DecoderLayer
from .embedding import Embedder, PositionalEncoder
from .encoder import EncoderLayer
from .feed_forward import FeedForward
from .linear import Linear
from .norm import LayerNorm, Norm, RMSNorm

# models/ imports the layers, so the package's __init__ assigns these three names.
Decoder: Any
"""The class :class:`transformer_fast.models.Decoder`."""
Encoder: Any
"""The class :class:`transformer_fast.models.Encoder`."""
Transformer: Any
"""The class :class:`transformer_fast.models.Transformer`."""

__all__ = [
    "Decoder",
    "DecoderLayer",
    "Embedder",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "Norm",
    "PositionalEncoder",
    "RMSNorm",
    "Transformer",
    "attention",
    "subsequentmask",
]
