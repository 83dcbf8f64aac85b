"""BERTs after ``tfast.accelerate`` in evaluation: the end of each block, and query, key and value, as one call each,
beside the same model with a call per module. One sentence, of 16 tokens for the smaller model and 32 for the larger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import transformer_fast as tfast
from transformer_fast.accelerate.patterns import bert

SMALL_CASE = "test_block[cpu-4 x 256-int8]"
CALLS = {name: getattr(bert, name) for name in ("block_end", "evaluated_linears")}
SIZES = {"4 x 256": (4, 256, 8, 16), "6 x 512": (6, 512, 8, 32)}
"""Layers, d_model, heads and tokens; d_ff is four times d_model."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}


def none(*_: Any, **__: Any) -> None:
    """Answer of a call that the modules must compute."""


@contextlib.contextmanager
def by_modules() -> Iterator[None]:
    """Make the patterns call each module."""
    vars(bert).update(dict.fromkeys(CALLS, none))
    try:
        yield
    finally:
        vars(bert).update(CALLS)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_block(versus, size, dtype, device):
    """The last hidden states; fp32 and bf16 with ``keep_weights=True``."""
    if device != "cpu":
        pytest.skip("the call is one of the CPU")
    transformers = pytest.importorskip("transformers")
    layers, width, heads, tokens = SIZES[size]
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    config = transformers.BertConfig(vocab_size=8000, intermediate_size=4 * width, **sizes)
    model = transformers.BertModel(config, add_pooling_layer=False).eval().to(TYPES[dtype])
    tfast.accelerate(model, **({"quantize": "int8"} if dtype == "int8" else {"keep_weights": True}))

    @torch.no_grad()
    def ours(ids):
        return model(ids)[0]

    def modules(ids):
        with by_modules():
            return ours(ids)

    versus(lambda: torch.randint(5, 8000, (1, tokens)), {"ours": ours, "by modules": modules})
