"""The stacks and the whole model."""

from .decoder import Decoder
from .encoder import Encoder
from .transformer import Transformer

__all__ = ["Decoder", "Encoder", "Transformer"]
