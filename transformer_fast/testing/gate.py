"""Error gate for kernels: at most twice eager PyTorch's error against fp64, plus a few roundings."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 4.0
"""Roundings that the gate allows by default, in units in the last place of the largest exact value."""


def errors(actual: Tensor, eager: Tensor, exact: Tensor, ulps: float = ULPS) -> tuple[float, float, float]:
    """Compare a kernel and eager PyTorch with fp64, at finite exact values.

    Args:
        actual: result of the kernel, any shape, any floating dtype.
        eager: result of plain PyTorch in the kernel's own dtype, same shape.
        exact: result of plain PyTorch in fp64, same shape.
        ulps: allowance, in units in the last place of the largest exact value.

    Returns:
        The largest error of the kernel, the largest allowed error, and the largest error of eager PyTorch.
    """
    finite = exact.isfinite()
    if not finite.any():
        return 0.0, 0.0, 0.0
    exact = exact.double()[finite]
    error = (actual.double()[finite] - exact).abs().max().item()
    eager_error = (eager.double()[finite] - exact).abs().nan_to_num(0.0).max().item()
    rounding = ulps * torch.finfo(actual.dtype).eps * max(exact.abs().max().item(), 1e-30)
    return error, 2 * eager_error + rounding, eager_error


def assert_as_exact_as_eager(
    actual: Tensor, eager: Tensor, exact: Tensor, *, ulps: float = ULPS, what: str = "result"
) -> None:
    """Assert that a kernel passes the gate: errors within :func:`errors`, and NaN and Inf at the same places as the
    exact values.

    Args:
        actual, eager, exact: as for :func:`errors`.
        ulps: allowance; for sums over many rows pass ``4 * rows ** 0.5``.
        what: name of the result, for the message.

    Raises:
        AssertionError: if the shape differs from the exact values, finite values are at other places, or an error
            exceeds the allowance.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert torch.equal(actual.isfinite(), exact.isfinite()), f"{what}: finite elsewhere than the reference"
    error, allowed, eager_error = errors(actual, eager, exact, ulps)
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (eager: {eager_error:.3e})"
