"""The dialect of TensorFlow's Transformer tutorial: float masks, 1.0 = blocked; weights with every output; post-norm.

The module's own mode (``train()``, ``eval()``) replaces the tutorial's argument ``training``. All other arguments and
names stay, so weights can be copied by name (a Dense kernel transposed). Reference:
``transformer_fast.reference.dialects.tensorflow``.
"""

from .attention import MultiHeadAttention, scaled_dot_product_attention
from .layers import DecoderLayer, EncoderLayer, point_wise_feed_forward_network
from .masks_and_positions import (
    create_look_ahead_mask,
    create_masks,
    create_padding_mask,
    get_angles,
    positional_encoding,
)
from .models import Decoder, Encoder, Transformer
from .scores import AdditiveAttention, BilinearAttention

__all__ = [
    "AdditiveAttention",
    "BilinearAttention",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "MultiHeadAttention",
    "Transformer",
    "create_look_ahead_mask",
    "create_masks",
    "create_padding_mask",
    "get_angles",
    "point_wise_feed_forward_network",
    "positional_encoding",
    "scaled_dot_product_attention",
]
