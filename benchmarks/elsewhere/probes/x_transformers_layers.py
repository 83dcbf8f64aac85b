"""The attention layer of x-transformers, and its positions."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import shared
import torch
from x_transformers.attend import Attend
from x_transformers.x_transformers import ScaledSinusoidalEmbedding

Array = np.ndarray


def attend(causal: bool = False, p: float = 0.0, flash: bool = False) -> Any:
    """Return a function that calls the part of the layer between its projections."""
    m = Attend(causal=causal, dropout=p, flash=flash).train()

    def call(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        q, k, v = (torch.from_numpy(a) for a in (q, k, v))
        given = None if mask is None else torch.from_numpy(mask)
        return m(q, k, v, mask=given)[0].numpy()

    return call


def both(what: Any, **options: Any) -> str:
    """Say what the layer does without and with its fast kernel, once if that is the same."""
    words = [what(attend(flash=flash, **options)) for flash in (False, True)]
    return words[0] if words[0] == words[1] else f"{words[0]}; `flash=True`: {words[1]}"


width = ScaledSinusoidalEmbedding(16)
table = (width(torch.zeros(1, 9, 16)) / width.scale).detach().numpy()
rows = {
    "x-transformers `Attend`": {
        "empty": both(lambda f: shared.row_without_keys(f, axes=(shared.B, 1))),
        "mask": both(lambda f: shared.meanings(f, ["(Lq, Lk)", "(B, 1, 1, Lk)", "(B, 1, Lq, Lk)", "(B, H, Lq, Lk)"])),
        "causal": both(shared.causal, causal=True),
        "dropout": both(shared.dropout, p=0.5),
    },
    "x-transformers `ScaledSinusoidalEmbedding`": {"positions": shared.table_of_positions(table) + ", times a scale"},
}
shared.emit(rows, f"x-transformers {version('x-transformers')}")
