"""Tile map: bits, classes and lists against plain PyTorch; kernels visit exactly the listed tiles."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_kernels import GPU, TRITON, oracle
from helpers import mask_parts
from test_attention_kernels import documents

from transformer_fast import AttentionMask
from transformer_fast.attention_params import AttentionParams
from transformer_fast.explain import EMPTY, FULL, PARTIAL, tile_classes
from transformer_fast.tensor_cache import ENTRIES, get_or_compute
from transformer_fast.testing import assert_as_exact_as_eager
from transformer_fast.triton import configs
from transformer_fast.triton.attention import tile_map
from transformer_fast.triton.attention.tile_map import length_order, mask_bits, packed_order, tile_lists

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

B, H, LQ, LK, D = 2, 2, 70, 300, 16
MAPPED = ["dense", "dense shared by heads", "dense shared by all", "rows", "padding", "all", "dense window"]
WINDOWS = {
    "window": {"causal": 100, "window": 20},
    "window of no width": {"causal": 150, "window": 150},
    "window from below": {"window": 170},
    "window and lengths": {"window": 90, "lengths": torch.tensor([LK, 131], dtype=torch.int32)},
}


@pytest.fixture(autouse=True)
def uneven_tiles(monkeypatch):
    """Tiles of 32 queries by 64 keys, so that an exchange of the two is seen."""
    for key in configs.ATTENTION:
        monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 64, 4, 1))


def mask_of(dialect):
    """Return a mask of the dialect with fully blocked, fully allowed and random tiles."""
    if dialect in WINDOWS:
        mask = WINDOWS[dialect]
    else:
        parts = "dense" if dialect == "dense window" else dialect
        mask = mask_parts(B, H, LQ, LK, torch.Generator().manual_seed(5))[parts]
    for name in ("keep", "key_keep"):
        if name in mask and mask[name].shape[3] == LK:
            mask[name][..., 64:130] = True
            mask[name][:1, ..., 192:] = False
    if dialect == "dense":
        mask["keep"][:, 0, 32:64] = True
    if dialect == "all":
        mask |= {"causal": 150, "lengths": torch.tensor([LK, 131], dtype=torch.int32)}
    if dialect == "dense window":
        mask |= {"causal": 140, "window": 75}
    return {name: value.to(GPU) if isinstance(value, torch.Tensor) else value for name, value in mask.items()}


def classes_of(mask, tile):
    """Class of each tile of a mask in the kernels' parts."""
    names = {"keep": "keep_mask", "key_keep": "key_keep_mask", "lengths": "key_lengths"}
    names |= {"causal": "causal_offset", "window": "window_offset"}
    return tile_classes(AttentionMask(**{names[name]: part for name, part in mask.items()}), B, LQ, LK, tile)


def bits_as_bools(bits, keys):
    return ((bits.unsqueeze(-1) >> torch.arange(32, device=bits.device)) & 1).flatten(-2)[..., :keys].bool()


@pytest.mark.parametrize("keys", [1, 31, 64, 256, 300])
def test_bits(keys):
    mask = TRITON.random(2, 3, 17, keys) > 0
    bits = mask_bits(mask)
    assert bits.shape[3] % 8 == 0
    if keys > 1:
        assert torch.equal(bits_as_bools(bits, keys), mask)
    else:
        assert torch.equal(bits_as_bools(bits, 256), mask.expand(-1, -1, -1, 256))


def test_bits_of_a_strided_mask_without_its_repeats():
    mask = (TRITON.random(300, 1, 40) > 0).permute(1, 2, 0)[:, None, ::2].expand(4, 3, -1, -1)
    bits = mask_bits(mask)
    assert bits.shape[:3] == (1, 1, 20)
    assert torch.equal(bits_as_bools(bits, 300), mask[:1, :1])


def assert_lists_are(lists, classes):
    """Check the lists of classes: full tiles from the left, partial tiles from the right, and their counts."""
    shape = lists["tile_list"].shape
    for b, h, line in torch.cartesian_prod(*(torch.arange(n) for n in classes.shape[:3])).tolist():
        place = min(b, shape[0] - 1), min(h, shape[1] - 1), line
        full, partial = lists["tile_counts"][place].tolist()
        numbers, kinds = lists["tile_list"][place].tolist(), classes[b, h, line]
        assert numbers[:full] == (kinds == FULL).nonzero().flatten().tolist()
        assert numbers[::-1][:partial] == (kinds == PARTIAL).nonzero().flatten().tolist()


