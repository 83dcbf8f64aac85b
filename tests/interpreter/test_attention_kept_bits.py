"""Dropout bits that the forward keeps for the backward: the reference's mask, and the gradients of drawing again."""

from __future__ import annotations

import pytest
import torch

from transformer_fast import reference
from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton import configs
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

B, H, LQ, LK, D = 1, 2, 140, 150, 64


@pytest.fixture(autouse=True)
def short_calls_are_long(monkeypatch):
    """Let short calls keep bits too; tiles are those of keeping, so that sums have one order."""
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 64)
    for key in configs.ATTENTION:
        if key[2:4] == (16, 64) and key[4] in ("long", "packed long"):
            monkeypatch.setitem(configs.ATTENTION, key, configs.ATTENTION[*key[:4], "kept"])


def call_of(device: torch.device, p: float = 0.3, **options) -> tuple[tuple[torch.Tensor, ...], AttentionParams]:
    """Return (q, k, v, gradient of out) with two key heads, and the dropout arguments."""
    generator = torch.Generator().manual_seed(5)
    shapes = (B, H, LQ, D), (B, H // 2, LK, D), (B, H // 2, LK, D), (B, H, LQ, D)
    tensors = tuple(torch.randn(shape, generator=generator).to(device, torch.float16) for shape in shapes)
    seed = torch.tensor([2**40 + 7], device=device)
    return tensors, AttentionParams(scale=D**-0.5, dropout_p=p, seed=seed, **options)


def trained(tensors: tuple[torch.Tensor, ...], call: AttentionParams, keep: bool) -> tuple[torch.Tensor, ...]:
    """Return (out, gradients of q, k and v), and the bits."""
    *qkv, grad = tensors
    out, logsumexp, kept_bits = attention_forward(*qkv, call, training=keep)
    assert (kept_bits is not None) == keep
    return out, *attention_backward(grad, *qkv, out, logsumexp, call, None, kept_bits)[:3], kept_bits


def unpacked(kept_bits: torch.Tensor) -> torch.Tensor:
    """Return the bits as bool (B, H, LQ, LK), by the layout in the module's documentation."""
    i, j = torch.arange(LQ, device=kept_bits.device)[:, None], torch.arange(LK, device=kept_bits.device)
    lane = i % 8 * 4 + j // 2 % 4
    bit = i // 8 % 2 * 16 + j // 32 % 2 * 8 + j // 8 % 4 * 2 + j % 2
    return (kept_bits[:, i // 128, j // 64, i // 16 % 8, lane] >> bit & 1 == 1).unflatten(0, (B, H))


@pytest.mark.cover(2)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.9999])
def test_bits_are_those_of_the_reference(device, p):
    tensors, call = call_of(device, p)
    kept_bits = attention_forward(*tensors[:3], call, training=True)[2]
    assert torch.equal(unpacked(kept_bits), reference.dropout.attention_keep(call.seed, p, B, H, LQ, LK))


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradients_are_those_of_drawing(device, empty_rows):
    """Bit for bit, with tiles at the edge, tiles that no query sees, and queries without keys."""
    lengths = torch.tensor([101], dtype=torch.int32, device=device)
    tensors, call = call_of(device, lengths=lengths, causal=-3, zero_empty_rows=empty_rows == "zero")
    *kept, _ = trained(tensors, call, keep=True)
    *drawn, _ = trained(tensors, call, keep=False)
    assert all(torch.equal(*pair) for pair in zip(kept, drawn, strict=True))
    assert not torch.isnan(torch.stack(kept[:1])).any() and kept[3].any()


def test_the_backward_reads_them(device):
    """With all bits cleared no gradient reaches the values; with all bits set gradients differ from those of
    drawing."""
    (q, k, v, grad), call = call_of(device)
    out, logsumexp, kept_bits = attention_forward(q, k, v, call, training=True)
    _, _, grad_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call, None, torch.zeros_like(kept_bits))
    assert not grad_v.any()
    ones = torch.full_like(kept_bits, -1)
    grad_q, _, grad_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call, None, ones)
    drawn_q, _, drawn_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call)
    assert not torch.equal(grad_q, drawn_q) and not torch.equal(grad_v, drawn_v)


@pytest.mark.parametrize("causal", [None, 0])
def test_a_packed_batch_is_that_of_its_sequences(device, causal):
    """Bits of sequences of other lengths than the longest, of an empty one, and of one that begins within a block:
    the same mask, and the gradients of drawing again, bit for bit."""
    lengths = [140, 0, 33, 130, 1]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(6)
    shapes = (304, H, D), (304, H // 2, D), (304, H // 2, D), (304, H, D)
    tensors = tuple(torch.randn(shape, generator=generator).to(device, torch.float16) for shape in shapes)
    call = AttentionParams(
        scale=D**-0.5, dropout_p=0.3, seed=torch.tensor([2**40 + 7], device=device), causal=causal,
        packed=PackedBatch(starts, starts, 140, 140),
    )  # fmt: skip
    *kept, bits = trained(tensors, call, keep=True)
    *drawn, _ = trained(tensors, call, keep=False)
    assert all(torch.equal(*pair) for pair in zip(kept, drawn, strict=True)) and kept[3].any()
    assert bits.shape == (H, 304 // 128 + 5, 4, 8, 32)
    results = attention_forward(*tensors[:3], call)[:2]
    _, _, grad_v, *_ = attention_backward(tensors[3], *tensors[:3], *results, call, None, torch.zeros_like(bits))
    assert not grad_v.any()
