"""Keywords of FlashAttention-3 and of other libraries in the functions of flash-attention 2: the error says what to
write."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

import transformer_fast as tfast
from transformer_fast import AttentionMask, compat
from transformer_fast.compat.flash_names import VERSION_3

B, L, H, D = 2, 6, 4, 8
PADDED, TOKENS, STARTS = torch.randn(B, L, H, D), torch.randn(B * L, H, D), torch.tensor([0, 6, 12], dtype=torch.int32)
CALLS: dict[str, tuple[Any, ...]] = {
    "flash_attn_func": (PADDED, PADDED, PADDED),
    "flash_attn_kvpacked_func": (PADDED, torch.stack((PADDED, PADDED), 2)),
    "flash_attn_qkvpacked_func": (torch.stack((PADDED, PADDED, PADDED), 2),),
    "flash_attn_varlen_func": (TOKENS, TOKENS, TOKENS, STARTS, STARTS, L, L),
    "flash_attn_varlen_kvpacked_func": (TOKENS, torch.stack((TOKENS, TOKENS), 1), STARTS, STARTS, L, L),
    "flash_attn_varlen_qkvpacked_func": (torch.stack((TOKENS, TOKENS, TOKENS), 1), STARTS, L),
    "flash_attn_with_kvcache": (PADDED[:, :1], PADDED, PADDED),
}


def arguments(name: str) -> list[str]:
    return [one for one in inspect.signature(getattr(compat, name)).parameters if one != "unknown"]


def test_every_function_is_tried() -> None:
    assert CALLS.keys() == {name for name in compat.__all__ if name.startswith("flash_attn")}
    for name, given in CALLS.items():
        getattr(compat, name)(*given)


@pytest.mark.parametrize("name", CALLS)
def test_names_of_version_3(name: str) -> None:
    for keyword, hint in VERSION_3.items():
        if keyword in arguments(name):
            continue
        said = f"{name}() got an unexpected keyword argument: {keyword}; write {hint}. The arguments here are those of "
        with pytest.raises(TypeError, match=f"^{re.escape(said)}flash-attention 2, not of FlashAttention-3$"):
            getattr(compat, name)(*CALLS[name], **{keyword: None})


@pytest.mark.parametrize("name", CALLS)
def test_other_names(name: str) -> None:
    call, known = getattr(compat, name), arguments(name)
    for keyword in known:
        with pytest.raises(TypeError, match=rf"argument: {keyword}_; did you mean {keyword}\?$"):
            call(*CALLS[name], **{f"{keyword}_": None})
    with pytest.raises(TypeError, match=rf"argument: colour; it takes {', '.join(known)}$"):
        call(*CALLS[name], colour=1)
    with pytest.raises(TypeError, match=r"argument: scale; write softmax_scale=\. Also: mask; write tfast\.att"):
        call(*CALLS[name], scale=1.0, mask=None)
    logsumexp = "return_softmax_lse" if name == "flash_attn_with_kvcache" else "return_attn_probs"
    with pytest.raises(TypeError, match=rf"argument: return_lse; write {logsumexp}=True"):
        call(*CALLS[name], return_lse=True)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "flash_attn_with_kvcache"])
def test_the_order_of_version_3(name: str) -> None:
    """FlashAttention-3 has no dropout, so that options by position are others."""
    with pytest.raises(TypeError, match="dropout_p must be a number, got None; FlashAttention-3 has another argument"):
        getattr(compat, name)(*CALLS[name], None, True)


def test_what_the_hints_say_is_there() -> None:
    for hint in VERSION_3.values():
        assert all(hasattr(AttentionMask, word) for word in re.findall(r"AttentionMask\.(\w+)", hint))
        assert all(hasattr(compat, word) for word in re.findall(r"compat\.(\w+)", hint))
    assert "seqused_k" in inspect.signature(compat.varlen_attn).parameters
    assert "sinks" in inspect.signature(tfast.attention).parameters


def test_what_to_write_for_a_second_query_and_for_chunks() -> None:
    q, qv, k, v = torch.randn(4, B, L, H, D).unbind()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,bjhd->bhij", qv, v)
    expected = torch.einsum("bhij,bjhd->bihd", (scores / (2 * D) ** 0.5).softmax(-1), v)
    torch.testing.assert_close(compat.flash_attn_func(torch.cat((q, qv), -1), torch.cat((k, v), -1), v), expected)

    place, chunk = torch.arange(L), 4
    kept = (place[:, None] // chunk == place // chunk) & (place <= place[:, None])
    ids = (place // chunk)[None]
    mask = AttentionMask.documents(ids) & AttentionMask.causal()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    torch.testing.assert_close(tfast.attention(q, k, v, mask), tfast.attention(q, k, v, kept))
