"""Functions with peers' signatures on the Triton kernels: ragged sequences, and paged caches."""

from __future__ import annotations

import pytest
import torch
from attention_kernels import starts
from peers import plain_attention, seen, tokens

import transformer_fast as tfast
from transformer_fast.compat import AuxRequest, flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn

pytestmark = [pytest.mark.usefixtures("small_tiles"), pytest.mark.cover("values")]

H, D = 2, 16
LENGTHS_Q, LENGTHS_K = [3, 0, 9, 2], [13, 4, 5, 0]


def batch(device):
    leaves = [tokens(LENGTHS_Q, H, D, torch.float32), *(tokens(LENGTHS_K, 1, D, torch.float32) for _ in range(2))]
    packing = starts(LENGTHS_Q).to(device), starts(LENGTHS_K).to(device), 9, 13
    return leaves, [t.detach().to(device).requires_grad_() for t in leaves], packing


def plain(leaves, lengths_k, causal, window, slopes=None):
    q, k, v = leaves
    parts = zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K), lengths_k)
    return torch.cat(
        [
            plain_attention(a, b[:n], c[:n], seen(len(a), n, causal, window), slopes=slopes)[0].float()
            for a, b, c, n in parts
        ]
    )


@pytest.mark.parametrize(
    ("causal", "window", "alibi"), [(True, (-1, -1), False), (True, (4, 0), True), (False, (-1, -1), True)]
)
def test_ragged_sequences(causal, window, alibi, device):
    leaves, on_device, packing = batch(device)
    slopes = torch.rand(H) if alibi else None
    with tfast.backend("triton"):
        given = {"window_size": window, "alibi_slopes": None if slopes is None else slopes.to(device)}
        out = flash_attn_varlen_func(*on_device, *packing, causal=causal, **given)
        grads = torch.autograd.grad(out, on_device, torch.ones_like(out))
    expected = plain(leaves, LENGTHS_K, causal, window, slopes)
    for ours, theirs in zip((out, *grads), (expected, *torch.autograd.grad(expected.sum(), leaves))):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=2e-5)


def test_keys_in_use(device):
    leaves, on_device, packing = batch(device)
    used = [12, 4, 3, 0]
    with torch.no_grad(), tfast.backend("triton"):
        out, _ = varlen_attn(
            *on_device,
            *packing,
            seqused_k=torch.tensor(used, dtype=torch.int32, device=device),
            window_size=(-1, 0),
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        torch.testing.assert_close(out.cpu(), plain(leaves, used, True, (-1, -1)), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_a_cache(indexed, left, device):
    """The oracle is the reference backend, which tests/compat tests."""
    q, new = torch.randn(2, 2, H, D), torch.randn(2, 2, 2, 1, D)
    caches, lengths = torch.randn(2, 4, 24, 1, D), torch.tensor([9, 20], dtype=torch.int32)
    given = {"cache_batch_idx": torch.tensor([3, 1], dtype=torch.int32)} if indexed else {}
    given |= {"cache_leftpad": torch.tensor([3, 0], dtype=torch.int32)} if left else {}
    results = []
    for name, where in (("triton", device), ("reference", torch.device("cpu"))):
        copies = caches.clone().to(where)
        placed = {key: t.to(where) for key, t in given.items()}
        with tfast.backend(name):
            out = flash_attn_with_kvcache(
                q.to(where), *copies, *new.to(where), cache_seqlens=lengths.to(where), causal=True, **placed
            )
        results.append((out.cpu(), copies.cpu()))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)
