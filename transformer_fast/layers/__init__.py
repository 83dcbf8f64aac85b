"""Drop-in layers: the classes of :mod:`transformer_fast.reference.layers`, on the fused ops; and ``RMSNorm``,
which stands for ``torch.nn``'s.

Names, constructors, state-dict keys, outputs and gradients are the reference's, so
``fast.load_state_dict(reference.state_dict())`` works, and the other way round.
"""

from typing import Any

from .attention import MultiHeadAttention, attention
from .decoder import DecoderLayer, subsequentmask
from .embedding import Embedder, PositionalEncoder
from .encoder import EncoderLayer
from .feed_forward import FeedForward
from .linear import Linear
from .norm import LayerNorm, Norm, RMSNorm

# models/ imports the layers, so the root of the package sets these.
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
