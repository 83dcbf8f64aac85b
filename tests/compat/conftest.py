"""Fixtures: uninitialised memory starts as NaN, and each backend of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import poisoned  # noqa: F401

import transformer_fast as tfast


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on one backend."""
    with tfast.backend(request.param):
        yield request.param
