"""Helpers of several tests: poisoned memory, mask parts of every dialect, and a compiled training step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from transformer_fast.testing import poisoned_memory

OLD_TORCH = torch.__version__ < TorchVersion("2.13")
"""True if PyTorch may be 2.11, whose bugs some tests allow for."""


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Run each test of a folder in :func:`poisoned_memory`; for use in a conftest."""
    with poisoned_memory():
        yield


def mask_parts(B: int, H: int, Lq: int, Lk: int, generator: torch.Generator) -> dict[str, dict]:
    """Return one mask per dialect and one with all parts, in the op's normal form, by name."""

    def bools(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) > 0.4

    lengths = torch.randint(0, Lk + 1, (B,), generator=generator, dtype=torch.int32)
    per_query = torch.randint(0, Lk + 1, (B, Lq), generator=generator, dtype=torch.int32)
    return {
        "none": {},
        "dense": {"keep": bools(B, H, Lq, Lk)},
        "dense shared by heads": {"keep": bools(B, 1, Lq, Lk)},
        "dense shared by all": {"keep": bools(1, 1, Lq, Lk)},
        "rows": {"keep": bools(B, 1, Lq, 1)},
        "padding": {"key_keep": bools(B, 1, 1, Lk)},
        "lengths": {"lengths": lengths},
        "lengths per query": {"lengths": per_query},
        "causal": {"causal": 0},
        "causal with offset": {"causal": Lk - Lq},
        "causal, first rows empty": {"causal": -2},
        "window": {"causal": 1, "window": -3},
        "window, last rows empty": {"window": Lk - Lq + 3},
        "all": {
            "keep": bools(B, 1, Lq, Lk),
            "key_keep": bools(B, 1, 1, Lk),
            "lengths": lengths,
            "causal": max(0, Lk - Lq),
            "window": -Lk // 2,
        },
    }


def assert_trained_alike(compiled: nn.Module, model: nn.Module, args: tuple) -> None:
    """Assert that a compiled model gives the model's output and gradients from one seed."""
    results = []
    for m in (compiled, model):
        torch.manual_seed(0)
        out = m(*args)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
