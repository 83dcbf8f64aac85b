"""The tile map: bits, classes and lists against plain PyTorch, and that the kernels visit what is in the lists."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from attention_calls import DEVICE, call_of, inputs, random, reference_call
from helpers import assert_as_exact_as_eager, mask_parts

from transformer_fast.attention_params import AttentionParams
from transformer_fast.masks import dense_keep
from transformer_fast.reference.attention import attention as reference
from transformer_fast.tensor_cache import ENTRIES, get_or_compute
from transformer_fast.tile_share import (
    EMPTY,
    FULL,
    PARTIAL,
    WorkShare,
    tile_classes,
    work_share,
)
from transformer_fast.triton import configs
from transformer_fast.triton.attention import backward, backward_kv, backward_q, forward, tile_map
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
def small_tiles(monkeypatch, device):
    """32 queries by 64 keys, so that a tile of one is not mistaken for one of the other."""
    for key in configs.ATTENTION:
        monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 64, 4, 1))


def mask_of(dialect):
    """A mask of the dialect with whole tiles blocked and whole tiles allowed beside the random ones."""
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
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in mask.items()}


def bits_as_bools(bits, keys):
    return ((bits.unsqueeze(-1) >> torch.arange(32, device=bits.device)) & 1).flatten(-2)[..., :keys].bool()


@pytest.mark.parametrize("keys", [1, 31, 64, 256, 300])
def test_bits(keys):
    mask = random(2, 3, 17, keys, seed=keys) > 0
    bits = mask_bits(mask)
    assert bits.shape[3] % 8 == 0
    if keys > 1:
        assert torch.equal(bits_as_bools(bits, keys), mask)
    else:
        assert torch.equal(bits_as_bools(bits, 256), mask.expand(-1, -1, -1, 256))


def test_bits_of_a_strided_mask_without_its_repeats():
    mask = (random(300, 1, 40, seed=1) > 0).permute(1, 2, 0)[:, None, ::2].expand(4, 3, -1, -1)
    bits = mask_bits(mask)
    assert bits.shape[:3] == (1, 1, 20)
    assert torch.equal(bits_as_bools(bits, 300), mask[:1, :1])


@pytest.mark.parametrize("tile", [(32, 32), (64, 128), (16, 256)], ids=str)
@pytest.mark.parametrize("dialect", MAPPED)
def test_lists_hold_the_tiles_with_work(dialect, tile):
    mask = mask_of(dialect)
    expected = tile_classes(B, LQ, LK, tile, **mask)
    rows, columns = (
        tile_lists(call_of(mask, D), B, LQ, LK, tile, columns=columns, ordered=True)
        for columns in (False, True)
    )  # fmt: skip
    for lists, classes in ((rows, expected), (columns, expected.mT)):
        work = (classes != EMPTY).sum(-1)
        shape = lists.lists.shape
        for b, h, line in torch.cartesian_prod(*(torch.arange(n) for n in classes.shape[:3])).tolist():
            place = min(b, shape[0] - 1), min(h, shape[1] - 1), line
            full, partial = lists.counts[place].tolist()
            numbers, kinds = lists.lists[place].tolist(), classes[b, h, line]
            assert numbers[:full] == (kinds == FULL).nonzero().flatten().tolist()
            assert numbers[::-1][:partial] == (kinds == PARTIAL).nonzero().flatten().tolist()
        ordered = work.expand(B, shape[1], -1)[: shape[0]].gather(2, lists.row_order.long())
        assert (ordered.diff(dim=2) <= 0).all()
        assert torch.equal(lists.row_order.sort(2).values[0, 0].cpu(), torch.arange(shape[2], dtype=torch.int32))
        if shape[0] > 1:
            assert (work.expand(B, shape[1], -1).sum((1, 2))[lists.batch_order.long()].diff() <= 0).all()


@pytest.mark.parametrize("dialect", [*mask_parts(1, 1, 1, 1, torch.Generator()), "dense window", *WINDOWS])
def test_classes_in_plain_pytorch(dialect):
    """The oracle itself, against the definition: no key, every key, or neither."""
    mask = mask_of(dialect)
    parts = (mask.get(name) for name in ("keep", "key_keep", "lengths", "causal", "window"))
    allowed = dense_keep(*parts, LQ, LK, DEVICE).expand(B, -1, LQ, LK)
    classes = tile_classes(B, LQ, LK, (32, 64), **mask)
    assert classes.shape[2:] == (3, 5)
    for row in range(3):
        for column in range(5):
            tile = allowed[:, :, row * 32 : row * 32 + 32, column * 64 : column * 64 + 64].flatten(2)
            kind = tile.any(2).int() + (tile.all(2) & (column < 4))
            assert torch.equal(classes[:, :, row, column].int().expand_as(kind), kind)
    share = work_share(B, LQ, LK, (32, 64), **mask).share
    assert share == int((classes != EMPTY).sum()) / classes.numel()


def test_share_of_square_batches():
    # Of 33 keys, the second tile holds one; on the diagonal of 64, two tiles are partial and one above is empty.
    assert work_share(1, 33, 33, (32, 32)) == WorkShare(4, 2, 2)
    assert work_share(1, 64, 64, (32, 32)) == WorkShare(4, 4, 0)
    assert work_share(1, 33, 33, (32, 32), causal=0) == WorkShare(4, 1, 2)
    assert work_share(1, 64, 64, (32, 32), causal=0) == WorkShare(4, 1, 2)
    assert work_share(0, 3, 4, (32, 32)).share == 0.0


def visits(monkeypatch, call, tensors):
    """(key tiles that the forward, then grad_q, then query tiles that grad_kv loaded), by watching every load."""
    counts = {}

    def watch(module, name, rows):
        original = module.load_rows

        def load_rows(base, start, end, stride, ROWS, *more):
            if int(getattr(ROWS, "value", ROWS)) == rows:
                counts[name] = counts.get(name, 0) + 1
            return original(base, start, end, stride, ROWS, *more)

        monkeypatch.setattr(module, "load_rows", load_rows)

    watch(forward, "forward", 64)
    watch(backward_q, "grad_q", 64)
    out, logsumexp = forward.attention_forward(*tensors[:3], call)[:2]
    forward_tiles = counts.pop("forward") // 2
    q, k, v, grad = tensors
    watch(backward_kv, "grad_kv", 32)
    backward.attention_backward(grad, q, k, v, out, logsumexp, call)
    return forward_tiles, counts["grad_q"] // 2, counts["grad_kv"] // 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="loads are watched in the interpreter")
@pytest.mark.parametrize("dialect", ["lengths", "causal", *MAPPED, *WINDOWS])
def test_only_tiles_with_work_are_visited(dialect, monkeypatch):
    mask = mask_of(dialect)
    expected = int((tile_classes(B, LQ, LK, (32, 64), **mask).expand(-1, H, -1, -1) != EMPTY).sum())
    call = call_of(mask, D, zero_empty_rows=True)
    assert visits(monkeypatch, call, inputs(B, H, 1, LQ, LK, D, torch.float32)) == (expected, expected, expected)


@pytest.mark.parametrize(("kind", "allowed"), [(EMPTY, False), (FULL, True)], ids=["empty", "full"])
def test_the_map_is_believed(kind, allowed):
    """A tile whose class is changed behind the kernels' back: as if all of it were blocked, or none."""
    keep = mask_of("dense")["keep"]
    changed = keep.clone()
    changed[:, :, 32:64, 128:192] = allowed
    assert not torch.equal(keep, changed)
    original = tile_map._classes

    def classes(*args):
        found = original(*args)
        found[:, :, 1, 2] = kind
        return found

    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float32)
    call = call_of({"keep": keep}, D, zero_empty_rows=True)
    with mock.patch.object(tile_map, "_classes", classes):
        out, logsumexp = forward.attention_forward(q, k, v, call)[:2]
        ours = out, *backward.attention_backward(grad, q, k, v, out, logsumexp, call)

    def truth(dtype):
        leaves = [t.cpu().to(dtype).requires_grad_() for t in (q, k, v)]
        result = reference(*leaves, **reference_call(replace(call, keep=changed)))[0]
        return result.detach(), *torch.autograd.grad(result, leaves, grad.cpu().to(dtype))

    for values in zip((t.cpu() for t in ours), truth(torch.float32), truth(torch.float64), strict=True):
        assert_as_exact_as_eager(*values, ulps=4.0 * (H * LQ) ** 0.5)


