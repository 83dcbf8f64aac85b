"""What tests of several ops need: the gate, poisoned memory, mask parts of every dialect, a step compiled and not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from transformer_fast.cli.verification import ULPS, errors

OLD_TORCH = torch.__version__ < TorchVersion("2.13")
"""Whether PyTorch may be 2.11, whose own faults some tests name."""


def assert_as_exact_as_eager(
    actual: Tensor, eager: Tensor, exact: Tensor, *, ulps: float = ULPS, what: str = "result"
) -> None:
    """The gate of every kernel: no further from the fp64 truth than twice eager PyTorch in the same dtype.

    Args:
        actual: what the kernel computed.
        eager: what the reference computed in the kernel's own dtype.
        exact: what the reference computed in fp64.
        ulps: allowance, in units of the last place of the largest exact value; for sums over many rows pass
            ``4 * rows ** 0.5``.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert torch.equal(actual.isfinite(), exact.isfinite()), f"{what}: finite elsewhere than the reference"
    error, allowed, eager_error = errors(actual, eager, exact, ulps)
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (eager: {eager_error:.3e})"


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that PyTorch leaves uninitialised, in Python or in C++, starts as NaN.

    `torch.use_deterministic_algorithms` does the same, and imports the compiler: two seconds of every process.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """For the conftest of a folder: :func:`poisoned_memory` around each of its tests."""
    with poisoned_memory():
        yield


@contextlib.contextmanager
def fixed_seed(value: int) -> Iterator[Tensor]:
    """Every dropout mask drawn inside comes from this one seed, so that the oracle can be given the same."""
    seeds: dict[torch.device, Tensor] = {}

    def draw(device: torch.device) -> Tensor:
        return seeds.setdefault(device, torch.tensor([value], dtype=torch.int64, device=device))

    def draw_for_launch(device: torch.device, as_number: bool) -> int | Tensor:
        return value if as_number else draw(device)

    module = "transformer_fast.ops._seed"
    with mock.patch(f"{module}.draw_seed", draw), mock.patch(f"{module}.draw_launch_seed", draw_for_launch):
        yield torch.tensor([value], dtype=torch.int64)


def mask_parts(B: int, H: int, Lq: int, Lk: int, generator: torch.Generator) -> dict[str, dict]:
    """One mask of each dialect and one of all together, in the normal form the op takes, by name."""

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
    """A compiled model gives the output of the model, and the gradients of its parameters, from one seed."""
    results = []
    for m in (compiled, model):
        torch.manual_seed(0)
        out = m(*args)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)
