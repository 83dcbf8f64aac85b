"""Padded Transformers, faster in PyTorch on a CPU and a GPU, without changing what they compute."""

from typing import TYPE_CHECKING

from . import compat, dialects, integrations, layers
from .backends import BackendError, backend
from .explain import explain
from .extension import config as __config__  # noqa: F401
from .function_mode import functional
from .generation import GenerationConfig, beam_search, generate, greedy
from .masks import AttentionMask, pack, unpack
from .models import Decoder, Encoder, Transformer
from .ops import (
    attention,
    attention_decode,
    attention_packed,
    decompositions,
    embed,
    layer_norm,
    linear_cross_entropy,
    positional_table,
    scaled_dot_product_attention,
)

if TYPE_CHECKING:
    from .accelerate import accelerate
else:
    from . import accelerate  # the package itself, which is callable
from .swap.register import register

layers.Decoder, layers.Encoder, layers.Transformer = Decoder, Encoder, Transformer

__version__ = "0.2.0"

__all__ = [
    "AttentionMask",
    "BackendError",
    "GenerationConfig",
    "Transformer",
    "accelerate",
    "attention",
    "attention_decode",
    "attention_packed",
    "backend",
    "beam_search",
    "compat",
    "decompositions",
    "dialects",
    "embed",
    "explain",
    "functional",
    "generate",
    "greedy",
    "integrations",
    "layer_norm",
    "layers",
    "linear_cross_entropy",
    "pack",
    "positional_table",
    "register",
    "scaled_dot_product_attention",
    "unpack",
]
