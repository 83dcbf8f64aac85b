"""scaled_dot_product_attention on the Triton kernels: each entry point, and the call that they do not support."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast.ops.scaled_dot_product_attention import TORCH

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered"),
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.cover("values"),
]

SHAPES = {
    "four dimensions": ((1, 2, 17, 16), (1, 2, 33, 16), {}),
    "three dimensions": ((2, 17, 16), (2, 33, 16), {}),
    "causal": ((1, 2, 17, 16), (1, 2, 17, 16), {"is_causal": True}),
    "groups": ((1, 2, 17, 16), (1, 1, 17, 16), {"enable_gqa": True}),
    "too wide": ((1, 1, 3, 264), (1, 1, 5, 264), {}),
}

MASKED = [
    (name, kind) for name, (*_, options) in SHAPES.items() if "is_causal" not in options for kind in ("bool", "float")
]


@pytest.mark.parametrize(("name", "kind"), [*((name, "none") for name in SHAPES), *MASKED])
def test_as_torch_computes(name: str, kind: str, device: torch.device) -> None:
    query, key, options = SHAPES[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device=device).requires_grad_() for shape in (query, key, key))
    scores = torch.randn(query[-2], key[-2], device=device)
    scores[1] = -torch.inf  # a query that sees no key
    mask = {"none": None, "bool": scores > -0.5, "float": scores}[kind]
    results = []
    for attend in (tfast.scaled_dot_product_attention, TORCH):
        with tfast.backend("triton"), sdpa_kernel(SDPBackend.MATH):
            out = attend(q, k, v, mask, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), [q, k, v])])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
