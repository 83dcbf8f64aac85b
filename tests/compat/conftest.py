"""Memory that PyTorch leaves uninitialised starts as NaN; each backend that a CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import poisoned  # noqa: F401

import transformer_fast as tfast


@pytest.fixture(params=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of the test's calls."""
    with tfast.backend(request.param):
        yield request.param
