"""Fixtures that tests of ``accelerate`` and ``register`` share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from accelerated import fused, small_calls  # noqa: F401
from registered_texts import Layer, Stack
from torch import nn

import transformer_fast as tfast


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Any]:
    """Return a plain model, the same without padding, and its report."""
    plain = Stack(Layer)
    model = copy.deepcopy(plain)
    return plain, model, tfast.accelerate(model, packed=True)
