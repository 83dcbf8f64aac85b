"""Intervals, and unions of masks: calls against a keep mask of the same keys, their text, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.ops.attention_checks import kernel_mask

B, H, L, D = 2, 4, 70, 16
LENGTHS = torch.tensor([L, 51])
I = torch.arange(L)  # noqa: E741
STARTS = torch.tensor([40, 12])
"""Where the first answer to a question begins; the second begins 10 tokens later."""


def shared_question() -> AttentionMask:
    """A question, and two answers that see the question and not each other."""
    answer = (STARTS[:, None] <= I).int() + (STARTS[:, None] + 10 <= I).int()
    return AttentionMask.causal() & (AttentionMask.lengths(STARTS) | AttentionMask.documents(answer))


MASKS = {
    "ends": AttentionMask.intervals(None, (I + 5).clamp(max=60)),
    "ends of each sequence": AttentionMask.intervals(None, torch.stack([I, I // 2])),
    "ends of each head": AttentionMask.intervals(None, I + torch.arange(B * H).view(B, H, 1)),
    "begins": AttentionMask.intervals(I - 3, None),
    "both": AttentionMask.intervals(I // 2, I + 9),
    "both, all heads of a sequence alike": AttentionMask.intervals(torch.stack([I // 3, I // 2]), I[None] + 1),
    "two intervals": AttentionMask.intervals(I // 2, I + 9) & AttentionMask.intervals(I - 20, I + 2),
    "a prefix": AttentionMask.prefix(STARTS) & AttentionMask.lengths(LENGTHS),
    "a prefix that looks back a little": AttentionMask.prefix(STARTS) & AttentionMask.window(30, None),
    "global tokens and a window": (AttentionMask.lengths(torch.tensor([4])) | AttentionMask.window(6, 6)),
    "a union within a mask": AttentionMask.lengths(LENGTHS) & (AttentionMask.window(3) | AttentionMask.causal(-40)),
    "a shared question": shared_question(),
    "three, and one of all keys": AttentionMask.causal() | AttentionMask.window(2, 2) | AttentionMask(),
    "unions of unions": (shared_question() | AttentionMask.window(1)) & AttentionMask.lengths(LENGTHS),
    "dilated": AttentionMask.window(24) & AttentionMask.documents((I % 4)[None]),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_a_call_is_that_of_its_keep_mask(name, backend):
    """Output and gradients, also with a bias and dropout, bit for bit where both read a keep mask."""
    mask = MASKS[name]
    q, k, v = (torch.randn(B, H, L, D, requires_grad=True) for _ in range(3))
    keep = AttentionMask.keep(mask.dense(L, L).expand(B, H, L, L))
    for options in ({}, {"dropout_p": 0.3, "empty_rows": "zero"}, {"bias": torch.randn(H, L, L, requires_grad=True)}):
        leaves = (q, k, v, *(t for t in options.values() if isinstance(t, torch.Tensor)))
        results = []
        for given in (mask, keep):
            torch.manual_seed(3)
            with tfast.backend(backend):
                out = tfast.attention(q, k, v, given, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


def test_a_union_is_flat_and_says_its_parts():
    mask = AttentionMask.causal() | AttentionMask.window(2, 2) | AttentionMask.lengths(LENGTHS)
    assert len(mask.unions) == 1 and len(mask.unions[0]) == 3
    assert repr(mask & AttentionMask.causal(4)) == "causal(4) & (causal() | window(2, 2) | lengths(int64 (2,)))"
    ends = AttentionMask.intervals(None, I) & AttentionMask.intervals(None, LENGTHS[:, None])
    assert repr(ends) == "intervals(None, int64 (2, 1, 70))"
    assert repr(AttentionMask.intervals(I, I.int())) == "intervals(int64 (1, 1, 70), int32 (1, 1, 70))"


def test_explain_says_what_the_kernels_read():
    q = torch.empty(B, H, L, D)
    for name, words in {
        "ends": "mask: intervals(None, int64 (1, 1, 70))\nintervals and unions: read as lengths per query\n",
        "both": "int64 (1, 1, 70))\nintervals and unions: read as lengths per query and a keep mask (1, 1, 70, 70)",
        "ends of each head": "read as a keep mask (2, 4, 70, 70)",
        "a shared question": "(lengths(int64 (2,)) | documents(int32 (2, 70)))\nintervals and unions: read as a k",
        "three, and one of all keys": "| AttentionMask())\nintervals and unions: all keys\n",
    }.items():
        assert words in tfast.explain(q, q, q, MASKS[name])


CAUSAL_ENDS = MASKS["ends"] & AttentionMask.causal()


class Sizes(TorchDispatchMode):
    """Record of the largest result."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.most = max(self.most, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("name", ["prefix", "prefixes", "ends", "ends of a union"])
