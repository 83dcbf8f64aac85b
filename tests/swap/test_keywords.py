"""Wrong keywords of ``accelerate`` name the right one; nothing is changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import transformer_fast as tfast


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pack": True}, "accelerate() got an unexpected keyword argument 'pack'; did you mean packed?"),
        ({"quantise": "int8"}, "did you mean quantize?"),
        ({"x": 1}, "'x'; it takes fused_loss, packed, keep_weights, functional, quantize"),
        ({"packed": 1}, "accelerate: packed must be True or False, got 1"),
        ({"functional": None}, "accelerate: functional must be True or False, got None"),
    ],
)
def test_a_wrong_keyword_names_the_right_one(keywords: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=re.escape(message)):
        tfast.accelerate(model, **keywords)
    assert type(model[0]) is nn.LayerNorm


def test_the_package_and_the_function_are_one_call() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    assert tfast.accelerate(model).swapped and tfast.accelerate.accelerate(model).already
