"""Encoder and decoder stacks, and the Transformer."""

from .decoder import Decoder
from .encoder import Encoder
from .stack import Stack
from .transformer import Transformer

__all__ = ["Decoder", "Encoder", "Stack", "Transformer"]
