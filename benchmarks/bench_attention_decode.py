"""One new token against a long cache: the decoding kernel against eager, SDPA and our own attention."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast import reference

SMALL_CASE = "test_decode[cpu-cpu-b1h8kv8s512]"


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences of H query heads on Hkv key heads of 64, with caches of S places, filled from a quarter on."""

    B: int
    H: int
    Hkv: int
    S: int
    page_size: int | None = None
    D: int = 64

    def __str__(self) -> str:
        pages = f"-pages{self.page_size}" if self.page_size else ""
        return f"b{self.B}h{self.H}kv{self.Hkv}s{self.S}{pages}"


CASES = {
    "cpu": [Case(1, 8, 8, 512), Case(16, 8, 8, 256), Case(4, 8, 2, 4096), Case(4, 8, 2, 4096, page_size=64)],
    "cuda": [
        Case(1, 16, 16, 16384),
        Case(64, 8, 8, 256),
        Case(16, 32, 8, 8192),
        Case(16, 32, 8, 8192, page_size=64),
    ],
}
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
}


@pytest.mark.parametrize(("on", "case"), [(on, case) for on, cases in CASES.items() for case in cases], ids=str)
def test_decode(versus, device, on, case):
    if on != device:
        pytest.skip(f"a case for {on}")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    scale, group = 1 / math.sqrt(case.D), case.H // case.Hkv
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(case.S // 4, case.S + 1, (case.B,), generator=generator).to(device)
    short = lengths.to(torch.int32)
    keep = (torch.arange(case.S, device=device) < lengths[:, None])[:, None, None]

    def make_inputs():
        q = torch.randn(case.B, case.H, 1, case.D, device=device, dtype=dtype)
        k, v = (torch.randn(case.B, case.Hkv, case.S, case.D, device=device, dtype=dtype) for _ in range(2))
        if case.page_size is None:
            return q, k, v, k, v, None
        pages = case.S // case.page_size
        order = torch.randperm(case.B * pages, device=device)
        stored = (t.transpose(1, 2).reshape(case.B * pages, case.page_size, case.Hkv, case.D)[order] for t in (k, v))
        return q, k, v, *stored, torch.argsort(order).view(case.B, pages).to(torch.int32)

    def ours(inputs):
        q, _, _, k, v, table = inputs
        return tfast.attention_decode(q, k, v, short, page_table=table)

    def eager(inputs):
        q, k, v = inputs[:3]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return ((q @ k.transpose(-2, -1) * scale).masked_fill(~keep, -1e9)).softmax(-1) @ v

    def sdpa(backend):
        def call(inputs):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*inputs[:3], attn_mask=keep, enable_gqa=group > 1)

        return call

    def check(inputs):
        expected = reference.attention.attention(*inputs[:3], lengths=short, scale=scale)[0]
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours(inputs), expected, atol=tolerance, rtol=tolerance)

    calls = {"ours": ours, "eager": eager}
    calls["our attention"] = lambda inputs: tfast.attention(*inputs[:3], tfast.AttentionMask.lengths(short))
    calls |= {f"sdpa {backend.name.lower()}": sdpa(backend) for backend in BACKENDS[device]}
    read = int(lengths.sum()) * case.Hkv * case.D * 2
    versus(make_inputs, calls, check=check, bytes_moved=read * dtype.itemsize, operations=2.0 * read * group)
