"""A growing cache under torch.compile: its offsets are symbols of the graph, not constants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast import AttentionMask, ops

B, H, D = 2, 2, 8
LENGTHS = (5, 7, 12, 30)
WEIGHT, TABLE = torch.randn(11, D), tfast.positional_table(64, D)
SLOPES, BUCKETS = torch.rand(H), torch.randn(8, H)
Masks = Callable[[int, int], AttentionMask]
MASKS: dict[str, Masks] = {
    "causal": lambda n, new: AttentionMask.causal(n - new),
    "window": lambda n, new: AttentionMask.window(n // 2, 1, n - new),
    "growing window": lambda n, new: AttentionMask.window(n - 3, offset=n - new),
    "both": lambda n, new: AttentionMask.causal(n - new) & AttentionMask.window(n, n),
    "alibi": lambda n, new: AttentionMask.alibi(SLOPES, n - new) & AttentionMask.causal(n - new),
    "relative": lambda n, new: AttentionMask.relative(BUCKETS, 16, offset=n - new),
}


def heads(length: int) -> Tensor:
    return torch.randn(B, H, length, D)


def assert_two_graphs(function: Callable[..., Tensor], inputs: Callable[[int], tuple]) -> None:
    """Assert that the first length makes one graph, the second one for all others, and results are equal."""
    torch._dynamo.reset()
    counter, frames = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in LENGTHS:
        args = inputs(length)
        torch.testing.assert_close(compiled(*args), function(*args))
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2]


@pytest.mark.cover("values")
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("name", MASKS)
def test_attention(name: str, new: int) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tfast.attention(q, k, v, MASKS[name](k.shape[2], q.shape[2]))

    assert_two_graphs(call, lambda n: (heads(new), heads(n), heads(n)))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["both", "alibi", "relative"])
def test_attention_in_training(name: str) -> None:
    def call(q: Tensor, k: Tensor) -> Tensor:
        return tfast.attention(q, k, k, MASKS[name](k.shape[2], q.shape[2]))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for length in LENGTHS:
        q, k = heads(3).requires_grad_(), heads(length)
        gradients = [torch.autograd.grad(f(q, k).square().sum(), q)[0] for f in (compiled, call)]
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 2


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_made_outside_the_graph(name: str) -> None:
    assert_two_graphs(tfast.attention, lambda n: (heads(3), heads(n), heads(n), MASKS[name](n, 3)))


def test_causal_as_an_argument_and_weights() -> None:
    def call(q: Tensor, k: Tensor) -> Tensor:
        return tfast.attention(q, k, k, causal=k.shape[2] - q.shape[2], return_weights=True)[1]

    assert_two_graphs(call, lambda n: (heads(3), heads(n)))


@pytest.mark.cover(2)
@pytest.mark.parametrize("name", MASKS)
def test_attention_packed(name: str) -> None:
    def call(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int) -> Tensor:
        mask = MASKS[name](max_seqlen_k, 3)
        return tfast.attention_packed(
            q, k, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=3, max_seqlen_k=max_seqlen_k, mask=mask
        )

    def inputs(n: int) -> tuple:
        starts = torch.tensor([0, n, 2 * n - 2], dtype=torch.int32)
        return torch.randn(6, H, D), torch.randn(2 * n - 2, H, D), torch.tensor([0, 3, 6], dtype=torch.int32), starts, n

    assert_two_graphs(call, inputs)


@pytest.mark.cover(3)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_attention_decode(name: str, paged: bool) -> None:
    def call(q: Tensor, cache: Tensor, lengths: Tensor, pages: Tensor | None) -> Tensor:
        S = cache.shape[2] if pages is None else cache.shape[1] * pages.shape[1]
        return tfast.attention_decode(q, cache, cache, lengths, page_table=pages, mask=MASKS[name](S, S - 2))

    def inputs(n: int) -> tuple:
        lengths = torch.tensor([n, n - 2], dtype=torch.int32)
        if not paged:
            return heads(3), heads(n), lengths, None
        pages = torch.arange(2 * n, dtype=torch.int32).view(2, n)
        return heads(3), torch.randn(2 * n, 4, H, D), lengths, pages

    assert_two_graphs(call, inputs)


def test_embed_and_positions() -> None:
    def call(ids: Tensor, x: Tensor, cache: Tensor) -> Tensor:
        offset = cache.shape[2]
        return tfast.embed(ids, WEIGHT, TABLE, offset=offset) + ops.add_positional(x, TABLE, offset)

    ids, x = torch.ones(B, 3, dtype=torch.int64), torch.ones(B, 3, D)
    assert_two_graphs(call, lambda n: (ids, x, heads(n)))


def test_exported_with_a_dynamic_cache() -> None:
    class Cached(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return tfast.attention(
                q, k, k, AttentionMask.causal(k.shape[2] - q.shape[2]) & AttentionMask.window(k.shape[2])
            )

    for strict in (False, True):
        shapes = {2: torch.export.Dim.STATIC}, {2: torch.export.Dim.AUTO}
        program = torch.export.export(Cached(), (heads(3), heads(9)), dynamic_shapes=shapes, strict=strict).module()
        for length in LENGTHS:
            q, k = heads(3), heads(length)
            torch.testing.assert_close(program(q, k), Cached()(q, k))