@pytest.mark.cover("values")
@pytest.mark.parametrize("tile", [(32, 32), (64, 128), (16, 256)], ids=str)
@pytest.mark.parametrize("dialect", MAPPED)
def test_lists_hold_the_tiles_with_work(dialect, tile):
    mask = mask_of(dialect)
    expected, call = classes_of(mask, tile), TRITON.call(D, mask)
    for columns, classes in ((False, expected), (True, expected.mT)):
        lists = tile_lists(call, B, LQ, LK, tile, columns=columns, ordered=True)
        assert_lists_are(lists, classes)
        work, shape = (classes != EMPTY).sum(-1), lists["tile_list"].shape
        ordered = work.expand(B, shape[1], -1)[: shape[0]].gather(2, lists["tile_order"].long())
        assert (ordered.diff(dim=2) <= 0).all()
        assert torch.equal(lists["tile_order"].sort(2).values[0, 0].cpu(), torch.arange(shape[2], dtype=torch.int32))
        if shape[0] > 1:
            assert (work.expand(B, shape[1], -1).sum((1, 2))[lists["batch_order"].long()].diff() <= 0).all()


@pytest.mark.parametrize("name", ["in order", "whole tiles", "anywhere", "nothing shared", "some without a key"])
def test_lists_hold_the_tiles_that_share_an_id(name):
    """Tiles are compared by their smallest and largest ids; tiles of one id on both sides are full, except at the
    end."""
    Lq, Lk = 40, 70
    ids = documents(name, B, Lq, Lk)
    query_ids, key_ids = (t.expand(B, -1) for t in ids.values())
    kinds = torch.full((B, 1, -(-Lq // 32), -(-Lk // 32)), EMPTY)
    for b, _, row, column in torch.cartesian_prod(*map(torch.arange, kinds.shape)).tolist():
        own, others = query_ids[b, row * 32 :][:32], key_ids[b, column * 32 :][:32]
        if others.min() <= own.max() and others.max() >= own.min():
            one = bool((own == own[0]).all() and (others == own[0]).all())
            kinds[b, 0, row, column] = FULL if one and column * 32 + 32 <= Lk else PARTIAL
    call = TRITON.call(D, ids)
    for columns, expected in ((False, kinds), (True, kinds.mT)):
        found = tile_lists(call, B, Lq, Lk, (32, 32), columns=columns, ordered=False)
        counts = torch.stack([(expected == FULL).sum(-1), (expected == PARTIAL).sum(-1)], -1)
        assert torch.equal(found["tile_counts"].cpu().long().expand_as(counts), counts)
        assert_lists_are(found, expected)


def test_classes_of_square_batches():
    # The second tile holds one of 33 keys; on the diagonal of 64, two tiles are partial and one above is empty.
    for length, mask, kinds in (
        (33, AttentionMask(), [FULL, PARTIAL] * 2),
        (64, AttentionMask(), [FULL] * 4),
        (33, AttentionMask.causal(), [PARTIAL, EMPTY, FULL, PARTIAL]),
        (64, AttentionMask.causal(), [PARTIAL, EMPTY, FULL, PARTIAL]),
    ):
        assert tile_classes(mask, 1, length, length, (32, 32)).flatten().tolist() == kinds


LISTED = [pytest.param(name, marks=pytest.mark.slow("its lists are tested above")) for name in MAPPED[1:]]


@pytest.mark.parametrize("dialect", ["lengths", "causal", MAPPED[0], *WINDOWS, *LISTED])
def test_only_tiles_with_work_are_visited(dialect, loads):
    """Count loads of the forward and of grad_q (tiles of 64 keys) and of grad_kv (tiles of 32 queries)."""
    mask = mask_of(dialect)
    classes = classes_of(mask, (32, 64))
    heads = classes.shape[1]
    TRITON.recorded(TRITON.inputs(B, heads, 1, LQ, LK, D), TRITON.call(D, mask, zero_empty_rows=True))
    expected = int((classes != EMPTY).sum())
    # The first query of a causal mask sees one key: grad_q visits its tile twice, to sum delta from the weights first.
    again = int((classes[:, :, 0] != EMPTY).sum()) if dialect == "causal" else 0
    assert [loads[name] // 2 for name in (("out", 64), ("q", 64), ("kv", 32))] == [expected, expected + again, expected]


def test_tiles_of_other_documents_are_not_visited(loads, small_tiles):
    """Three documents of 32 rows: each tile sees only its own, forward and backward; without documents it sees all."""
    ids = (torch.arange(96) // 32).int()[None]
    tensors, visited = TRITON.inputs(1, 1, 1, 96, 96, D), []
    for parts in ({"query_ids": ids, "key_ids": ids}, {}):
        loads.clear()
        TRITON.outcome(tensors, TRITON.call(D, parts))
        visited.append(dict(loads))
    # A step loads two tiles.
    assert {name: visited[1][name] - visited[0][name] for name in loads} == dict.fromkeys(loads, (9 - 3) * 2)


@pytest.mark.parametrize(("kind", "allowed"), [(EMPTY, False), (FULL, True)], ids=["empty", "full"])
def test_the_map_is_believed(kind, allowed):
    """The kernels follow a changed class: the tile counts as fully blocked, or as fully visible."""
    keep = mask_of("dense")["keep"][:, 1:]
    changed = keep.clone()
    changed[:, :, 32:64, 128:192] = allowed
    assert not torch.equal(keep, changed)
    original = tile_map._classes

    def classes(*args):
        found = original(*args)
        found[:, :, 1, 2] = kind
        return found

    tensors, call = TRITON.inputs(B, 1, 1, LQ, LK, D), TRITON.call(D, keep=keep, zero_empty_rows=True)
    with mock.patch.object(tile_map, "_classes", classes):
        ours = TRITON.outcome(tensors, call)
    eager, exact = (
        oracle(tensors, replace(call, keep=changed), dtype, None) for dtype in (torch.float32, torch.float64)
    )
    for name in ("out", "grad_q", "grad_k", "grad_v"):
        assert_as_exact_as_eager(ours[name].cpu(), eager[name], exact[name], ulps=4.0 * LQ**0.5, what=name)


@pytest.mark.cover(1)
@pytest.mark.parametrize("dialect", ["dense shared by heads", "all"])
def test_heavy_rows_first_changes_nothing_but_the_order(dialect, monkeypatch):
    tensors, call = TRITON.inputs(B, 1, 1, LQ, LK, D), TRITON.call(D, mask_of(dialect))
    plain = TRITON.outcome(tensors, call)
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 100)
    with mock.patch.object(tile_map, "_by_descending_work", wraps=tile_map._by_descending_work) as ordering:
        for name, t in TRITON.outcome(tensors, call).items():
            assert torch.equal(plain[name], t), name
    assert ordering.called


def test_orders():
    lengths = torch.tensor([3, 9, 0, 9], device=GPU, dtype=torch.int32)
    assert length_order(lengths).tolist() == [1, 3, 0, 2]
    starts_q, starts_k = (torch.tensor(t, dtype=torch.int32, device=GPU) for t in ([0, 2, 4, 9], [0, 3, 8, 9]))
    assert packed_order(starts_q, starts_k).tolist() == [1, 0, 2]


def test_one_map_for_all_layers_until_the_mask_is_written_to():
    mask, lengths = mask_of("dense shared by heads")["keep"], torch.tensor([9, 20], dtype=torch.int32, device=GPU)

    def lists(mask, lengths=lengths):
        params = AttentionParams(keep=mask, lengths=lengths)
        return tile_lists(params, B, LQ, LK, (32, 64), columns=False, ordered=False)

    flat = mask.squeeze(1)
    first = lists(mask)
    assert lists(mask) is first
    assert lists(flat.unsqueeze(1)) is lists(flat.unsqueeze(1)), "views of one mask have one map"
    assert lists(mask, lengths[:]) is lists(mask, lengths[:])
    assert lists(mask, lengths.clone()) is not first
    four = torch.cat([lengths, lengths])
    assert lists(mask, four[:2]) is not lists(mask, four[2:]), "they are slices of one tensor, but not the same one"
    bits = mask_bits(mask)
    assert mask_bits(mask) is bits
    mask[0, 0, 0, 0] ^= True
    assert mask_bits(mask)[0, 0, 0, 0] == bits[0, 0, 0, 0] ^ 1
    again = lists(mask)
    lengths[0] = 100
    assert int(lists(mask)["tile_counts"].sum()) > int(again["tile_counts"].sum())


def test_what_is_kept_does_not_grow_without_end():
    holder, made = torch.zeros(3), []
    for key in (*range(ENTRIES + 1), 0, ENTRIES):
        get_or_compute(holder, (key,), (), lambda key=key: made.append(key))
    assert made == [*range(ENTRIES + 1), 0]
    with torch.inference_mode():
        mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    assert mask_bits(mask) is not mask_bits(mask)
