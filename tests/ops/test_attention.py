"""``tfast.attention`` as users call it.

That every backend computes every mask is held by test_attention_kernels.py, and by tests/fuzz through this function.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import transformer_fast as tfast
from transformer_fast import AttentionMask


def test_explain_names_the_path_and_the_reason():
    q = torch.randn(1, 2, 3, 4)
    text = tfast.explain(q, q, q, AttentionMask.lengths(torch.tensor([2])), causal=True, dropout_p=0.1)
    assert "mask: lengths(int64 (1,)) & causal()" in text and "dropout: 0.1" in text
    with tfast.backend("reference"):
        assert "backend: reference" in tfast.explain(q, q, q) and "requested" in tfast.explain(q, q, q)
    assert "mask: bias(float32 (1, 1, 3, 3))" in tfast.explain(q, q, q, bias=torch.zeros(3, 3))


def test_explain_counts_the_tiles_that_hold_work():
    """Counted by hand for tiles of 64 x 128: two batches of 4 x 2 tiles, one with 130 visible keys, one with 10."""
    q, k = torch.zeros(2, 1, 256, 8), torch.zeros(2, 1, 256, 8)
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.lengths(torch.tensor([130, 10])))
    assert "work: 75.0% of 16 tiles of 64 queries x 128 keys are computed (4 full, 8 partly masked)" in text
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.window(40, right=None))
    assert "mask: window(40, None)" in text
    # In each of two batches, the last 64 queries see no key below 152, and the first 128 all from 128 on.
    assert "work: 87.5% of 16 tiles of 64 queries x 128 keys are computed (4 full, 10 partly masked)" in text


def test_explain_and_the_call_refuse_alike():
    q = torch.randn(1, 2, 3, 257)
    with tfast.backend("triton"):
        for call in (tfast.explain, tfast.attention):
            with pytest.raises(tfast.BackendError, match="TRITON_INTERPRET=1"):
                call(q, q, q)


def test_attention_joins_a_mask_and_causal() -> None:
    """F.scaled_dot_product_attention joins them in one kernel of some versions, and refuses both elsewhere."""
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    keep = torch.rand(2, 1, 5, 5) > 0.3
    keep[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, keep & torch.ones(5, 5).tril().bool())
    torch.testing.assert_close(tfast.attention(q, k, v, keep, causal=True), expected)