@pytest.mark.parametrize("dialect", ["dense", "all"])
def test_heavy_rows_first_changes_nothing_but_the_order(dialect, monkeypatch):
    call = call_of(mask_of(dialect), D)
    q, k, v, grad = inputs(B, H, 1, LQ, LK, D, torch.float32)

    def run():
        out, logsumexp = forward.attention_forward(q, k, v, call)[:2]
        return out, logsumexp, *backward.attention_backward(grad, q, k, v, out, logsumexp, call)

    plain = run()
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 100)
    with mock.patch.object(tile_map, "_most_first", wraps=tile_map._most_first) as ordering:
        for one, two in zip(plain, run(), strict=True):
            assert torch.equal(one, two)
    assert ordering.called


def test_orders():
    lengths = torch.tensor([3, 9, 0, 9], device=DEVICE, dtype=torch.int32)
    assert length_order(lengths).tolist() == [1, 3, 0, 2]
    starts_q, starts_k = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([0, 2, 4, 9], [0, 3, 8, 9]))
    assert packed_order(starts_q, starts_k).tolist() == [1, 0, 2]


def test_one_map_for_all_layers_until_the_mask_is_written_to():
    mask, lengths = mask_of("dense shared by heads")["keep"], torch.tensor([9, 20], dtype=torch.int32, device=DEVICE)

    def lists(mask, lengths=lengths):
        params = AttentionParams(keep=mask, lengths=lengths)
        return tile_lists(params, B, LQ, LK, (32, 64), columns=False, ordered=False)

    flat = mask.squeeze(1)
    first = lists(mask)
    assert lists(mask) is first
    assert lists(flat.unsqueeze(1)) is lists(flat.unsqueeze(1)), "views of one mask have one map"
    assert lists(mask, lengths[:]) is lists(mask, lengths[:])
    assert lists(mask, lengths.clone()) is not first
    bits = mask_bits(mask)
    assert mask_bits(mask) is bits
    mask[0, 0, 0, 0] ^= True
    assert mask_bits(mask)[0, 0, 0, 0] == bits[0, 0, 0, 0] ^ 1
    again = lists(mask)
    lengths[0] = 100
    assert int(lists(mask).counts.sum()) > int(again.counts.sum())


def test_what_is_kept_does_not_grow_without_end():
    holder, made = torch.zeros(3), []
    for key in (*range(ENTRIES + 1), 0, ENTRIES):
        get_or_compute(holder, (key,), (), lambda key=key: made.append(key))
    assert made == [*range(ENTRIES + 1), 0]
    with torch.inference_mode():
        mask = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    assert mask_bits(mask) is not mask_bits(mask)
