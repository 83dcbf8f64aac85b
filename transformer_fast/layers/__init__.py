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

_MODELS = ("Decoder", "Encoder", "Transformer")

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


def __getattr__(name: str) -> Any:
    # The stacks live in models/, one step further along the line; only their names are offered here.
    if name in _MODELS:
        from .. import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
