"""Models and ops for tests/ops/test_export.py, with inputs of any batch size and length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compiled_models import VOCABULARY, D, Packed, PackedWindowed, Padded, Windowed, swapped
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, layers
from transformer_fast.dialects import bert, d2l, tensorflow
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import d2l as d2l_oracle

Inputs = tuple[Tensor, ...]
Case = tuple[Callable[[], nn.Module], Callable[[int, int], Inputs]]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_of_it = function, nn.ModuleList(modules)

    def forward(self, *args: Tensor) -> Any:
        return self.function(*self.modules_of_it, *args)


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def lengths(batch: int, length: int) -> Tensor:
    return torch.randint(1, length + 1, (batch,))


def keep(batch: int, length: int) -> Tensor:
    """Return a keep mask (B, L) with at least the first position."""
    return torch.arange(length) < lengths(batch, length)[:, None]


def heads(batch: int, length: int, number: int = 4) -> Tensor:
    return torch.randn(batch, number, length, 8)


def x(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, D)


def transformer_inputs(batch: int, length: int) -> Inputs:
    return ids(batch, length), ids(batch, length - 1), lengths(batch, length)


def packed_inputs(batch: int, length: int) -> Inputs:
    return *transformer_inputs(batch, length), lengths(batch, length - 1)


def masked(q: Tensor, k: Tensor, v: Tensor, n: Tensor, dense: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Attention with every part of a mask, and all its outputs."""
    parts = AttentionMask.lengths(n), AttentionMask.causal(1), AttentionMask.window(3, None), AttentionMask.keep(dense)
    mask = parts[0] & parts[1] & parts[2] & parts[3] & AttentionMask.keep(dense[:, :, :1])
    return tfast.attention(q, k, v, mask, bias=bias, return_weights=True, return_logsumexp=True)


def masked_inputs(batch: int, length: int) -> Inputs:
    dense = torch.rand(batch, 1, length, length + 2) > 0.3
    dense[:, :, 2] = False  # a query without keys
    bias = torch.randn(4, length, length + 2)
    bias[..., 1] = -torch.inf
    k, v = heads(batch, length + 2, 2), torch.randn(batch, 2, length + 2, 5)
    return heads(batch, length), k, v, lengths(batch, length + 2), dense, bias


def parted(*args: Tensor) -> tuple[Tensor, ...]:
    """Attention with documents, distances, a window, a softcap and sinks, and all its outputs."""
    q, k, v, query_ids, key_ids, slopes, relative, sinks = args
    mask = AttentionMask.documents(query_ids, key_ids) & AttentionMask.window(4, 2, offset=1)
    mask &= AttentionMask.alibi(slopes, offset=2) & AttentionMask.relative(relative, max_distance=6)
    options: dict[str, Any] = {"softcap": 2.0, "sinks": sinks}
    return tfast.attention(q, k, v, mask, return_weights=True, return_logsumexp=True, **options)


def parted_inputs(batch: int, length: int) -> Inputs:
    query_ids, key_ids = torch.randint(0, 3, (batch, length)), torch.randint(0, 3, (batch, length + 2))
    query_ids[0, 1] = 7  # a query without keys, but for its sink
    k, v = heads(batch, length + 2, 2), torch.randn(batch, 2, length + 2, 5)
    return heads(batch, length), k, v, query_ids, key_ids, torch.rand(4), torch.randn(8, 4), torch.randn(4)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, **sizes: int) -> tuple[Tensor, ...]:
    """Packed attention with queries that have no keys."""
    empty = AttentionMask.window(-2, None)
    options: tuple[dict[str, Any], ...] = (
        {"causal": True},
        {"mask": AttentionMask.window(2), "return_logsumexp": True},
        {"mask": empty},
        {"mask": empty, "empty_rows": "zero"},
    )
    results = [tfast.attention_packed(q, k, v, starts, starts, **sizes, **given) for given in options]
    return results[0], *results[1], *results[2:]


