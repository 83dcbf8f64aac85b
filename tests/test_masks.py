"""AttentionMask: every dialect means the same, and masks combine without growing."""

import pytest
import torch

from transformer_fast import AttentionMask
from transformer_fast.ops._attention_checks import normal_lengths

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
    with pytest.raises(ValueError, match="no key lies between 2 to the left and -3 to the right"):
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
    """Whether True means kept or blocked, and where the heads stand, differs from library to library."""
    for combine in (lambda: AttentionMask.causal() & t, lambda: t & AttentionMask.causal()):
        with pytest.raises(TypeError, match="several ways") as raised:
            combine()
        assert str(t.dtype) in str(raised.value) and str(tuple(t.shape)) in str(raised.value)
        assert [constructor for constructor in named if constructor not in str(raised.value)] == []
    with pytest.raises(TypeError, match="AttentionMask & NoneType: both sides"):
        AttentionMask.causal() & None


def test_padding_and_dense_stay_apart():
    """Combining a (1, 1, Lq, Lk) mask with padding must not build one (Lq, Lk) mask for each sentence."""
    mask = AttentionMask.keep(torch.ones(1, 1, LQ, LK).bool()) & AttentionMask.keep(torch.ones(B, 1, 1, LK).bool())
    assert mask.keep_mask.shape == (1, 1, LQ, LK)
    assert mask.key_keep_mask.shape == (B, 1, 1, LK)


def test_to_moves_every_part():
    mask = AttentionMask.keep(torch.ones(1, 1, LQ, LK).bool()) & AttentionMask.lengths(torch.tensor([1, 2, 3]))
    moved = (mask & AttentionMask.keep(torch.ones(LK).bool())).to("meta")
    parts = (moved.keep_mask, moved.key_keep_mask, moved.key_lengths)
    assert [part.device.type for part in parts] == ["meta"] * 3


def test_lower_ranks_align_on_the_right_as_broadcasting_does():
    row = torch.tensor([True] * 3 + [False] * 4)
    assert torch.equal(full(AttentionMask.keep(row)), row.expand(B, H, LQ, LK))
    square = torch.rand(LQ, LK) > 0.5
    assert torch.equal(full(AttentionMask.keep(square)), square.expand(B, H, LQ, LK))


def test_normal_lengths_are_one_tensor_for_all_layers_until_written_to():
    lengths = torch.tensor([3, 5])
    first = normal_lengths(lengths, 2, 4, 6)
    assert first.dtype == torch.int32 and normal_lengths(lengths, 2, 4, 6) is first
    lengths[0] = 1
    assert normal_lengths(lengths, 2, 4, 6).tolist() == [1, 5]
    lengths[0] = 7
    with pytest.raises(ValueError, match="got 5 to 7"):
        normal_lengths(lengths, 2, 4, 6)
