"""Arguments with the names of other libraries: the error says what to write here."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import transformer_fast as tfast
from transformer_fast.ops._names import HINTS

Q, IDS, X, W = torch.randn(1, 2, 3, 4), torch.zeros(1, 3).long(), torch.randn(1, 3, 4), torch.ones(4)
TOKENS, ENDS, LENGTHS = torch.randn(3, 2, 4), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3])
CALLS = {
    "attention": (Q, Q, Q),
    "attention_packed": (TOKENS, TOKENS, TOKENS, ENDS, ENDS),
    "attention_decode": (Q, Q, Q, LENGTHS),
    "layer_norm": (X, W, W),
    "embed": (IDS, torch.randn(5, 4)),
}


@pytest.mark.parametrize(
    ("op", "given", "said"),
    [
        ("attention", {"is_causal": True}, r"argument: is_causal; write causal=True$"),
        ("attention", {"attn_mask": None}, r"AttentionMask\.keep\(t\) if True means kept.*blocked\(t\).*bias=t"),
        ("attention", {"key_padding_mask": None}, r"AttentionMask\.blocked\(t\[:, None, None, :\]\)"),
        ("attention", {"attn_bias": None}, "bias=t"),
        ("attention", {"softmax_scale": 1.0, "dropout": 0.1}, r"write scale=.*Also: dropout; write dropout_p="),
        ("attention", {"enable_gqa": True}, "k and v may have fewer heads"),
        ("attention", {"alibi_slopes": torch.ones(2)}, r"write mask=AttentionMask\.alibi\(slopes, offset\), offset Lk"),
        ("attention_packed", {"alibi_slopes": torch.ones(2)}, r"write mask=AttentionMask\.alibi\(slopes\)$"),
        ("attention_decode", {"return_softmax_lse": True}, "write return_logsumexp=True"),
        ("attention_packed", {"max_seqlen_q": 3}, "write max_q="),
        ("attention_packed", {"attn_mask": None}, r"mask=AttentionMask\.keep\(t\) of keys"),
        ("attention_decode", {"cache_seqlens": LENGTHS}, "write lengths"),
        ("attention_decode", {"dropout_p": 0.1}, "decoding has no dropout"),
        ("layer_norm", {"normalized_shape": (4,)}, "always normalises the last dimension"),
        ("embed", {"max_norm": 1.0}, r"torch\.nn\.functional\.embedding"),
        ("embed", {"positions": None}, "write table="),
        ("attention", {"colour": 1}, "argument: colour$"),
    ],
)
def test_a_name_of_another_library_gets_the_one_to_write(op: str, given: dict, said: str) -> None:
    with pytest.raises(TypeError, match=said) as raised:
        getattr(tfast, op)(*CALLS[op], **given)
    assert str(raised.value).startswith(f"{op}() got an unexpected keyword argument")


def test_the_shape_that_torch_wants_second() -> None:
    with pytest.raises(
        TypeError, match="weight must be a tensor, got tuple; unlike torch's, this layer_norm takes no normalized_shape"
    ):
        tfast.layer_norm(X, (4,), W)


@pytest.mark.parametrize("op", HINTS)
def test_what_the_hints_say_is_there(op: str) -> None:
    """Hints name existing things, and no hint is for an argument that the op has."""
    arguments = inspect.signature(getattr(tfast, op)).parameters
    for name, hint in HINTS[op].items():
        assert name not in arguments, f"{op} has {name}"
        written = re.findall(r"\b(\w+)=", hint) + re.findall(r"^(\w+)$", hint)
        assert all(word in arguments for word in written), f"{op}, {name}: {hint}"
        assert all(hasattr(tfast.AttentionMask, word) for word in re.findall(r"AttentionMask\.(\w+)", hint))
        with pytest.raises(TypeError, match=re.escape(f"{name}; write {hint}")):
            getattr(tfast, op)(*CALLS[op], **{name: None})
