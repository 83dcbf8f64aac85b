"""AttentionMask: all dialects of a mask are equal, and combined masks do not grow."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from transformer_fast import AttentionMask, attention, explain, layers
from transformer_fast.compat import attention_mask_of

B, H, LQ, LK = 3, 2, 5, 7


def full(mask: AttentionMask) -> torch.Tensor:
    return mask.dense(LQ, LK).expand(B, H, LQ, LK)


def test_every_dialect_of_one_padding_says_the_same():
    lengths = torch.tensor([7, 4, 0])
    keep = torch.arange(LK) < lengths[:, None]
    dialects = [
        AttentionMask.lengths(lengths),
        AttentionMask.lengths(lengths[:, None].expand(B, LQ)),
        AttentionMask.keep(keep[:, None, None, :]),
        AttentionMask.keep(keep[:, None, None, :].int()),
        AttentionMask.keep(keep[:, None, None, :].expand(B, 1, LQ, LK)),
        AttentionMask.blocked(~keep[:, None, None, :]),
        AttentionMask.blocked((~keep[:, None, None, :]).float()),
    ]
    expected = keep[:, None, None, :].expand(B, H, LQ, LK)
    for mask in dialects:
        assert torch.equal(full(mask), expected)


@pytest.mark.parametrize("offset", [-3, 0, 2, 100])
def test_causal_offset(offset):
    i, j = torch.arange(LQ)[:, None], torch.arange(LK)
    assert torch.equal(full(AttentionMask.causal(offset)), (j <= i + offset).expand(B, H, LQ, LK))


@pytest.mark.parametrize("offset", [-9, -2, 0, 3])
def test_a_prefix_is_the_union_of_its_keys_and_the_look_ahead(offset):
    i, j = torch.arange(LQ)[:, None], torch.arange(LK)
    for lengths in (torch.tensor([3, 0, 7]), torch.tensor([4]), torch.tensor([-1, 2, 99], dtype=torch.int8)):
        expected = (j < lengths[:, None, None, None]) | (j <= i + offset)
        assert torch.equal(full(AttentionMask.prefix(lengths, offset)), expected.expand(B, H, LQ, LK))


@pytest.mark.parametrize("offset", [-2, 0, 3])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 3), (None, 1), (2, None), (None, None), (3, -1)])
def test_window(left, right, offset):
    i, j = torch.arange(LQ)[:, None] + offset, torch.arange(LK)
    expected = torch.ones(LQ, LK, dtype=torch.bool)
    if left is not None:
        expected &= j >= i - left
    if right is not None:
        expected &= j <= i + right
    assert torch.equal(full(AttentionMask.window(left, right, offset)), expected.expand(B, H, LQ, LK))


def test_window_of_wrong_bounds():
    with pytest.raises(ValueError, match=r"expected left \+ right of at least 0, got 2 and -3"):
        AttentionMask.window(2, -3)
    with pytest.raises(TypeError, match="window left: expected an int, got float"):
        AttentionMask.window(2.0)
    with pytest.raises(TypeError, match="window offset: expected an int, got bool"):
        AttentionMask.window(2, 0, True)


def test_and_is_the_intersection_of_every_pair():
    generator = torch.Generator().manual_seed(1)

    def bools(*shape):
        return torch.rand(shape, generator=generator) > 0.4

    masks = [
        AttentionMask.keep(bools(B, H, LQ, LK)),
        AttentionMask.keep(bools(1, 1, LQ, LK)),
        AttentionMask.keep(bools(B, 1, 1, LK)),
        AttentionMask.keep(bools(1, H, 1, LK)),
        AttentionMask.lengths(torch.tensor([3, 7, 0])),
        AttentionMask.lengths(torch.randint(0, LK, (B, LQ), generator=generator)),
        AttentionMask.causal(),
        AttentionMask.causal(2),
        AttentionMask.window(2),
        AttentionMask.window(1, 2, offset=1),
        AttentionMask.window(0, None),
        AttentionMask.prefix(torch.tensor([3, 0, 9])),
        AttentionMask.prefix(torch.tensor([4]), -2),
    ]
    for a in masks:
        for b in masks:
            assert torch.equal(full(a & b), full(a) & full(b))


@pytest.mark.parametrize(
    ("t", "named"),
    [
        (torch.ones(B, 1, 1, LK).bool(), ("keep(t) if", "blocked(t) if")),
        (torch.ones(B).int(), ("keep(t) if", "blocked(t) if", "lengths(t) if")),
        (torch.ones(LQ, LK), ("keep(t.bool()) if", "blocked(t) if", "bias(t) if")),
    ],
    ids=["bool", "int", "float"],
)
def test_a_bare_tensor_does_not_combine_and_every_reading_is_named(t, named):
    """Libraries differ in the meaning of True and in the place of the heads."""
    for combine in (lambda: AttentionMask.causal() & t, lambda: t & AttentionMask.causal()):
        with pytest.raises(TypeError, match="several ways") as raised:
            combine()
        assert str(t.dtype) in str(raised.value) and str(tuple(t.shape)) in str(raised.value)
        assert [constructor for constructor in named if constructor not in str(raised.value)] == []
    with pytest.raises(TypeError, match="AttentionMask & NoneType: both sides"):
        AttentionMask.causal() & None


def test_to_moves_every_part():
    mask = AttentionMask.documents(torch.zeros(B, LQ).long(), torch.zeros(B, LK).long())
    mask = mask & AttentionMask.alibi(torch.ones(H)) & AttentionMask.bias(torch.zeros(LQ, LK))
    mask = mask & AttentionMask.prefix(torch.ones(B).long(), 2)
    mask &= AttentionMask.keep(torch.ones(LQ, LK).bool()) & AttentionMask.lengths(torch.tensor([1, 2, 3]))
    mask &= AttentionMask.keep(torch.ones(LK).bool())
    moved = mask.to("meta").tensors()
    assert {name: t.device.type for name, t in moved.items()} == dict.fromkeys(mask.tensors(), "meta")
    one_of = {"query_ids", "key_ids", "alibi 0", "additive_bias", "union 0.0 end_keys"}
    assert moved.keys() == one_of | {"keep_mask", "key_keep_mask", "key_lengths"}
    assert mask.to("meta").unions[0][1].causal_offset == 2


def test_lower_ranks_align_on_the_right_as_broadcasting_does():
    row = torch.tensor([True] * 3 + [False] * 4)
    assert torch.equal(full(AttentionMask.keep(row)), row.expand(B, H, LQ, LK))
    square = torch.rand(LQ, LK) > 0.5
    assert torch.equal(full(AttentionMask.keep(square)), square.expand(B, H, LQ, LK))


@pytest.mark.parametrize("made", [AttentionMask.keep, AttentionMask.blocked])
def test_two_dimensions_are_queries_and_keys_whatever_their_sizes(made):
    """The batch may have as many sentences as there are queries or heads."""
    q = torch.randn(4, 4, 4, 8)
    square = torch.ones(4, 4).tril().bool() if made == AttentionMask.keep else torch.ones(4, 4).triu(1).bool()
    expected = attention(q, q, q, causal=True)
    for mask in (square, square[None], square[None, None], square.expand(4, 1, 4, 4)):
        assert torch.allclose(attention(q, q, q, made(mask)), expected, atol=1e-6)


def test_lengths_per_query_of_0_and_1_are_refused_only_where_they_may_be_a_keep_mask():
    q = torch.randn(2, 2, 5, 8)
    zeros_and_ones = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    several = attention(q, q, q, AttentionMask.keep(torch.arange(5) < zeros_and_ones[:, None, :, None]))
    for lengths in (zeros_and_ones, zeros_and_ones.int(), zeros_and_ones.t().contiguous().t()):
        for options in ({}, {"softcap": 5.0}, {"return_weights": True}, {"dropout_p": 0.1}, {"return_logsumexp": True}):
            with pytest.raises(ValueError, match=r"two ways.*keep"):
                attention(q, q, q, AttentionMask.lengths(lengths), **options)
    # One key, one query, one length that is more, or a graph in which values cannot be read.
    one_key, one_query = q[:, :, :1], q[:, :, :1]
    assert attention(q, one_key, one_key, AttentionMask.lengths(zeros_and_ones)).isfinite().all()
    assert attention(one_query, q, q, AttentionMask.lengths(torch.tensor([[1], [1]]))).isfinite().all()
    assert attention(q, q, q, AttentionMask.lengths(torch.tensor([[1], [1]]))).isfinite().all()
    assert attention(q, q, q, AttentionMask.lengths(torch.tensor([1, 1]))).isfinite().all()
    attention(q, q, q, AttentionMask.lengths(torch.cat([zeros_and_ones[:, :-1], torch.full((2, 1), 2)], 1)))
    compiled = torch.compile(attention, backend="eager")
    assert torch.allclose(compiled(q, q, q, AttentionMask.lengths(zeros_and_ones)), several, atol=1e-6)
    meta = AttentionMask.lengths(zeros_and_ones.to("meta"))
    assert attention(*[q.to("meta")] * 3, meta).shape == q.shape


def test_a_representation_is_what_one_would_write():
    lengths, ids = torch.tensor([3, 4]), torch.zeros(1, 8, dtype=torch.int32)
    written = {
        "AttentionMask()": AttentionMask(),
        "lengths(int64 (2,)) & window(3, 1)": AttentionMask.lengths(lengths) & AttentionMask.window(3, 1),
        "lengths(int64 (2,)) & causal()": AttentionMask.causal() & AttentionMask.lengths(lengths),
        "keep(bool (1, 1, 5, 7)) & keep(bool (1, 1, 1, 7))": AttentionMask.keep(torch.ones(5, 7).bool())
        & AttentionMask.keep(torch.ones(7).int()),
        "(intervals(None, int32 (2, 1, 1)) | causal()) & (intervals(None, int64 (2, 1, 1)) | causal(-3))": (
            AttentionMask.prefix(lengths.int()) & AttentionMask.prefix(lengths, -3)
        ),
        "causal(-2)": AttentionMask.causal(-2),
        "window(3)": AttentionMask.window(3),
        "window(3, offset=10)": AttentionMask.window(3, offset=10),
        "window(3, None)": AttentionMask.window(3, None),
        "documents(int32 (1, 8))": AttentionMask.documents(ids),
        "documents(int32 (1, 8), int64 (1, 8))": AttentionMask.documents(ids, ids.long()),
        "alibi(float32 (4,), offset=2)": AttentionMask.alibi(torch.ones(4), 2),
        "relative(float32 (8, 4)) & bias(float64 (1, 1, 5, 7))": AttentionMask.relative(torch.ones(8, 4))
        & AttentionMask.bias(torch.zeros(5, 7).double()),
        "relative(float32 (8, 4), max_distance=16, bidirectional=False)": AttentionMask.relative(
            torch.ones(8, 4), 16, False
        ),
    }
    assert [repr(mask) for mask in written.values()] == [*written]


@pytest.mark.parametrize("causal", [None, *range(-4, 5)])
@pytest.mark.parametrize("window", [None, *range(-4, 5)])
def test_bounds_are_written_as_calls_that_make_them(causal, window):
    mask = AttentionMask(causal_offset=causal, window_offset=window)
    names = {"causal": AttentionMask.causal, "window": AttentionMask.window, "AttentionMask": AttentionMask}
    made = eval(repr(mask), {"__builtins__": {}}, names)
    assert (made.causal_offset, made.window_offset) == (causal, window)


OF_BATCH = {
    "keep": lambda b: AttentionMask.keep(torch.ones(b, 1, LQ, LK, dtype=torch.bool)),
    "keep of keys": lambda b: AttentionMask.keep(torch.ones(b, 1, 1, LK, dtype=torch.bool)),
    "lengths": lambda b: AttentionMask.lengths(torch.full((b,), 2)),
    "lengths per query": lambda b: AttentionMask.lengths(torch.full((b, LQ), 2)),
    "intervals": lambda b: AttentionMask.intervals(torch.zeros(b, LQ).long(), None),
    "intervals of ends": lambda b: AttentionMask.intervals(None, torch.full((b, LQ), 3)),
    "documents": lambda b: AttentionMask.documents(torch.zeros(b, LQ).long(), torch.zeros(b, LK).long()),
    "bias": lambda b: AttentionMask.bias(torch.zeros(b, 1, LQ, LK)),
}
"""A mask for a batch of b, with one part that is a tensor."""


def test_no_memory_is_no_wrong_shape():
    wide = AttentionMask.bias(torch.zeros(1, 1, 1, 1).expand(2**20, 1, 2**20, 8))
    with pytest.raises(RuntimeError, match="memory"):
        wide & wide


def test_parts_of_a_batch_are_all_known():
    parts = {name.partition(" ")[0] for one in OF_BATCH.values() for name in one(2).tensors()}
    fields = {"keep_mask", "key_keep_mask", "key_lengths", "query_ids", "key_ids", "first_keys", "end_keys"}
    assert parts == fields | {"additive_bias"}


@pytest.mark.parametrize("part", OF_BATCH)
def test_parts_of_two_batch_sizes_are_refused_by_name(part):
    name, (first, other) = part.partition(" ")[0], (OF_BATCH[part](size) for size in (2, 3))
    with pytest.raises(ValueError, match=f"^{name} & {name}: .* and .* do not broadcast$"):
        first & other


def test_lengths_that_are_combined_are_no_keep_mask():
    """The lesser of lengths may be 0 or 1 everywhere where no lengths of the user are."""
    q = torch.randn(B, H, LQ, 4)
    ends = torch.arange(1, LQ + 1).expand(B, LQ)
    for lengths in (
        torch.tensor([1, 1, 0]),
        torch.tensor([[1], [0], [1]]).expand(B, LQ).clone().index_fill(1, torch.tensor(0), 2),
    ):
        for mask in (
            AttentionMask.lengths(lengths) & AttentionMask.lengths(ends),
            AttentionMask.lengths(ends) & AttentionMask.lengths(lengths) & AttentionMask.causal(),
        ):
            keep = (
                torch.arange(LQ) < torch.minimum(ends, lengths if lengths.dim() == 2 else lengths[:, None])[..., None]
            )
            assert torch.equal(mask.dense(LQ, LQ).expand(B, 1, LQ, LQ), keep[:, None])
            torch.testing.assert_close(attention(q, q, q, mask), attention(q, q, q, keep[:, None]))


def test_a_keep_mask_among_combined_lengths_is_still_refused():
    q = torch.randn(B, H, LQ, 4)
    may_be_keep = AttentionMask.lengths(torch.tensor([[1, 0, 1, 1, 1]]).expand(B, LQ))
    with pytest.raises(ValueError, match="can be read two ways"):
        attention(q, q, q, may_be_keep & AttentionMask.lengths(torch.full((B,), LQ)))


@pytest.mark.parametrize("lengths", [LQ + 1, -1])
def test_lengths_of_a_union_lie_among_the_keys(lengths):
    q = torch.randn(B, H, LQ, 4)
    outside = AttentionMask.lengths(torch.full((B,), lengths))
    with pytest.raises(ValueError, match=rf"lengths must lie in \[0, Lk = {LQ}\], got {lengths}"):
        attention(q, q, q, outside | AttentionMask.window(0, 0))
    prefix = AttentionMask.prefix(torch.full((B,), lengths))  # takes any lengths
    clamped = AttentionMask.prefix(torch.full((B,), min(max(lengths, 0), LQ)))
    assert torch.equal(attention(q, q, q, prefix), attention(q, q, q, clamped))


def test_a_transposed_query_is_named():
    q = torch.randn(B, LQ, 2, 4)  # (B, L, H, D)
    with pytest.raises(ValueError, match=rf"q with {LQ} heads looks like \(B, L, H, D\), expected \(B, H, L, D\)"):
        attention(q, q, q, AttentionMask.lengths(torch.full((B,), LQ)))


def test_a_mask_is_named_by_the_shape_that_was_given():
    q = torch.randn(B, H, LQ, 4)
    with pytest.raises(
        ValueError, match=r"mask must be .*got shape \[1, 1, 3, 9\], or \(3, 9\) without the axes of size 1 in front"
    ):
        attention(q, q, q, torch.ones(B, 9, dtype=torch.bool))


def test_a_mask_of_numpy_is_told_how_to_become_a_tensor():
    numpy = pytest.importorskip("numpy")
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(TypeError, match=r"got ndarray; torch\.from_numpy\(mask\) makes a tensor of it"):
        attention(q, q, q, numpy.triu(numpy.ones((1, 3, 3)), 1) == 0)
    layer, x = layers.MultiHeadAttention(1, 4), torch.randn(1, 3, 4)
    with pytest.raises(TypeError, match=r"got ndarray; torch\.from_numpy\(mask\) makes a tensor of it"):
        layer(x, x, x, numpy.triu(numpy.ones((1, 3, 3)), 1) == 0)


def test_a_block_mask_of_flexattention_is_told_how_to_become_a_mask():
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu")
    q, x, layer = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 4), layers.MultiHeadAttention(1, 4)
    said = r"BlockMask.*; tfast\.compat\.attention_mask_of\(block_mask\) makes an AttentionMask of it, and tfast"
    wrong = (
        lambda: attention(q, q, q, blocks), lambda: explain(q, q, q, blocks), lambda: layer(x, x, x, blocks),
        lambda: AttentionMask.causal() & blocks, lambda: blocks | AttentionMask.causal(),
    )  # fmt: skip
    for call in wrong:
        with pytest.raises(TypeError, match=said):
            call()
    assert torch.equal(attention(q, q, q, attention_mask_of(blocks)), attention(q, q, q, causal=True))
    with pytest.raises(
        TypeError, match=r"got function; torch's create_block_mask takes .* tfast\.compat\.attention_mask_of"
    ):
        attention(q, q, q, lambda b, h, i, j: i >= j)


def test_a_mask_has_no_complement_and_the_error_says_what_to_write():
    padding = torch.tensor([[False, False, True]])
    mask = AttentionMask.keep(padding) & AttentionMask.causal()
    with pytest.raises(TypeError, match=r"^~AttentionMask: keep\(bool .*\) & causal\(\) has no complement") as raised:
        attention(*torch.randn(3, 1, 1, 3, 4), ~mask)
    assert str(raised.value).endswith("AttentionMask.blocked(mask.dense(Lq, Lk))")
    assert torch.equal(AttentionMask.blocked(padding).dense(3, 3), ~AttentionMask.keep(padding).dense(3, 3))
    assert torch.equal(AttentionMask.blocked(mask.dense(3, 3)).dense(3, 3), ~mask.dense(3, 3))
