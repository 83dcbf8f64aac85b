"""Fixture for all tests here: transformers knows our attention by its name."""

import pytest

import transformer_fast as tfast


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    for _ in range(2):
        tfast.integrations.transformers.register()
