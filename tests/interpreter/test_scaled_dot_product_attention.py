"""scaled_dot_product_attention on the Triton kernels: each way in, and the call that they do not take."""

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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_as_torch_computes(name: str, kind: str, device: torch.device) -> None:
    query, key, options = SHAPES[name]
    if kind != "none" and options.get("is_causal"):
        pytest.skip("torch wants one of the two")
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
