"""Attention in PyTorch's own operators against the reference, on random calls with every part."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import reference
from transformer_fast.ops import _plain_attention as plain

H, D = 4, 8
CALLS = 300


class Drawn:
    """A random call: its sizes, and the options that all ops take."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.random = random.Random(number)
        self.B, self.Hkv = self.random.randint(1, 3), self.random.choice([1, 2, 4])
        self.Lq, self.Lk = self.random.randint(1, 5), self.random.randint(1, 6)
        self.options: dict[str, Any] = {"scale": 0.3, "softcap": self.maybe(2.0)}
        self.options |= {"causal": self.maybe(self.random.randint(-2, 3)), "window": self.maybe(-1)}
        sinks = torch.randn(H)
        sinks[0] = self.random.choice([1.0, float("-inf")])
        self.options["sinks"] = self.maybe(sinks)

    def maybe(self, part: Any) -> Any:
        return part if self.random.random() < 0.4 else None

    def bias(self, *shape: int) -> Tensor:
        bias = torch.randn(shape)
        return bias.masked_fill(torch.rand(shape) < 0.3, float("-inf"))

    def ids(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> dict[str, Tensor]:
        drawn = {"query_ids": torch.randint(0, 2, queries).int(), "key_ids": torch.randint(0, 2, keys).int()}
        return self.maybe(drawn) or {}

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        keys = self.B, self.Hkv, self.Lk, D
        return torch.randn(self.B, H, self.Lq, D), torch.randn(keys), torch.randn(keys)


@pytest.mark.parametrize("empty_rows", ["zero", "uniform"])
def test_padded(empty_rows: str) -> None:
    for number in range(CALLS):
        drawn = Drawn(number)
        (B, Lq, Lk), (q, k, v) = (drawn.B, drawn.Lq, drawn.Lk), drawn.batch()
        options = drawn.options | drawn.ids((B, Lq), (B, Lk))
        options |= {"keep": drawn.maybe(torch.rand(B, 1, Lq, Lk) > 0.4), "bias": drawn.maybe(drawn.bias(H, Lq, Lk))}
        options |= {"key_keep": drawn.maybe(torch.rand(B, 1, 1, Lk) > 0.4)}
        options |= {"lengths": drawn.maybe(torch.randint(0, Lk + 1, (B,)).int())}
        options |= {"distance_bias": drawn.maybe(torch.randn(1, H, Lq + Lk - 1))}
        expected = reference.attention.attention(q, k, v, **options, empty_rows=empty_rows)
        options["zero_empty_rows"] = empty_rows == "zero"
        weights = plain.attention_weights(q, k, **options)
        torch.testing.assert_close((*plain.attention(q, k, v, **options)[:2], weights), (*expected[::2], expected[1]))


def test_decoding() -> None:
    for number in range(CALLS):
        drawn = Drawn(number)
        q, k, v = drawn.batch()
        lengths = torch.randint(0, drawn.Lk + 1, (drawn.B,)).int()
        options = drawn.options | drawn.ids((drawn.B, drawn.Lq), (drawn.B, drawn.Lk))
        options |= {"distance_bias": drawn.maybe(torch.randn(1, H, drawn.Lq + drawn.Lk - 1))}
        expected = reference.attention.attention_decode(q, k, v, lengths=lengths, **options)
        torch.testing.assert_close(plain.attention_decode(q, k, v, lengths, None, **options), expected)


@pytest.mark.parametrize("zero_empty_rows", [True, False])
@pytest.mark.parametrize("bottom_right", [True, False])
def test_packed(zero_empty_rows: bool, bottom_right: bool) -> None:
    for number in range(CALLS):
        drawn = Drawn(number)
        queries, keys = torch.randint(0, 5, (drawn.B,)), torch.randint(0, 5, (drawn.B,))
        queries[0] = keys[0] = 3
        max_seqlen_q, max_seqlen_k = int(queries.max()), int(keys.max()) + drawn.random.randint(0, 2)
        q, k = torch.randn(int(queries.sum()), H, D), torch.randn(int(keys.sum()), drawn.Hkv, D)
        of_q, of_k, pairs = (torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (queries, keys, queries * keys))
        options = drawn.options | {
            "cu_seqlens_q": of_q.int(),
            "cu_seqlens_k": of_k.int(),
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        }
        options |= {
            "zero_empty_rows": zero_empty_rows,
            "bottom_right": bottom_right,
            **drawn.ids(q.shape[:1], k.shape[:1]),
        }
        options |= {"seqused_k": drawn.maybe((torch.rand(drawn.B) * (keys + 1)).int())}
        options |= {"distance_bias": drawn.maybe(torch.randn(1, H, max_seqlen_q + max_seqlen_k - 1))}
        options |= drawn.maybe({"bias": drawn.bias(H, int(pairs[-1])), "bias_starts": pairs}) or {}
        out, _, logsumexp = reference.attention.attention_packed(q, k, k, **options)
        torch.testing.assert_close(plain.attention(q, k, k, **options)[:2], (out, logsumexp))