def parted_tokens(*args: Tensor) -> tuple[Tensor, ...]:
    """Packed attention and cached attention, with documents, distances, a softcap and sinks."""
    q, k, v, starts, numbers, slopes, relative, sinks = args
    options: dict[str, Any] = {"softcap": 2.0, "sinks": sinks}
    by_distance = AttentionMask.alibi(slopes) & AttentionMask.relative(relative, 6, bidirectional=False)
    mask = by_distance & AttentionMask.documents(numbers)
    sizes = {
        "max_seqlen_q": q.shape[0],
        "max_seqlen_k": q.shape[0] - 1,
    }  # otherwise the program reads them from the device
    packed = tfast.attention_packed(q, k, v, starts, starts, mask=mask, **sizes, **options)
    newest, keys, values = (t.transpose(0, 1)[None] for t in (q[-2:], k, v))
    mask = by_distance & AttentionMask.documents(numbers[:, -2:], numbers)
    return packed, tfast.attention_decode(newest, keys, values, starts[-1:] - 1, mask=mask, **options)


def parted_token_inputs(batch: int, length: int) -> Inputs:
    tokens = [torch.randn(batch * length, h, 8) for h in (4, 2, 2)]
    numbers = torch.randint(0, 3, (1, batch * length))
    return *tokens, starts(batch, length), numbers, torch.rand(4), torch.randn(8, 4), torch.randn(4)


def starts(batch: int, length: int) -> Tensor:
    return torch.tensor([0, 3, 3, length * batch - 1, length * batch], dtype=torch.int32)


