"""The dialect of the d2l textbook's Transformer chapter: valid lengths for masks, batch and heads folded into one
axis, decoding through a state.

A mask is ``valid_lens``: integers (B,), or (B, Lq) for one length per query; keys at or past the length are blocked,
and a query of length 0 gets uniform weights. Oracle: ``transformer_fast.reference.dialects.d2l``.
"""

from .attention import AdditiveAttention, DotProductAttention, MLPAttention, MultiHeadAttention
from .blocks import AddNorm, DecoderBlock, EncoderBlock, PositionWiseFFN
from .models import EncoderDecoder, PositionalEncoding, TransformerDecoder, TransformerEncoder
from .sequences import masked_softmax, sequence_mask, transpose_output, transpose_qkv

__all__ = [
    "AddNorm",
    "AdditiveAttention",
    "DecoderBlock",
    "DotProductAttention",
    "EncoderBlock",
    "EncoderDecoder",
    "MLPAttention",
    "MultiHeadAttention",
    "PositionWiseFFN",
    "PositionalEncoding",
    "TransformerDecoder",
    "TransformerEncoder",
    "masked_softmax",
    "sequence_mask",
    "transpose_output",
    "transpose_qkv",
]