def test_ends_reach_the_kernels_in_linear_memory(name):
    """Nothing has Lq x Lk elements."""
    length, prefix = 2_000, AttentionMask.prefix(torch.tensor([900, 30]))
    place = torch.arange(length)
    mask = {
        "prefix": prefix,
        "prefixes": prefix & (AttentionMask.lengths(torch.tensor([7, 1999])) | AttentionMask.prefix(STARTS)),
        "ends": AttentionMask.intervals(None, place.expand(2, -1)),
        "ends of a union": AttentionMask.causal(-9) | AttentionMask.intervals(None, place // 2),
    }[name]
    q = torch.zeros(2, 1, length, 1)
    with Sizes() as sizes:
        kernel_mask(mask, q, q)
    assert 0 < sizes.most <= 4 * length


def test_a_compiled_call_refuses_lengths_out_of_range_beside_a_union():
    def call(lengths):
        mask = AttentionMask.lengths(lengths) & AttentionMask.prefix(STARTS)
        return tfast.attention(*[torch.ones(B, H, L, D)] * 3, mask)

    compiled = torch.compile(call, dynamic=False)
    assert torch.equal(compiled(LENGTHS), call(LENGTHS))
    for wrong in ([99, 3], [3, -4]):
        with pytest.raises((ValueError, RuntimeError), match="length"):
            compiled(torch.tensor(wrong))


WRONG = {
    "begins of floats": (lambda: AttentionMask.intervals(torch.ones(3), None), TypeError, "begin must be an"),
    "ends of four axes": (
        lambda: AttentionMask.intervals(None, torch.ones(1, 1, 1, 3).int()), ValueError, "(Lq,), (B, Lq) or (B, H, Lq)",
    ),
    "ends of other queries": (
        lambda: call(AttentionMask.intervals(None, I[1:])), ValueError,
        "intervals: end of shape (1, 1, 69) does not broadcast to (B, H, Lq) = (2, 4, 70)",
    ),
    "a wrong mask in a union": (
        lambda: call(AttentionMask.lengths(I) | AttentionMask.causal()), ValueError, "fit neither (B,) = (2,)",
    ),
    "documents of another length in a union": (
        lambda: call(AttentionMask.causal() | AttentionMask.documents(I[None, 1:])), ValueError, "(B, L) = (2, 70)",
    ),
    "one document for all in a union": (
        lambda: call(AttentionMask.causal() | AttentionMask.documents(I[None, :1])), ValueError, "(B, L) = (2, 70)",
    ),
    "documents on another device in a union": (
        lambda: call(AttentionMask.causal() | AttentionMask.documents(I[None].to("meta"))), ValueError,
        "ids must be on cpu, got meta",
    ),
    "a keep mask as lengths in a union": (
        lambda: call(AttentionMask.lengths((I > 3).int().expand(2, -1)) | AttentionMask.causal()), ValueError,
        "can be read two ways",
    ),
    "a bias in a union": (
        lambda: AttentionMask.causal() | AttentionMask.alibi(torch.ones(4)), ValueError, "(a | b) & bias",
    ),
    "a tensor in a union": (lambda: AttentionMask.causal() | torch.ones(3).bool(), TypeError, "AttentionMask | tensor"),
    "nothing in a union": (lambda: AttentionMask.causal() | None, TypeError, "AttentionMask | NoneType: both sides"),
    "a tensor before a union": (lambda: torch.ones(3).bool() | AttentionMask.causal(), TypeError, "several ways"),
    "a packed batch": (
        lambda: tfast.attention_packed(*[torch.ones(3, 1, 4)] * 3, *[torch.tensor([0, 3]).int()] * 2, mask=CAUSAL_ENDS),
        ValueError, "got end_keys",
    ),
    "ends on another device": (
        lambda: call(AttentionMask.intervals(None, I.to("meta"))), ValueError, "end must be on cpu, got meta",
    ),
}  # fmt: skip


def call(mask: AttentionMask) -> torch.Tensor:
    return tfast.attention(*[torch.ones(B, H, L, D)] * 3, mask)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    wrong, error, words = WRONG[name]
    with pytest.raises(error) as raised:
        wrong()
    assert words in str(raised.value)
