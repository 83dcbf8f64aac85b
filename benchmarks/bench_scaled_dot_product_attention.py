"""scaled_dot_product_attention against torch's function, which it can replace.

Queries, keys and values as a model has them, heads behind the length. torch chooses its kernel: on a CPU its flash
kernel without dropout, and with dropout one product after the other.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast

SMALL_CASE = "test_scaled_dot_product_attention[cpu-1-none-evaluation-fp32]"
B, H, D = 4, 8, 64
LENGTHS = (1, 16, 128, 256, 512, 1024)
MASKS = ("none", "causal", "padding", "dense", "added")
KINDS = {"evaluation": (False, 0.0), "training": (True, 0.0), "training with dropout": (True, 0.1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_scaled_dot_product_attention(versus, length, mask, kind, dtype, device):
    training, dropout_p = KINDS[kind]
    if length == 1 and (training or mask in ("dense", "added")):
        pytest.skip("one query against the keys of a cache is what a step of decoding does")
    keys = max(length, 128) if length == 1 else length
    if mask == "causal" and keys != length:
        pytest.skip("is_causal lets the one query see the first key alone")

    def make_inputs():
        def heads(n):
            return torch.randn(B, n, H, D, dtype=dtype, device=device).transpose(1, 2).requires_grad_(training)

        lengths = torch.randint(keys // 2, keys + 1, (B, 1, 1, 1), device=device)
        given = {
            "padding": lambda: torch.arange(keys, device=device) < lengths,
            "dense": lambda: torch.rand(B, 1, length, keys, device=device) > 0.2,
            "added": lambda: torch.randn(1, H, length, keys, dtype=dtype, device=device),
        }
        return heads(length), heads(keys), heads(keys), given[mask]() if mask in given else None

    def run(attend, p=dropout_p):
        def call(inputs):
            *qkv, given = inputs
            if not training:
                with torch.no_grad():
                    return (attend(*qkv, given, p, mask == "causal"),)
            out = attend(*qkv, given, p, mask == "causal")
            return out, *torch.autograd.grad(out, qkv, out.detach())

        return call

    ours, torchs = tfast.scaled_dot_product_attention, F.scaled_dot_product_attention

    def check(inputs):
        tolerance = 1e-4 if dtype == torch.float32 else 6e-2
        for a, b in zip(run(ours, 0.0)(inputs), run(torchs, 0.0)(inputs)):
            torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)

    versus(make_inputs, {"ours": run(ours), "torch": run(torchs)}, check=check)
