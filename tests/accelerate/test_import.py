"""The name ``transformer_fast.accelerate`` is a function and a package."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
from torch import nn

import transformer_fast as tfast
import transformer_fast.accelerate.lazy_logits
import transformer_fast.accelerate.patterns.base as base
from transformer_fast.accelerate import accelerate, lazy_logits

STATEMENTS = [
    "import transformer_fast.accelerate.lazy_logits; transformer_fast.accelerate.lazy_logits.LazyLogits",
    "import transformer_fast.accelerate.lazy_logits as m; m.LazyLogits",
    "import transformer_fast.accelerate as m; m(torch.nn.LayerNorm(4)); m.Report",
    "from transformer_fast.accelerate import lazy_logits as m; m.LazyLogits",
    "from transformer_fast.accelerate.lazy_logits import LazyLogits",
    "from transformer_fast import accelerate; accelerate(torch.nn.LayerNorm(4))",
    "from transformer_fast.accelerate import accelerate; accelerate(torch.nn.LayerNorm(4))",
    "from transformer_fast import *; accelerate(torch.nn.LayerNorm(4))",
]


def test_every_way_to_import() -> None:
    """Each in a fresh interpreter's namespace, all of them in one process and in either order."""
    for statements in (STATEMENTS, STATEMENTS[::-1]):
        program = "\n".join(["import torch", *statements])
        subprocess.run([sys.executable, "-c", program], check=True)


def test_submodules_are_attributes() -> None:
    assert transformer_fast.accelerate.lazy_logits is lazy_logits
    assert base.__name__ == "transformer_fast.accelerate.patterns.base"


@pytest.mark.parametrize("function", [tfast.accelerate, accelerate], ids=["package", "function"])
def test_it_is_a_function(function: object) -> None:
    assert callable(function) and list(inspect.signature(function).parameters) == ["model", "fused_loss"]
    assert "in place" in (inspect.getdoc(function) or "")
    assert pickle.loads(pickle.dumps(function)) is function and copy.deepcopy(function) is function
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
        function(3)
    assert function(nn.Sequential(nn.LayerNorm(4))).swapped
