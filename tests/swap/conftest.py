"""Fixtures that tests of ``accelerate`` and ``register`` share."""

from __future__ import annotations

from typing import Any

import accelerated
import pytest
from accelerated import fused, small_calls  # noqa: F401
from registered_texts import Layer, Stack
from torch import nn


@pytest.fixture
def sides() -> tuple[nn.Module, nn.Module, Any]:
    """Return a plain model, the same without padding, and its report."""
    return accelerated.pair(lambda: Stack(Layer), packed=True)
