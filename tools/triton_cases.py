"""All launches that the configs of the Triton kernels can cause, on meta tensors, for compilation.

One function per module of transformer_fast.triton, for an architecture class of configs.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton import cross_entropy, dropout, norm, norm_backward
from transformer_fast.triton.attention import (
    backward,
    decode,
    forward,
    grad_bias,
    grad_distance_bias,
    tile_map,
)
from transformer_fast.triton.attention.dropout_bits import empty_dropout_bits
from transformer_fast.triton.configs import ATTENTION, CROSS_ENTROPY, NORM
from transformer_fast.triton.launcher import Launch


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta")


def with_documents(params: AttentionParams, q: Tensor) -> AttentionParams:
    """Add documents to a call; q as given to the launcher."""
    shape = q.shape[:1] if params.packed is not None else (q.shape[0], q.shape[2])
    return replace(params, query_ids=meta(*shape, dtype=torch.int32), key_ids=meta(*shape, dtype=torch.int32))


def by_distance(params: AttentionParams, L: int, softcap: float | None = None) -> AttentionParams:
    """Add a bias by distance, and optionally a softcap, to a call."""
    return replace(params, distance_bias=meta(1, 4, 2 * L - 1, dtype=torch.float32), softcap=softcap)


def tile_calls() -> Iterator[tuple[tuple[Tensor, Tensor], AttentionParams]]:
    """Calls on meta tensors that cover every config of an architecture, with all features that change the compiled code
    much: ((q, logsumexp), params)."""

    def call(dtype: torch.dtype, D: int, L: int, kind: str) -> tuple[tuple[Tensor, Tensor], AttentionParams]:
        if kind == "plain":
            params = AttentionParams()
        else:
            params = AttentionParams(dropout_p=0.1, seed=meta(1, dtype=torch.int64))
        if kind in ("limits", "mapped", "biased"):
            params = replace(params, lengths=meta(2, dtype=torch.int32))
        if kind in ("mapped", "biased"):
            keep, key_keep = meta(2, 1, L, L, dtype=torch.bool), meta(2, 1, 1, L, dtype=torch.bool)
            params = replace(params, keep=keep, key_keep=key_keep)
        if kind == "biased":
            params = replace(params, bias=meta(1, 4, L, L, dtype=torch.float32))
        if kind == "packed":
            params = replace(params, packed=PackedBatch(*[meta(3, dtype=torch.int32)] * 2, L, L))
            return (meta(2 * L, 4, D, dtype=dtype), meta(4, 2 * L, dtype=torch.float32)), params
        return (meta(2, 4, L, D, dtype=dtype), meta(2, 4, L, dtype=torch.float32)), params

    for D in (32, 64, 128):
        for kind in ("limits", "mapped", "packed"):
            yield call(torch.bfloat16, D, 256, kind)
            yield call(torch.bfloat16, D, 1024, kind)
        yield call(torch.bfloat16, D, 1024, "plain")
        yield call(torch.bfloat16, D, 1023, "biased")
    for kind in ("limits", "plain", "mapped"):
        yield call(torch.float16, 64, 1024, kind)
    yield call(torch.bfloat16, 256, 1023, "biased")
    for D in (32, 64, 128, 256):
        yield call(torch.float32, D, 1024, "limits")
    for kind, D in itertools.product(("limits", "plain", "mapped", "packed"), (64, 128)):
        (q, logsumexp), params = call(torch.bfloat16, D, 1024, kind)
        yield (q, logsumexp), replace(params, causal=0, window=-100)
    for D in (32, 64, 128):
        for kind in ("limits", "packed"):
            (q, logsumexp), params = call(torch.bfloat16, D, 1024, kind)
            yield (q, logsumexp), with_documents(params, q)
        (q, logsumexp), params = call(torch.bfloat16, D, 1024, "mapped")
        yield (q, logsumexp), by_distance(with_documents(params, q), 1024, 30.0)
        (q, logsumexp), params = call(torch.bfloat16, D, 1024, "plain")
        yield (q, logsumexp), by_distance(params, 1024)
        yield (q, logsumexp), replace(params, softcap=30.0)
    for D in (64, 128):
        (q, logsumexp), params = call(torch.float32, D, 1024, "limits")
        yield (q, logsumexp), by_distance(with_documents(params, q), 1024, 30.0)
        (q, logsumexp), params = call(torch.bfloat16, D, 1024, "packed")
        yield (q, logsumexp), with_packed_bias(params)


def with_packed_bias(params: AttentionParams) -> AttentionParams:
    """A packed call with a bias, bottom-right positions, and unused keys."""
    of_two = {"seqused_k": meta(2, dtype=torch.int32), "bias_starts": meta(3, dtype=torch.int64)}
    packed = replace(params.packed, **of_two, bottom_right=True)
    return replace(params, packed=packed, bias=meta(4, 2 * 1024**2, dtype=torch.float32), causal=0)


def dense_calls() -> Iterator[tuple[tuple[Tensor, Tensor], AttentionParams]]:
    """Calls on meta tensors that cover every config of an architecture: ((q, logsumexp), params).

    Each config occurs once, with all features of its class: no key count or stride of a dense mask is a multiple of 16.
    """

    def call(dtype: torch.dtype, D: int, L: int, lengths: bool, dense: bool):
        params = AttentionParams()
        if dense:
            keep, key_keep = meta(2, 1, L, L, dtype=torch.bool), meta(2, 1, 1, L, dtype=torch.bool)
            params = AttentionParams(keep=keep, key_keep=key_keep, bias=meta(1, 4, L, L, dtype=torch.float32))
        if lengths:
            seed = meta(1, dtype=torch.int64)
            params = replace(params, lengths=meta(2, dtype=torch.int32), dropout_p=0.1, seed=seed)
        return (meta(2, 4, L, D, dtype=dtype), meta(2, 4, L, dtype=torch.float32)), params

    for D in (32, 64, 128):
        yield call(torch.bfloat16, D, 256, True, False)
        yield call(torch.bfloat16, D, 1024, True, False)
        yield call(torch.bfloat16, D, 1023, True, True)
    yield call(torch.float16, 64, 1024, False, False)
    yield call(torch.bfloat16, 256, 1023, True, True)
    for D in (32, 64, 128, 256):
        yield call(torch.float32, D, 1024, True, False)


def kept_or_drawn(q: Tensor, params: AttentionParams, arch: str) -> Iterator[Tensor | None]:
    """Yield None, and memory for dropout bits if a forward keeps them."""
    yield None
    if (dropout_bits := empty_dropout_bits(q, q, params, arch)) is not None:
        yield dropout_bits


def attention_cases(arch: str) -> Iterator[Launch]:
    """A launch for every forward config of an architecture class."""
    for (q, logsumexp), params in tile_calls():
        for dropout_bits in kept_or_drawn(q, params, arch):
            yield from forward.forward_launches((q, q, q), (q, logsumexp, dropout_bits), params, arch)


def attention_backward_cases(arch: str) -> Iterator[Launch]:
    """The launches of every backward config of an architecture class."""
    for (q, logsumexp), params in tile_calls():
        outputs = q, q, q, None, None, *backward.row_buffers(q, logsumexp, params)
        for dropout_bits in kept_or_drawn(q, params, arch):
            inputs = q, q, q, q, q, logsumexp, None, dropout_bits
            yield from backward.backward_launches(inputs, outputs, params, arch)


def attention_tile_map_cases(arch: str) -> Iterator[Launch]:
    """The launches that make a map for each tile of an architecture class."""
    for L in (256, 255):
        mask = torch.empty((2, 1, L, L), dtype=torch.bool, device="meta")
        yield tile_map.pack_launch(mask, mask.new_empty((2, 1, L, 8), dtype=torch.int32))
    lengths = meta(2, dtype=torch.int32)
    params = AttentionParams(keep=mask, key_keep=mask[:, :, :1], lengths=lengths, causal=0)
    for tile in sorted({(c.block_queries, c.block_keys) for key, c in ATTENTION.items() if key[1] == arch}):
        classes = mask.new_empty((2, 1, -(-L // tile[0]), -(-L // tile[1])), dtype=torch.int8)
        yield tile_map.classes_launch(classes, params, L, L, tile)
        yield tile_map.classes_launch(
            classes, with_documents(params, meta(2, 4, L, 64, dtype=lengths.dtype)), L, L, tile
        )
    lists = classes.to(torch.int32)
    yield tile_map.lists_launch(classes, lists, lists, False)


def bias_launches(
    q: Tensor, logsumexp: Tensor, params: AttentionParams, arch: str, bias_sums: Tensor | None = None,
    distance_sums: Tensor | None = None,
) -> list[Launch]:  # fmt: skip
    """The launches of a backward that fill buffers of the gradients of biases."""
    inputs = q, q, q, q, q, logsumexp, logsumexp, None
    outputs = q, None, None, bias_sums, distance_sums, *backward.row_buffers(q, logsumexp, params)
    return backward.backward_launches(inputs, outputs, params, arch)[1:]


def attention_grad_bias_cases(arch: str) -> Iterator[Launch]:
    """The launches of every config; of the shapes of a bias, T5's, ALiBi's two and the smallest; and packed ones."""
    for number, ((q, logsumexp), params) in enumerate(dense_calls()):
        L = q.shape[2]
        shape = ((1, 4, L, L), (1, 4, 1, L), (2, 1, L, 1), (1, 1, 1, 1))[number % 4]
        params = replace(params, bias=meta(*shape, dtype=torch.float32))
        yield from bias_launches(q, logsumexp, params, arch, grad_bias.part_sums(q, q, params))
    for D in (32, 64, 128):
        q, logsumexp = meta(2048, 4, D, dtype=torch.bfloat16), meta(4, 2048, dtype=torch.float32)
        params = with_packed_bias(AttentionParams(packed=PackedBatch(*[meta(3, dtype=torch.int32)] * 2, 1024, 1024)))
        yield from bias_launches(q, logsumexp, params, arch, meta(1, *params.bias.shape, dtype=torch.float32))


def attention_grad_distance_bias_cases(arch: str) -> Iterator[Launch]:
    """The launches of every config, padded and packed."""
    for (q, logsumexp), params in dense_calls():
        params = by_distance(with_documents(params, q), q.shape[2], 30.0)
        sums = grad_distance_bias.diagonal_sums(q, q, params)
        yield from bias_launches(q, logsumexp, params, arch, distance_sums=sums)
    for D in (32, 64, 128):
        q, logsumexp = meta(2048, 4, D, dtype=torch.bfloat16), meta(4, 2048, dtype=torch.float32)
        params = AttentionParams(packed=PackedBatch(*[meta(3, dtype=torch.int32)] * 2, 1024, 1024))
        params = by_distance(with_documents(params, q), 1024, 30.0)
        sums = grad_distance_bias.diagonal_sums(q, q, params)
        yield from bias_launches(q, logsumexp, params, arch, distance_sums=sums)


def attention_decode_cases(arch: str) -> Iterator[Launch]:
    """Both launches of every config; for most also with 32 rows, and with the cache in one piece, in pages as large as
    a tile, and in smaller ones."""

    def call(
        dtype: torch.dtype, B: int, H: int, Hkv: int, Lq: int, D: int, S: int, page_size: int,
        window: int | None = None, parts: bool = False,
    ):  # fmt: skip
        q, lengths = meta(B, H, Lq, D, dtype=dtype), meta(B, dtype=torch.int32)
        table = meta(B, S // page_size, dtype=torch.int32) if page_size else None
        k = meta(64, Hkv, page_size, D, dtype=dtype) if page_size else meta(B, Hkv, S, D, dtype=dtype)
        buffers = decode.part_buffers(q, decode.division_of(q, k, table)[2])
        given, softcap = (None, None, None, None), None
        if parts:
            ids = [meta(B, n, dtype=torch.int32) for n in (Lq, S)]
            given = (meta(1, H, Lq + S - 1, dtype=torch.float32), *ids, meta(H, dtype=torch.float32))
            softcap = 30.0
        logsumexp = meta(B, H, Lq, dtype=torch.float32)
        return decode.decode_launches(
            q, k, k, lengths, table, *given, q, logsumexp, *buffers, 0, window, softcap, 1.0
        )  # fmt: skip

    for bits, block_d in decode.TILES:
        dtype = {16: torch.bfloat16, 32: torch.float32}[bits]
        for Lq, page_size in ((1, 0), (1, 64), (4, 16), (8, 0)):
            if page_size == 16 or (bits == 16 and block_d > 32):
                yield from call(dtype, 2, 32, 8, Lq, block_d, 4096, page_size)
        yield from call(dtype, 2, 32, 8, 4, block_d, 4096, 64, parts=True)
    yield from call(torch.float16, 64, 16, 16, 1, 64, 512, 0)
    yield from call(torch.float16, 2, 32, 8, 4, 64, 4096, 64, -100)


def norm_cases(arch: str) -> Iterator[Launch]:
    """A launch for every forward config of Norm (whose kernel covers LayerNorm) and of RMSNorm, with all features on;
    the widest also in fp32."""
    widths = sorted(width for kernel, width in NORM if kernel == "forward" and width > 0)
    for d, dtype in [*((d, torch.bfloat16) for d in (*widths, 65536)), (widths[-1], torch.float32)]:
        x = torch.empty((1024, d), dtype=dtype, device="meta")
        vector = torch.empty((d,), dtype=torch.float32, device="meta")
        statistics = torch.empty((1024,), dtype=torch.float32, device="meta")
        seed = torch.empty((1,), dtype=torch.int64, device="meta")
        yield norm.forward_launch(x, x, vector, vector, x, x, statistics, statistics, 1e-6, "std", 0.1, seed)
        yield norm.forward_launch(x, x, vector, None, x, x, None, statistics, 1e-6, "rms", 0.1, seed)


def norm_backward_cases(arch: str) -> Iterator[Launch]:
    """Launches of every backward config of Norm and RMSNorm, with all features on; the widest also in fp32."""
    widths = sorted(width for kernel, width in NORM if kernel == "backward" and width > 0)
    names = set()
    wide = (12288, 65536)  # slices of three and four blocks
    in_bf16 = ((d, torch.bfloat16) for d in (*widths, *wide))
    for d, dtype in [*in_bf16, (widths[-1], torch.float32), (65536, torch.float32)]:
        x = torch.empty((1024, d), dtype=dtype, device="meta")
        vector = torch.empty((d,), dtype=torch.float32, device="meta")
        statistics = torch.empty((1024,), dtype=torch.float32, device="meta")
        seed = torch.empty((1,), dtype=torch.int64, device="meta")
        programs = norm_backward.sharing_programs(1024, d, 132)
        partials = torch.empty((2, programs, d), dtype=torch.float32, device="meta")
        of_std = norm_backward.backward_launches(
            x, x, x, vector, statistics, statistics, x, x, vector, vector, partials, "std", 0.1, seed, programs
        )
        of_rms = norm_backward.backward_launches(
            x, x, x, vector, None, statistics, x, x, vector, None, partials[:1], "rms", 0.1, seed, programs
        )
        for launch in of_std + of_rms[:1]:  # the sum of partials of a weight alone is among dropout's cases
            if launch.name not in names:
                names.add(launch.name)
                yield launch


def dropout_cases(arch: str) -> Iterator[Launch]:
    """A launch for every config, forward and backward, with all features and with none, in bf16."""
    for d in (64, 512, 4096):
        x = torch.empty((1024, d), dtype=torch.bfloat16, device="meta")
        bias = torch.empty((d,), dtype=torch.float32, device="meta")
        seed = torch.empty((1,), dtype=torch.int64, device="meta")
        partials = torch.empty((dropout.sharing_programs(1024, d, 132), d), dtype=torch.float32, device="meta")
        yield dropout.forward_launch(x, bias, x, x, True, 0.1, seed)
        yield from dropout.backward_launches(x, None, x, None, None, 0.1, seed)
        yield from dropout.backward_launches(x, None, x, bias, partials, 0.1, seed)


def cross_entropy_cases(arch: str) -> Iterator[Launch]:
    """A launch for every config, with and without the gradient, in bf16."""
    for vocabulary in CROSS_ENTROPY:
        logits = torch.empty((1024, vocabulary), dtype=torch.bfloat16, device="meta")
        target = torch.empty((1024,), dtype=torch.int64, device="meta")
        losses = torch.empty((1024,), dtype=torch.float32, device="meta")
        for gradient in (False, True):
            yield cross_entropy.rows_launch(logits, target, losses, 0.1, -100, gradient)


CASES: dict[str, Callable[[str], Iterator[Launch]]] = {
    "attention": attention_cases,
    "attention_backward": attention_backward_cases,
    "attention_tile_map": attention_tile_map_cases,
    "attention_grad_bias": attention_grad_bias_cases,
    "attention_grad_distance_bias": attention_grad_distance_bias_cases,
    "attention_decode": attention_decode_cases,
    "norm": norm_cases,
    "norm_backward": norm_backward_cases,
    "dropout": dropout_cases,
    "cross_entropy": cross_entropy_cases,
}
"""By module of transformer_fast.triton, all that have Triton kernels."""