def parts_of_a_layer(rows: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
    normed = tfast.layer_norm(rows, gain, gain, residual=residual)
    classic = tfast.layer_norm(rows, gain, None, 1e-6, kind="std", residual=residual)
    alone = tfast.layer_norm(rows, None, None), tfast.layer_norm(rows, None, gain, kind="std")
    return *normed, *classic, *alone, tfast.ops.dropout(rows, 0.0, bias=gain, residual=residual, relu=True)


def embeddings(tokens: Tensor, weight: Tensor, table: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    return (
        tfast.embed(tokens, weight, table, scale=4.0, offset=2, padding_idx=0),
        tfast.embed(tokens, weight, table, offset=offsets),
        tfast.ops.add_positional(tfast.embed(tokens.int(), weight), table, offset=offsets),
    )


def loss(rows: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    options = {"label_smoothing": 0.1, "ignore_index": 3}
    of_classes = (
        tfast.linear_cross_entropy(rows, weight, bias, target, reduction=r, **options, class_weight=by_class)
        for by_class in (None, bias.detach().abs())
        for r in ("none", "mean", "sum")
    )
    return *of_classes, tfast.linear_cross_entropy(rows, weight, bias, rows @ weight.t(), label_smoothing=0.1)


OPS: dict[str, Case] = {
    "attention": (lambda: Call(masked), masked_inputs),
    "parts of a mask": (lambda: Call(parted), parted_inputs),
    "parts of a mask, packed and decoding": (lambda: Call(parted_tokens), parted_token_inputs),
    "plain attention": (lambda: Call(tfast.attention), lambda b, n: (heads(b, n), heads(b, n), heads(b, n))),
    "packed attention": (
        lambda: Call(packed_attention),
        lambda b, n: (*(torch.randn(b * n, h, 8) for h in (4, 2, 2)), starts(b, n)),
    ),
    "packed attention, lengths given": (
        lambda: Call(
            lambda q, k, v, n: packed_attention(q, k, v, n, max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0] - 1)
        ),
        lambda b, n: (*(torch.randn(b * n, h, 8) for h in (4, 2, 2)), starts(b, n)),
    ),
    "attention to a cache": (
        lambda: Call(lambda q, k, v, n: tfast.attention_decode(q, k, v, n, mask=AttentionMask.window(3))),
        lambda b, n: (heads(b, 2), heads(b, n), heads(b, n), lengths(b, n - 1) + 1),
    ),
    "norms and dropout": (lambda: Call(parts_of_a_layer), lambda b, n: (x(b, n), x(b, n), torch.randn(D))),
    "embeddings": (
        lambda: Call(embeddings),
        lambda b, n: (ids(b, n), torch.randn(VOCABULARY, D), torch.randn(50, D), torch.arange(b)),
    ),
    "loss": (
        lambda: Call(loss),
        lambda b, n: (x(b, n), torch.randn(VOCABULARY, D), torch.randn(VOCABULARY), ids(b, n)),
    ),
}


def accelerated(model: nn.Module) -> nn.Module:
    swapped = tfast.accelerate(model).swapped
    assert len([row for row in swapped if row.was != "nn.Linear"]) == 34  # those depend on the processor
    return model


def torch_encoder(model: nn.Module, rows: Tensor, blocked: Tensor) -> Tensor:
    """Return the outputs at tokens; at padding ``nn.TransformerEncoder`` gives zeros in eager PyTorch only."""
    return model(rows, src_key_padding_mask=blocked) * ~blocked[..., None]


SIZES = (VOCABULARY, D, 24, 2, 1, 0.1)
MODELS: dict[str, Case] = {
    "Transformer": (Padded, transformer_inputs),
    "windows": (Windowed, transformer_inputs),
    "packed": (Packed, packed_inputs),
    "packed windows": (PackedWindowed, packed_inputs),
    "post-norm layer": (
        lambda: layers.EncoderLayer(D, 2, d_ff=24, norm_first=False, norm="layer"),
        lambda b, n: (x(b, n), keep(b, n).unsqueeze(1)),
    ),
    "RMSNorm": (lambda: Padded(norm="rms"), transformer_inputs),
    "bert": (
        lambda: Call(lambda e, a, t, m: a(*(e(t),) * 3, m), bert.BERTEmbedding(20, D), bert.MultiHeadedAttention(2, D)),
        lambda b, n: (ids(b, n), keep(b, n)[:, None, None]),
    ),
    "tensorflow": (
        lambda: Call(
            lambda m, *t: m(*t, *tensorflow.create_masks(*t))[0], tensorflow.Transformer(1, D, 2, 24, 20, 20, 50, 50)
        ),
        lambda b, n: (ids(b, n), ids(b, n - 1)),
    ),
    "tensorflow additive": (
        lambda: Call(lambda m, t: m(t, t, t)[0], tensorflow.AdditiveAttention(8, D, D)),
        lambda b, n: (x(b, n),),
    ),
    "d2l": (
        lambda: Call(
            lambda m, *t: m(*t)[0],
            d2l.EncoderDecoder(d2l.TransformerEncoder(*SIZES), d2l.TransformerDecoder(*SIZES, causal_eval=True)),
        ),
        transformer_inputs,
    ),
    "nn.Transformer": (
        lambda: Call(
            lambda m, s, t, blocked: m(s, t, src_key_padding_mask=blocked, memory_key_padding_mask=blocked),
            swapped(nn.Transformer(D, 2, 1, 1, 24, batch_first=True)),
        ),
        lambda b, n: (x(b, n), x(b, n - 1), ~keep(b, n)),
    ),
    "nn.Transformer with a float mask": (
        lambda: Call(
            lambda m, s, t, look_ahead: m(s, t, tgt_mask=look_ahead, tgt_is_causal=False),
            swapped(nn.Transformer(D, 2, 1, 1, 24, activation="gelu", batch_first=True)),
        ),
        lambda b, n: (x(b, n), x(b, n), nn.Transformer.generate_square_subsequent_mask(n)),
    ),
    "nn.TransformerEncoder": (
        lambda: Call(
            torch_encoder, swapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 2))
        ),
        lambda b, n: (x(b, n), ~keep(b, n)),
    ),
    "hand-written": (
        lambda: accelerated(reference.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, 0.1)),
        lambda b, n: (ids(b, n), ids(b, n), keep(b, n).unsqueeze(1), layers.subsequentmask(n)),
    ),
    "hand-written d2l": (
        lambda: Call(lambda m, *t: m(*t), swapped(d2l_oracle.TransformerEncoder(*SIZES))),
        lambda b, n: (ids(b, n), lengths(b, n)),
    ),
}
CASES = OPS | MODELS
