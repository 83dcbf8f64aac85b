"""The attention of xformers, which has no kernel for a CPU: its masks, and what its operators say of themselves."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import shared
import torch
import xformers.ops as xops
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask, LowerTriangularMask


def corner(bias: Any) -> str:
    """Say which corner a mask starts from, with 2 queries and 4 keys."""
    keep = bias.materialize((2, 4)).exp() > 0
    squares = {"top left": torch.ones(2, 4).tril() > 0, "bottom right": torch.ones(2, 4).tril(2) > 0}
    return next(name for name, right in squares.items() if torch.equal(keep, right))


def call() -> Any:
    """Run the function on a CPU."""
    return xops.memory_efficient_attention(*[torch.ones(1, 4, 2, 8)] * 3)


def with_dropout() -> str:
    """Count the forward operators that take dropout, by what each says of itself."""
    words = {op.NAME: "takes it" if op.SUPPORTS_DROPOUT else "none" for op in fmha.ALL_FW_OPS}
    return "; ".join(f"{name} {word}" for name, word in sorted(words.items()))


refusal = shared.tried(call)
assert isinstance(refusal, str)
rows = {
    "xformers `memory_efficient_attention`": {
        "empty": f"not run: on a CPU {refusal}",
        "mask": "not run; a tensor is added, by its documentation",
        "causal": f"`LowerTriangularMask`: {corner(LowerTriangularMask())}; "
        f"`LowerTriangularFromBottomRightMask`: {corner(LowerTriangularFromBottomRightMask())}",
        "dropout": with_dropout(),
    }
}
shared.emit(rows, f"xformers {version('xformers')}")
