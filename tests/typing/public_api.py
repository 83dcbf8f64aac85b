"""A user's code for the type checker: `make lint` checks it against the types of the package.

The code is never run. Where a mistake is marked as such, mypy must see it: an ignore that ignores nothing is an error.
"""

from typing import assert_type

import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.generation import Hypothesis
from transformer_fast.layers import EncoderLayer, LayerNorm, MultiHeadAttention, RMSNorm
from transformer_fast.masks.packing import Packing
from transformer_fast.swap.register import Registration


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, lengths: Tensor, asked: bool) -> None:
    mask = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.causal()
    mask &= tfast.AttentionMask.prefix(lengths, offset=1)
    assert_type(mask, tfast.AttentionMask)
    assert_type(tfast.attention(q, k, v), Tensor)
    assert_type(tfast.attention(q, k, v, mask, dropout_p=0.1, scale=None, empty_rows="zero"), Tensor)
    assert_type(tfast.attention(q, k, v, keep, causal=3, return_weights=True), tuple[Tensor, Tensor])
    assert_type(tfast.attention(q, k, v, return_logsumexp=True, bias=keep.float()), tuple[Tensor, Tensor])
    out, weights, _ = tfast.attention(q, k, v, return_weights="dropped", return_logsumexp=True)
    assert_type(weights, Tensor)
    assert_type(tfast.attention(q, k, v, return_weights=asked), Tensor | tuple[Tensor, ...])
    assert_type(tfast.attention_packed(out, k, v, lengths, lengths, max_seqlen_q=7, causal=True), Tensor)
    assert_type(tfast.attention_packed(q, k, v, lengths, lengths, return_logsumexp=True), tuple[Tensor, Tensor])
    assert_type(tfast.attention_decode(q, k, v, lengths, page_table=None), Tensor)
    assert_type(tfast.attention_decode(q, k, v, lengths, return_logsumexp=True), tuple[Tensor, Tensor])
    assert_type(tfast.scaled_dot_product_attention(q, k, v, keep, 0.1, scale=None, enable_gqa=True), Tensor)
    assert_type(tfast.explain(q, k, v, mask, dropout_p=0.1), str)

    assert_type(tfast.compat.flash_attn_func(q, k, v, causal=True), Tensor | tuple[Tensor, Tensor, Tensor])
    assert_type(tfast.compat.varlen_attn(q, k, v, lengths, lengths, 7, 7), Tensor | tuple[Tensor, Tensor])
    assert_type(tfast.compat.attention_mask_of(object()), tfast.AttentionMask)

    tfast.attention(q, k, v, is_causal=True)  # type: ignore[call-overload]
    tfast.attention(q, k, v, dropout_p="0.1")  # type: ignore[call-overload]
    tfast.attention_decode(q, k, v)  # type: ignore[call-overload]
    mask & 3  # type: ignore[operator]


def rows(x: Tensor, weight: Tensor, ids: Tensor, target: Tensor) -> Tensor:
    assert_type(tfast.layer_norm(x, weight, None), Tensor)
    assert_type(tfast.layer_norm(x, weight, weight, kind="std", residual=x, dropout_p=0.1), tuple[Tensor, Tensor])
    assert_type(tfast.layer_norm(x, weight, None, None, kind="rms"), Tensor)
    table = assert_type(tfast.positional_table(10, 16), Tensor)
    assert_type(tfast.embed(ids, weight, table, scale=4.0, offset=ids, padding_idx=0), Tensor)
    tokens, packing = tfast.pack(x, tfast.AttentionMask.lengths(ids))
    assert_type(packing, Packing)
    assert_type(tfast.unpack(tokens, packing), Tensor)
    tfast.layer_norm(x, 16)  # type: ignore[call-overload]
    return assert_type(tfast.linear_cross_entropy(x, weight, None, target, label_smoothing=0.1), Tensor)


def models(src: Tensor, trg: Tensor) -> list[list[int]]:
    model = tfast.Transformer(100, 100, d_model=16, N=2, heads=4, dropout=0.1, tie_weights="decoder", norm="layer")
    causal = tfast.AttentionMask.causal()
    assert_type(model.loss(src, trg, None, causal, trg, ignore_index=0), Tensor)
    assert_type(model.forward(src, trg, None, causal), Tensor)
    assert_type(LayerNorm(16).forward(src), Tensor)
    assert_type(LayerNorm(16).forward(src, residual=src), tuple[Tensor, Tensor])
    assert_type(RMSNorm(16).forward(src, residual=src), tuple[Tensor, Tensor])
    assert_type(EncoderLayer(16, 4).forward(src, causal), Tensor)
    assert_type(MultiHeadAttention(4, 16).forward(src, src, src, causal), Tensor)
    config = tfast.GenerationConfig(beam=4, n_best=2)
    assert_type(tfast.generate(model, src, bos=1, eos=2, config=config), list[list[Hypothesis]])
    assert_type(tfast.beam_search(model, src, beam=4, bos=1, eos=2), list[list[Hypothesis]])
    tfast.greedy(model, src)  # type: ignore[call-arg]
    return assert_type(tfast.greedy(model, src, bos=1, eos=2, pad=0), list[list[int]])


@tfast.functional()
def decorated(x: Tensor, *, scale: float) -> Tensor:
    return torch.nn.functional.dropout(x * scale)


def other_peoples(model: nn.Module) -> str:
    report = tfast.accelerate(model, fused_loss=True, functional=True)
    report.undo()
    inputs = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool)
    assert_type(tfast.register(type(model), nn.LayerNorm, check=(model, inputs)), Registration)
    with tfast.register(
        type(model), mask="keep", mask_means="keep", tokens=True, check=[(model, inputs)]
    ) as registration:
        assert_type(registration.remove(), None)
    tfast.register(type(model), nn.LayerNorm)  # type: ignore[call-arg]
    tfast.register(type(model), mask=3, check=(model, inputs))  # type: ignore[arg-type]
    with tfast.backend("reference"), tfast.functional():
        model(torch.zeros(1))
    assert_type(decorated(torch.zeros(1), scale=2.0), Tensor)
    return str(report)
