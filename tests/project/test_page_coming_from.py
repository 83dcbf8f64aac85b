"""Each row of the first table of docs/compat.md: the call of the other library, and ours, give the same numbers.

Calls of torch run torch's own function. flash-attention and FlashMask are not installed, and torch's ``varlen_attn`` is
for GPUs: these names are those of `transformer_fast.compat`, which tests/compat holds to plain code.
"""

from __future__ import annotations

import pages
import pytest
import torch

PAGE = pages.DOCS / "compat.md"
NAMES, *_ = pages.blocks(PAGE)
ROWS = [tuple(cell.strip("`") for cell in row.values()) for row in pages.tables(PAGE)[0]]
ON_A_GPU = "from transformer_fast.compat import varlen_attn"
FROM_TORCH = "from torch.nn.attention.flex_attention import flex_attention"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "theirs, ours", ROWS, ids=[f"{n}-{theirs.partition('(')[0]}" for n, (theirs, _) in enumerate(ROWS)]
)
def test_both_columns_give_the_same_numbers(theirs: str, ours: str) -> None:
    assert theirs != ours
    torch.manual_seed(0)
    names: dict = {}
    exec(f"{NAMES}\n{ON_A_GPU}\n{FROM_TORCH}", names)
    expected, found = eval(theirs, names), eval(ours, names)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_table_has_each_library() -> None:
    for name in ("F.scaled_dot", "flash_attn_func", "flash_attn_varlen", "varlen_attn", "flex_att", "flashmask_att"):
        assert any(theirs.startswith(name) for theirs, _ in ROWS), name
