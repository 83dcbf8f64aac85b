"""Each op just below, at and above every size at which it changes its path."""

from __future__ import annotations

import pytest
import torch
from thresholds import OTHERS, THRESHOLDS, found

FOUND = dict(found())


def test_every_number_in_the_code_is_in_a_table() -> None:
    unknown = [name for name in FOUND if name not in OTHERS and name not in THRESHOLDS and "/simd/" not in name]
    assert not unknown, "add these to tests/support/thresholds.py"
    gone = [name for name in (*THRESHOLDS, *OTHERS) if name not in FOUND]
    assert not gone, "these are no longer in the code under this name"


@pytest.mark.parametrize("name", THRESHOLDS)
def test_both_sides(name: str) -> None:
    torch.manual_seed(0)
    for size in (FOUND[name] - 1, FOUND[name], FOUND[name] + 1):
        THRESHOLDS[name](size)
