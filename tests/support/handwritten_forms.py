"""The hand-written modules that accelerate knows by their structure, each with inputs: what its tests go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import handwritten as hw
import handwritten_rms as rms
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import bert, d2l, tensorflow

B, L, S, D = 2, 7, 5, 8


def keep(*shape: int) -> Tensor:
    mask = torch.rand(shape) > 0.5
    mask[..., 0] = True
    return mask


def x(length: int = L) -> Tensor:
    return torch.randn(B, length, D, requires_grad=True)


def ids() -> Tensor:
    return torch.randint(0, 11, (B, L))


def fresh(value: Any) -> Any:
    """The same tensors in lists of their own: a decoder changes its state."""
    return [fresh(inner) for inner in value] if isinstance(value, list) else value


def annotated_layer(decoder: bool) -> nn.Module:
    heads, inner = [hw.AnnotatedAttention(2, D) for _ in range(1 + decoder)], hw.AnnotatedFeedForward(D, 12)
    return (hw.AnnotatedDecoderLayer if decoder else hw.AnnotatedEncoderLayer)(D, *heads, inner, 0.1)


def called_once(m: nn.Module, *args: Any) -> nn.Module:
    with torch.no_grad():
        m(*args)
    return m


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "annotated norm": (lambda: hw.AnnotatedNorm(D), lambda: (x(),)),
    "Llama's norm": (lambda: rms.LlamaRMSNorm(D), lambda: (x(),)),
    "T5's norm": (lambda: rms.T5LayerNorm(D), lambda: (x(),)),
    "rms norm with a scale": (lambda: rms.ScaledRMSNorm(D), lambda: (x(),)),
    "rms sublayer": (lambda: rms.with_rms(hw.Sublayer(D, 0.1)), lambda: (x(), torch.tanh)),
    "rms sublayer of torch": (lambda: rms.with_rms(hw.Sublayer(D, 0.1), nn.RMSNorm), lambda: (x(), torch.tanh)),
    "post-norm rms sublayer": (lambda: rms.with_rms(hw.PostSublayer(D, 0.1)), lambda: (x(), torch.tanh)),
    "rms encoder": (
        lambda: rms.with_rms(hw.AnnotatedEncoder(annotated_layer(False), 3), rms.T5LayerNorm),
        lambda: (x(), keep(B, 1, L)),
    ),
    "annotated attention": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, S))),
    "annotated attention, int": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).int())),
    "annotated attention, float": (lambda: hw.AnnotatedAttention(2, D), lambda: (x(), x(), x(), keep(1, L, L).float())),
    "annotated feed forward": (lambda: hw.AnnotatedFeedForward(D, 12), lambda: (x(),)),
    "sublayer": (lambda: hw.Sublayer(D, 0.1), lambda: (x(), torch.tanh)),
    "post-norm sublayer": (lambda: hw.PostSublayer(D, 0.1), lambda: (x(), torch.tanh)),
    "embeddings": (lambda: hw.Embeddings(D, 11), lambda: (ids(),)),
    "positions": (lambda: hw.Positions(D, 0.1), lambda: (x(),)),
    "positions, length first": (lambda: hw.PositionsLengthFirst(D, 0.1), lambda: (x(),)),
    "bert attention": (lambda: hw.BertAttention(2, D), lambda: (x(), x(S), x(S), keep(B, 1, 1, S))),
    "bert attention, dense": (lambda: hw.BertAttention(2, D), lambda: (x(), x(), x(), keep(B, 1, L, L))),
    "bert attention, a mask per head": (lambda: hw.BertAttention(2, D), lambda: (x(), x(), x(), keep(2, L, L))),
    "bert embedding": (lambda: hw.TokenEmbedding(11, D), lambda: (ids(),)),
    "tensorflow attention": (
        lambda: hw.TensorflowAttention(D, 2),
        lambda: (x(S), x(S), x(), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "tensorflow attention, a mask per head": (
        lambda: hw.TensorflowAttention(D, 2),
        lambda: (x(S), x(S), x(), 1.0 - keep(2, L, S).float()),
    ),
    "tensorflow encoder layer": (
        lambda: tensorflow.EncoderLayer(D, 2, 12),
        lambda: (x(), 1.0 - keep(B, 1, 1, L).float()),
    ),
    "tensorflow decoder layer": (
        lambda: tensorflow.DecoderLayer(D, 2, 12),
        lambda: (x(), x(S), torch.ones(L, L).triu(1), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "annotated encoder layer": (lambda: annotated_layer(False), lambda: (x(), keep(B, 1, L))),
    "annotated decoder layer": (
        lambda: annotated_layer(True),
        lambda: (x(), x(S), keep(B, 1, S), tfast.layers.subsequentmask(L)),
    ),
    "annotated encoder": (lambda: hw.AnnotatedEncoder(annotated_layer(False), 3), lambda: (x(), keep(B, 1, L))),
    "annotated decoder": (
        lambda: hw.AnnotatedDecoder(annotated_layer(True), 2),
        lambda: (x(), x(S), keep(B, 1, S), tfast.layers.subsequentmask(L)),
    ),
    "bert feed forward": (lambda: hw.BertFeedForward(D, 12), lambda: (x(),)),
    "bert block": (lambda: hw.BertBlock(D, 2, 12), lambda: (x(), keep(B, 1, 1, L).expand(B, 1, L, L))),
    "bert token + position": (lambda: bert.BERTEmbedding(11, D), lambda: (ids(),)),
    "bert token + position + segment": (lambda: hw.BertEmbedding(11, D), lambda: (ids(), ids() % 3)),
    "tensorflow encoder": (
        lambda: tensorflow.Encoder(2, D, 2, 12, 11, 20),
        lambda: (ids(), 1.0 - keep(B, 1, 1, L).float()),
    ),
    "tensorflow decoder": (
        lambda: tensorflow.Decoder(2, D, 2, 12, 11, 20),
        lambda: (ids(), x(S), torch.ones(L, L).triu(1), 1.0 - keep(B, 1, 1, S).float()),
    ),
    "d2l feed forward": (lambda: d2l.PositionWiseFFN(12, D, num_inputs=D), lambda: (x(),)),
    "d2l heads": (
        lambda: called_once(hw.D2lHeads(D, 2, 0.1), x(), x(), x(), None),
        lambda: (x(), x(S), x(S), torch.tensor([S + 2, 0])),
    ),
    "d2l heads, a length a query": (
        lambda: d2l.MultiHeadAttention(D, 2, 0.1, True),
        lambda: (x(), x(S), x(S), torch.randint(1, S + 1, (B, L))),
    ),
    "d2l heads, lengths of 0 and 1": (
        lambda: called_once(hw.D2lHeads(D, 2, 0.1), x(), x(), x(), None),
        lambda: (x(), x(S), x(S), torch.arange(B * L).view(B, L) % 2),
    ),
    "d2l encoder block": (lambda: d2l.EncoderBlock(D, 12, 2, 0.1), lambda: (x(), torch.tensor([3, 7]))),
    "d2l decoder block": (
        lambda: d2l.DecoderBlock(D, 12, 2, 0.1, 1),
        lambda: (x(), [x(S), torch.tensor([2, 4]), [None, x(3)]]),
    ),
    "d2l encoder": (lambda: d2l.TransformerEncoder(11, D, 12, 2, 2, 0.1), lambda: (ids(), torch.tensor([3, 7]))),
    "d2l decoder, the chapter's": (
        lambda: hw.D2lDecoder(11, D, 12, 2, 2, 0.1),
        lambda: (ids(), [x(S), torch.tensor([2, 4]), [x(3), x(3)]]),
    ),
    "d2l decoder that counts on": (
        lambda: d2l.TransformerDecoder(11, D, 12, 2, 2, 0.1),
        lambda: (ids(), [x(S), None, [x(3), x(3)]]),
    ),
    "d2l attention": (lambda: hw.DotProductAttention(0.1), lambda: (x(), x(S), x(S), torch.tensor([2, 4]))),
    "d2l add and norm": (lambda: hw.AddNorm(D, 0.1), lambda: (x(), x())),
    "d2l positions": (lambda: hw.D2lPositions(D, 0.1), lambda: (x(),)),
    "classic encoder layer": (lambda: reference.EncoderLayer(D, 2), lambda: (x(), keep(B, 1, L))),
    "classic encoder layer, post-norm": (
        lambda: reference.EncoderLayer(D, 2, norm_first=False, norm="layer"),
        lambda: (x(), keep(B, 1, L)),
    ),
    "classic decoder layer": (lambda: reference.DecoderLayer(D, 2), lambda: (x(), x(S), keep(B, 1, S), keep(1, L, L))),
    "classic encoder": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), keep(B, 1, L))),
    "classic encoder without a mask": (lambda: reference.Encoder(11, D, 2, 2, 0.1), lambda: (ids(), None)),
}  # fmt: skip


def results(m: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    out = m(*map(fresh, args))
    outs = list(out) if isinstance(out, tuple) else [out]
    trained = [t for t in (*args, *m.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    grads = torch.autograd.grad((outs[0] * torch.linspace(-1, 1, outs[0].numel()).view_as(outs[0])).sum(), trained)
    return [*outs, *grads]
