"""nn.MultiheadAttention in evaluation: one C++ call with the results of its parts, for supported calls only."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from accelerated import pair
from torch import nn
from torch_attention import MASKS, E, H, L, N, S, look_ahead, padding, typed

import transformer_fast as tfast
from transformer_fast.inference import multihead as _multihead
from transformer_fast.layers.torch_masks import is_look_ahead
from transformer_fast.testing import assert_as_exact_as_eager


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each call if it was one C++ call."""
    calls: list[bool] = []
    original = _multihead.evaluated_heads

    def spy(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(_multihead, "evaluated_heads", spy)
    return calls


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_mask_and_layout(name: str, dtype: torch.dtype, served: list[bool]) -> None:
    masks = MASKS[name]()
    made = [nn.MultiheadAttention(E, H, batch_first=first, bias=bias) for first, bias in ((True, True), (False, False))]
    for m in made:
        m = m.to(dtype).eval()
        exact, (_, fast, _) = copy.deepcopy(m).double(), pair(m)
        q, k, v = (torch.randn(N, n, E, dtype=dtype) for n in (L, S, S))
        q, k, v = (q, k, v) if m.batch_first else (t.transpose(0, 1) for t in (q, k, v))
        for (key, value), need, average in itertools.product(((k, k), (k, v)), (True, False), (True, False)):
            results = []
            for model, d in ((fast, dtype), (m, dtype), (exact, torch.float64)):
                inputs = q.to(d), (as_key := key.to(d)), as_key if value is key else value.to(d)
                options = typed(masks, d)
                with torch.no_grad():
                    results.append(model(*inputs, need_weights=need, average_attn_weights=average, **options))
            for ours, theirs, true in zip(*results, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
                    assert_as_exact_as_eager(ours, theirs, true, ulps=8.0)
    assert served == [True] * 16


@pytest.mark.parametrize("batch_first", [True, False])
def test_to_itself_and_the_same_as_from_its_parts(batch_first: bool, served: list[bool]) -> None:
    original, m, _ = pair(nn.MultiheadAttention(E, H, batch_first=batch_first).eval())
    x = torch.randn(N, L, E) if batch_first else torch.randn(L, N, E)
    for masks in ({}, {"attn_mask": look_ahead(L), "key_padding_mask": padding(L).flip(1)}):
        parts, weights = m(x, x, x, **masks, average_attn_weights=False)  # parameters want gradients
        with torch.no_grad():
            out, found = m(x, x, x, **masks, average_attn_weights=False)
            torch.testing.assert_close((out, found), (parts, weights))
            if not masks:
                torch.testing.assert_close(out, original(x, x, x)[0])
    assert served == [False, True] * 2


def test_what_is_not_served(served: list[bool]) -> None:
    m = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True)
    tfast.accelerate(m)
    x = torch.randn(N, L, E)
    m(x, x, x)  # training
    m.eval()(x, x, x)  # gradients
    with torch.no_grad():
        m(x[0], x[0], x[0])  # no batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            m(x, x, x)
        with tfast.backend("reference"):
            m(x, x, x)
        other = nn.MultiheadAttention(E, H, kdim=6, vdim=6, batch_first=True).eval()
        tfast.accelerate(other)
        other(x, x[..., :6], x[..., :6])
        m(x[:0], x[:0], x[:0])  # nothing
        assert not any(served)
        for wrong in (x[:, :, 1:], x[:1], x.double()):
            with pytest.raises((RuntimeError, ValueError, TypeError)):
                m(x, wrong, wrong)
        m(x, x, x)
    m.requires_grad_(False)(x, x, x)
    with torch.inference_mode():
        m(x, x, x)
    assert served[-3:] == [True] * 3 and sum(served) == 3


def test_a_learned_mask_is_no_constant_look_ahead():
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    assert is_look_ahead(mask, None) and not is_look_ahead(mask.requires_grad_(), None)


def test_a_mask_under_vmap_is_no_constant_look_ahead():
    seen = []
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    torch.vmap(lambda m: seen.append(is_look_ahead(m, None)) or m)(mask.expand(2, 5, 5))
    assert seen == [False]
