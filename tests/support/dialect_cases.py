"""Calls of every module of the four families, for the parity tests and as inputs of other tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from dialect_parity import Case
from torch import Tensor, nn

from transformer_fast import dialects, layers
from transformer_fast.reference import dialects as oracles
from transformer_fast.reference import layers as classic


def x(*shape: int) -> Tensor:
    """Return the same random numbers for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


LENS, EMPTY_LENS = torch.tensor([5, 3, 1]), torch.tensor([5, 0, 2])
EACH = torch.tensor([[1, 2, 3, 4], [5, 0, 5, 2], [3, 3, 3, 3]])  # a length for each query
SRC = torch.tensor([[7, 6, 2, 9, 1], [1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])
TRG = torch.tensor([[3, 5, 1, 8], [4, 2, 0, 0], [1, 1, 1, 0]])
X, MEMORY = x(3, 4, 16), x(3, 5, 16)
STYLES = [(norm_first, norm) for norm_first in (True, False) for norm in ("std", "layer", "rms")]


def keep(*lengths: int, length: int = 5) -> Tensor:
    """Return a mask (B, 1, length) that keeps the first keys of each row."""
    return torch.arange(length)[None, None] < torch.tensor(lengths)[:, None, None]


def layer_cases() -> list[Case]:
    """Return calls of the classic modules."""
    masks = KEEP, LOOK_AHEAD = keep(5, 3, 1), classic.subsequentmask(4) & keep(4, 3, 4, length=4)
    cases = [
        Case("Embedder", (11, 16), (SRC,), (), {"padding_idx": 3}),
        Case("PositionalEncoder", (16, 0.1), (MEMORY,), (), {"max_len": 4}),
        Case("PositionalEncoder", (16, 0.1), (MEMORY,), (), {"max_len": 50}),
        Case("MultiHeadAttention", (4, 16), (X, MEMORY, MEMORY), (KEEP,)),
        Case("MultiHeadAttention", (4, 16), (X, X, X), (LOOK_AHEAD,)),
        Case("MultiHeadAttention", (4, 16), (X, X, X)),
        Case("Norm", (16,), (X,)),
        Case("FeedForward", (16, 24), (X,)),
        Case("Transformer", (11, 11, 16, 2, 4, 0.1), (SRC, TRG), masks, {"tie_weights": True}),
    ]
    for norm_first, norm in STYLES:
        options = {"d_ff": 24, "norm_first": norm_first, "norm": norm}
        stack = {**options, "max_len": 4, "padding_idx": 0}
        cases += [
            Case("EncoderLayer", (16, 4), (MEMORY,), (KEEP,), options),
            Case("DecoderLayer", (16, 4), (X, MEMORY), masks, options),
            Case("Encoder", (11, 16, 2, 4, 0.1), (SRC,), (KEEP,), stack),
            Case("Decoder", (11, 16, 2, 4, 0.1), (TRG, MEMORY), masks, stack),
            Case("Transformer", (11, 12, 16, 2, 4, 0.1), (SRC, TRG), masks, stack),
        ]
    return cases


# The dialect of BERT
IDS = torch.tensor([[4, 7, 2, 9, 0, 0], [5, 5, 1, 8, 3, 2], [6, 0, 0, 0, 0, 0]])
ROWS = x(3, 6, 16)
PADDING = (IDS > 0)[:, None, None]  # (B, 1, 1, L)
EMPTY = PADDING & torch.tensor([True, True, False])[:, None, None, None]
Q, K, V = x(3, 2, 6, 4), x(3, 2, 5, 4), x(3, 2, 5, 4)
DENSE = torch.ones(6, 6, dtype=torch.bool).tril()[None, None] & PADDING
BERT = [
    Case("TokenEmbedding", (11, 16), (IDS,)),
    Case("PositionalEmbedding", (16,), (IDS,)),
    Case("PositionalEmbedding", (15, 4), (ROWS[..., :15],)),
    Case("BERTEmbedding", (11, 16), (IDS,)),
    Case("BERTEmbedding", (11, 15, 0.3), (IDS,), options={"max_len": 4}),
    Case("Attention", (), (Q, K, V)),
    Case("Attention", (), (Q, Q, Q), (DENSE,)),
    Case("Attention", (), (Q[0], K[0], V[0]), (DENSE[0, :, :, :5],)),
    Case("Attention", (), (Q[1, 0], K[1, 0], V[1, 0]), (DENSE[1, 0, :, :5].int(),)),
    Case("MultiHeadedAttention", (4, 16), (ROWS, ROWS, ROWS), (PADDING,)),
    Case("MultiHeadedAttention", (4, 16), (ROWS, ROWS, ROWS), (DENSE.int(),)),
    Case("MultiHeadedAttention", (4, 16, 0.5), (ROWS, ROWS, ROWS), (EMPTY.expand(3, 4, 6, 6),)),
    Case("MultiHeadedAttention", (2, 16), (ROWS, MEMORY, MEMORY), (None,)),
]

# The dialect of TensorFlow's tutorial
TF_MASKS = TF_PADDING, TF_COMBINED, _ = oracles.tensorflow.create_masks(SRC, TRG)
TF_LOOK_AHEAD = oracles.tensorflow.create_look_ahead_mask(4)
TF_EMPTY = TF_PADDING.clone()
TF_EMPTY[1] = 1
TF_LAYER, TF_STACK = (16, 4, 24), (2, 16, 4, 24, 11)
TENSORFLOW = [
    Case("MultiHeadAttention", (16, 4), (X, X, X), (TF_LOOK_AHEAD,)),
    Case("MultiHeadAttention", (16, 4), (X, X, X), (TF_COMBINED,)),
    Case("MultiHeadAttention", (16, 2), (MEMORY, MEMORY, X), (TF_EMPTY,)),
    Case("MultiHeadAttention", (16, 2), (MEMORY, MEMORY + 1, X)),
    Case("point_wise_feed_forward_network", (16, 24), (X,)),
    Case("EncoderLayer", TF_LAYER, (MEMORY,), (TF_PADDING,)),
    Case("EncoderLayer", (*TF_LAYER, 0.5), (MEMORY,), (TF_EMPTY,)),
    Case("DecoderLayer", TF_LAYER, (X, MEMORY), (TF_COMBINED, TF_PADDING)),
    Case("Encoder", (*TF_STACK, 50, 0.3), (SRC,), (TF_PADDING,)),
    Case("Encoder", (*TF_STACK, 3), (SRC,)),
    Case("Decoder", (*TF_STACK, 50, 0.3), (TRG, MEMORY), (TF_COMBINED, TF_PADDING)),
    Case("Transformer", (*TF_STACK, 12, 50, 3, 0.3), (SRC, TRG), TF_MASKS),
    Case("AdditiveAttention", (6, 16, 10), (MEMORY, MEMORY, x(3, 4, 10)), (TF_PADDING[:, 0],)),
    Case("AdditiveAttention", (6, 9, 16), (MEMORY, x(3, 5, 9), X)),
    Case("BilinearAttention", (6, 16, 10), (MEMORY, MEMORY, x(3, 4, 10)), (TF_EMPTY[:, 0],)),
    Case("BilinearAttention", (6, 16, 16), (X, X, X), (TF_LOOK_AHEAD,)),
]

# The dialect of d2l
DQ, DK, DV = x(3, 4, 6), x(3, 5, 7), x(3, 5, 8)
DOT = x(3, 4, 6), x(3, 5, 6), DV
WIDTHS = {"query_size": 6, "key_size": 7}
THREE, EQUAL = {**WIDTHS, "value_size": 8}, dict.fromkeys(("query_size", "key_size", "value_size"), 16)
D2L_STACK = (11, 16, 24, 4, 2)
D2L = [
    Case("DotProductAttention", (0.5,), DOT, (LENS,)),
    Case("DotProductAttention", (0.1,), DOT, (EACH,)),
    Case("AdditiveAttention", (8, 0.5), (DQ, DK, DV), (LENS,), WIDTHS),
    Case("AdditiveAttention", (8, 0.1), (DQ, DK, DV), (EACH,), WIDTHS),
    Case("AdditiveAttention", (8, 0.1), (DQ, DK, DV), (EACH.clamp(max=1),), WIDTHS),
    Case("MultiHeadAttention", (16, 4, 0.5), (X, MEMORY, MEMORY), (EMPTY_LENS,), EQUAL),
    Case("MultiHeadAttention", (16, 2, 0.3, True), (DQ, DK, DV), (EACH,), THREE),
    Case("MultiHeadAttention", (16, 2, 0.3), (DQ, DK, DV), (None,), THREE),
    Case("MultiHeadAttention", (16, 2, 0.3, True), (DQ, DK, DV), (EACH.clamp(max=1),), THREE),
    Case("PositionWiseFFN", (4, 8), (X,), (), {"num_inputs": 16}),
    Case("AddNorm", ([16], 0.5), (X, X + 1)),
    Case("PositionalEncoding", (16, 0.3), (X,)),
    Case("PositionalEncoding", (7, 0.3), (x(2, 9, 7),), (), {"max_len": 4}),
    Case("EncoderBlock", (16, 24, 4, 0.5), (X,), (torch.tensor([4, 1, 2]),)),
    Case("EncoderBlock", (16, 24, 4, 0.5, True), (MEMORY,), (None,)),
    Case("TransformerEncoder", (*D2L_STACK, 0.3), (SRC,), (LENS,)),
    Case("DecoderBlock", (16, 24, 4, 0.5, 0), (X, [MEMORY, LENS, [None]])),
    Case("DecoderBlock", (16, 24, 4, 0.5, 1), (X, [MEMORY, None, [None, MEMORY]]), (), {"causal_eval": True}),
    Case("TransformerDecoder", (11, 16, 24, 4, 1, 0.3), (TRG, [MEMORY, LENS, [None]])),
    Case("Whole", (D2L_STACK, 0.3), (SRC, TRG), (LENS,)),
    Case("Whole", (D2L_STACK, 0.3), (SRC, TRG), (None,)),
]


class Family:
    """A family of d2l, and its whole model, which returns logits alone."""

    def __init__(self, family: ModuleType) -> None:
        self.family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)

    def Whole(self, stack: tuple[int, ...], dropout: float) -> nn.Module:
        encoder, decoder = self.family.TransformerEncoder, self.family.TransformerDecoder
        return First(self.family.EncoderDecoder(encoder(*stack, dropout), decoder(*stack, dropout)))


class First(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.model(*arguments)[0]


FAMILIES: dict[str, tuple[Any, Any, list[Case]]] = {  # the fast modules, their oracles, and calls
    "layers": (layers, classic, layer_cases()),
    "bert": (dialects.bert, oracles.bert, BERT),
    "tensorflow": (dialects.tensorflow, oracles.tensorflow, TENSORFLOW),
    "d2l": (Family(dialects.d2l), Family(oracles.d2l), D2L),
}
