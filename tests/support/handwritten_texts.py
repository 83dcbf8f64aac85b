"""Forms of the classic texts: modules of handwritten.py, of the reference and of its dialects."""

from __future__ import annotations

import handwritten as hw
import torch
from form_arguments import (
    AHEAD,
    ATTEND,
    LAYER,
    ONE,
    OWN,
    TEXT,
    TWO,
    B,
    D,
    Forms,
    L,
    S,
    blocked,
    called_once,
    ids,
    keep,
    x,
)
from torch import nn

from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import bert, d2l, tensorflow


def annotated_layer(decoder: bool) -> nn.Module:
    heads, inner = [hw.AnnotatedAttention(2, D) for _ in range(1 + decoder)], hw.AnnotatedFeedForward(D, 12)
    return (hw.AnnotatedDecoderLayer if decoder else hw.AnnotatedEncoderLayer)(D, *heads, inner, 0.1)


def encoder(N: int) -> nn.Module:
    return hw.AnnotatedEncoder(annotated_layer(False), N)


def chapter_heads() -> nn.Module:
    return called_once(hw.D2lHeads(D, 2, 0.1), x(), x(), x(), None)


LENGTHS = lambda: (x(), x(S), x(S), torch.tensor([2, 4]))  # noqa: E731
TF_OWN, TF_LAYER = (lambda: (x(), blocked(B, 1, 1, L))), (lambda: (x(), x(S), (~AHEAD[0]).float(), blocked(B, 1, 1, S)))
STACK = (11, D, 12, 2, 2, 0.1)
SIZED = dict.fromkeys(("query_size", "key_size", "value_size"), D)
FORMS: Forms = {
    "annotated norm": (lambda: hw.AnnotatedNorm(D), ONE),
    "annotated attention": (lambda: hw.AnnotatedAttention(2, D), ATTEND),
    "annotated attention, int": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).int())),
    "annotated attention, float": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).float())),
    "annotated feed forward": (lambda: hw.AnnotatedFeedForward(D, 12), ONE),
    "sublayer": (lambda: hw.Sublayer(D, 0.1), TWO),
    "post-norm sublayer": (lambda: hw.PostSublayer(D, 0.1), TWO),
    "embeddings": (lambda: hw.Embeddings(D, 11), TEXT),
    "positions": (lambda: hw.Positions(D, 0.1), ONE),
    "positions, length first": (lambda: hw.PositionsLengthFirst(D, 0.1), ONE),
    "bert attention": (lambda: hw.BertAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, 1, S))),
    "bert attention, dense": (lambda: hw.BertAttention(2, D), lambda: (x(), x(), x(), keep(B, 1, L, L))),
    "bert attention, a module computes the weights": (
        lambda: bert.MultiHeadedAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, 1, S)),
    ),
    "bert attention, a mask per head": (lambda: hw.BertAttention(2, D), lambda: (x(), x(), x(), keep(2, L, L))),
    "bert embedding": (lambda: hw.TokenEmbedding(11, D), TEXT),
    "tensorflow attention": (lambda: hw.TensorflowAttention(D, 2), lambda: (x(S), x(S), x(), blocked(B, 1, 1, S))),
    "tensorflow attention, a mask per head": (
        lambda: hw.TensorflowAttention(D, 2), lambda: (x(S), x(S), x(), blocked(2, L, S)),
    ),
    "tensorflow encoder layer": (lambda: tensorflow.EncoderLayer(D, 2, 12), TF_OWN),
    "tensorflow decoder layer": (lambda: tensorflow.DecoderLayer(D, 2, 12), TF_LAYER),
    "annotated encoder layer": (lambda: annotated_layer(False), OWN),
    "annotated decoder layer": (lambda: annotated_layer(True), LAYER),
    "annotated encoder": (lambda: encoder(3), OWN),
    "annotated decoder": (lambda: hw.AnnotatedDecoder(annotated_layer(True), 2), LAYER),
    "bert feed forward": (lambda: hw.BertFeedForward(D, 12), ONE),
    "bert block": (lambda: hw.BertBlock(D, 2, 12), lambda: (x(), keep(B, 1, 1, L).expand(B, 1, L, L))),
    "bert token + position": (lambda: bert.BERTEmbedding(11, D), TEXT),
    "bert token + position + segment": (lambda: hw.BertEmbedding(11, D), lambda: (ids(), ids() % 3)),
    "tensorflow encoder": (lambda: tensorflow.Encoder(2, D, 2, 12, 11, 20), lambda: (ids(), blocked(B, 1, 1, L))),
    "tensorflow decoder": (lambda: tensorflow.Decoder(2, D, 2, 12, 11, 20), lambda: (ids(), *TF_LAYER()[1:])),
    "d2l feed forward": (lambda: d2l.PositionWiseFFN(12, D, num_inputs=D), ONE),
    "d2l heads": (chapter_heads, lambda: (x(), x(S), x(S), torch.tensor([S + 2, 0]))),
    "d2l heads, a length a query": (
        lambda: d2l.MultiHeadAttention(D, 2, 0.1, True, **SIZED),
        lambda: (x(), x(S), x(S), torch.randint(1, S + 1, (B, L))),
    ),
    "d2l heads, lengths of 0 and 1": (chapter_heads, lambda: (x(), x(S), x(S), torch.arange(B * L).view(B, L) % 2)),
    "d2l encoder block": (lambda: d2l.EncoderBlock(D, 12, 2, 0.1), lambda: (x(), torch.tensor([3, 7]))),
    "d2l decoder block": (
        lambda: d2l.DecoderBlock(D, 12, 2, 0.1, 1), lambda: (x(), [x(S), torch.tensor([2, 4]), [None, x(3)]]),
    ),
    "d2l encoder": (lambda: d2l.TransformerEncoder(*STACK), lambda: (ids(), torch.tensor([3, 7]))),
    "d2l encoder, the chapter's": (lambda: hw.D2lEncoder(*STACK), lambda: (ids(), torch.tensor([3, 7]))),
    "d2l decoder, the chapter's": (
        lambda: hw.D2lDecoder(*STACK), lambda: (ids(), [x(S), torch.tensor([2, 4]), [x(3), x(3)]]),
    ),
    "d2l decoder that counts on": (lambda: d2l.TransformerDecoder(*STACK), lambda: (ids(), [x(S), None, [x(3), x(3)]])),
    "d2l attention": (lambda: hw.DotProductAttention(0.1), LENGTHS),
    "d2l add and norm": (lambda: hw.AddNorm(D, 0.1), lambda: (x(), x())),
    "d2l positions": (lambda: hw.D2lPositions(D, 0.1), ONE),
    "classic encoder layer": (lambda: reference.EncoderLayer(D, 2), OWN),
    "classic encoder layer, post-norm": (lambda: reference.EncoderLayer(D, 2, norm_first=False, norm="layer"), OWN),
    "classic decoder layer": (lambda: reference.DecoderLayer(D, 2), lambda: (*LAYER()[:3], keep(1, L, L))),
    "classic encoder": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), keep(B, 1, L))),
    "classic encoder without a mask": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), None)),
}  # fmt: skip
