"""Conditions under which attention keeps dropout bits for its backward, and the way of the bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import transformer_fast as tfast
from transformer_fast.attention_params import AttentionParams, PackedBatch

recording = pytest.importorskip("recording_driver")
dropout_bits = pytest.importorskip("transformer_fast.triton.attention.dropout_bits")
backward = pytest.importorskip("transformer_fast.triton.attention.backward")
forward = pytest.importorskip("transformer_fast.triton.attention.forward")
configs = pytest.importorskip("transformer_fast.triton.configs")
launched, on_a_gpu, floats = recording.launched, recording.on_a_gpu, recording.floats
arguments_of = recording.arguments_of

DROPPED = AttentionParams(dropout_p=0.1, seed=7)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bytes_kept(
    params: AttentionParams, *, arch: str = "sm90", queries: int = 1024, keys: int = 1024, D: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> int | None:  # fmt: skip
    """Return the bytes kept for a call of two batches and three heads; None if nothing is kept."""
    q, k = (meta(2, 3, length, D, dtype=dtype) for length in (queries, keys))
    found = dropout_bits.empty_dropout_bits(q, k, params, arch)
    return None if found is None else found.numel() * found.element_size()


@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100"])
@pytest.mark.parametrize("D", [40, 64])
def test_a_weight_takes_a_bit(arch, D):
    assert bytes_kept(DROPPED, arch=arch, D=D) == 2 * 3 * 1024 * 1024 // 8
    params = replace(DROPPED, lengths=meta(2, dtype=torch.int32), causal=0)
    assert bytes_kept(params, arch=arch, D=D) == 2 * 3 * 1024 * 1024 // 8


def test_both_lengths_are_rounded_up_to_tiles():
    assert bytes_kept(DROPPED, queries=1, keys=1025) == 2 * 3 * 128 * 1152 // 8


def test_a_packed_batch_has_a_block_more_per_sequence():
    """A sequence begins anywhere in a block of 128 queries. Columns are those of the longest sequence, of which a
    batch has no more than its keys."""
    starts, q = meta(4, dtype=torch.int32), meta(3000, 3, 64)
    for longest, columns in ((1500, 24), (10_000, 48)):
        params = replace(DROPPED, packed=PackedBatch(starts, starts, longest, longest))
        found = dropout_bits.empty_dropout_bits(q, q, params, "sm90")
        assert found.shape == (3 * (3000 // 128 + 3) * columns * 8 * 32,) and found.dtype == torch.int32
    for longest, window in ((512, None), (1500, -700)):
        params = replace(DROPPED, packed=PackedBatch(starts, starts, longest, longest), window=window)
        assert dropout_bits.empty_dropout_bits(q, q, params, "sm90") is None


@pytest.mark.parametrize("lengths", [[2048, *[16] * 1000], [4000, *[1] * 4000], [4096, *[8] * 2000]])
def test_short_sequences_beside_a_long_one_take_no_block_each(lengths):
    starts, q = meta(len(lengths) + 1, dtype=torch.int32), meta(sum(lengths), 16, 64)
    params = replace(DROPPED, packed=PackedBatch(starts, starts, max(lengths), max(lengths)))
    assert dropout_bits.empty_dropout_bits(q, q, params, "sm90") is None


def test_one_query_takes_no_block():
    """Grouped heads share a key and a value, and no bits."""
    q, k = meta(64, 64, 1, 64), meta(64, 1, 4096, 64)
    assert dropout_bits.empty_dropout_bits(q, k, DROPPED, "sm90") is None


def test_not_where_there_is_no_kernel_for_it():
    for params in (
        AttentionParams(),
        replace(DROPPED, bias=meta(1, 1, 1024, 1024)),
        replace(DROPPED, key_keep=meta(2, 1, 1, 1024, dtype=torch.bool)),
        replace(DROPPED, query_ids=meta(2, 1024), key_ids=meta(2, 1024)),
        replace(DROPPED, softcap=5.0),
        replace(DROPPED, window=-700),
    ):
        assert bytes_kept(params) is None
    assert bytes_kept(DROPPED, keys=512) is None
    assert bytes_kept(DROPPED, dtype=torch.float32) is None
    assert bytes_kept(DROPPED, D=32) is bytes_kept(DROPPED, D=128) is None


@pytest.mark.parametrize("tile", [(128, 32, 4, 1), (256, 64, 8, 1)])
def test_not_in_tiles_without_whole_words(monkeypatch, tile):
    monkeypatch.setitem(configs.ATTENTION, ("grad_q", "sm90", 16, 64, "kept"), configs.AttentionConfig(*tile))
    assert bytes_kept(DROPPED) is None


def test_not_more_than_their_share(monkeypatch):
    """The default limit is the size of q, k, v and the output."""
    assert bytes_kept(DROPPED, queries=4096, keys=4096) is not None
    assert bytes_kept(DROPPED, queries=4097, keys=4097) is None
    monkeypatch.setitem(configs.DROPOUT_BITS, "share", 0.49)
    assert bytes_kept(DROPPED, queries=2048, keys=2048) is None
    monkeypatch.setitem(configs.DROPOUT_BITS, "share", 0)
    assert bytes_kept(DROPPED) is None
    monkeypatch.setitem(configs.DROPOUT_BITS, "share", math.inf)
    assert bytes_kept(DROPPED, queries=2**14, keys=2**14) is not None
    assert bytes_kept(DROPPED, queries=2**18, keys=2**18) is None  # offsets of 32 bits do not reach them


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_the_backward_gets_what_the_forward_kept(on_a_gpu, monkeypatch, share):
    """Test the first call and a call that the extension repeats; without gradients nothing is kept."""
    monkeypatch.setitem(configs.DROPOUT_BITS, "share", share)
    q, k, v = (floats(1, 2, 600, 64).half().requires_grad_() for _ in range(3))
    kernels = forward._forward_kernel, backward.grad_q_kernel, backward.grad_kv_kernel
    for _ in range(2):
        on_a_gpu.clear()
        out = tfast.attention(q, k, v, dropout_p=0.1)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        memory = [arguments_of(kernel, call)["dropout_bits"] for kernel, call in zip(kernels, on_a_gpu, strict=True)]
        assert len(set(memory)) == 1 and (memory[0] is not None) == (share > 0)
    on_a_gpu.clear()
    with torch.no_grad():
        tfast.attention(q, k, v, dropout_p=0.1)
    assert arguments_of(kernels[0], on_a_gpu[0])["dropout_bits"] is None


def test_explain_says_what_it_takes(on_a_gpu):
    q = floats(1, 2, 600, 64).half()
    assert "training stores one bit per weight, 0.1 MiB" in tfast.explain(q, q, q, dropout_p=0.1)
    assert "no mask is stored" in tfast.explain(q[:, :, :500], q[:, :, :500], q[:, :, :500], dropout_p=0.1)
