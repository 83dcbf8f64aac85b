"""tests/ops/test_attention_outputs.py on the Triton kernels, by the same function."""

import pytest
from test_attention_outputs import *  # noqa: F403

import transformer_fast as tfast

pytestmark = [pytest.mark.usefixtures("small_tiles"), pytest.mark.cover("values")]


@pytest.fixture(autouse=True)
def _on_triton():
    with tfast.backend("triton"):
        yield
