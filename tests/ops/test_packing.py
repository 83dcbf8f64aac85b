"""``tfast.pack`` and ``tfast.unpack``: a round trip restores tokens and places; wrong masks are refused."""

import pytest
import torch

from transformer_fast import AttentionMask, pack, unpack
from transformer_fast.masks.packing import packing_of, packings_of

LENGTHS = torch.tensor([3, 0, 5, 1])
KEEP = torch.arange(5) < LENGTHS[:, None]
HOLES = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()


def masks(device):
    lengths, keep, holes = (t.to(device) for t in (LENGTHS, KEEP, HOLES))
    return {
        "lengths": (lengths, keep),
        "lengths on the host": (LENGTHS, keep),
        "int32 lengths": (lengths.int(), keep),
        "keep": (keep, keep),
        "keep with holes": (holes, holes),
        "AttentionMask of lengths": (AttentionMask.lengths(lengths), keep),
        "AttentionMask of a keep mask": (AttentionMask.keep(holes[:, None, None]), holes),
        "both": (AttentionMask.lengths(lengths) & AttentionMask.keep(holes[:, None, None]), keep & holes),
        "one length for all": (AttentionMask.lengths(torch.tensor([[2]], device=device)), (KEEP | True)[:, :2]),
        "nothing": (None, KEEP | True),
    }


@pytest.mark.parametrize("name", masks("cpu"))
@pytest.mark.parametrize("trailing", [(), (2, 3)])
def test_there_and_back(name, trailing, device):
    mask, keep = masks(device)[name]
    keep = torch.nn.functional.pad(keep.to(device), (0, 5 - keep.shape[1]))
    x = torch.randn(4, 5, *trailing, device=device, dtype=torch.float64, requires_grad=True)
    tokens, packing = pack(x, mask)
    assert torch.equal(tokens, x[keep])
    counts = keep.sum(1).tolist()
    assert packing.cu_seqlens.dtype == torch.int32 and packing.cu_seqlens.diff().tolist() == counts
    assert packing.cu_seqlens[0] == 0 and packing.cu_seqlens.device == packing.indices.device == x.device
    assert torch.equal(packing.positions, torch.arange(5, device=device).expand(4, 5)[keep])
    assert (packing.batch, packing.length, packing.max_length, packing.total) == (4, 5, max(counts), sum(counts))
    back = unpack(tokens, packing, fill=-7.0)
    assert torch.equal(back[keep], x[keep]) and torch.all(back[~keep] == -7.0)
    grad = torch.randn_like(back)
    (grad_x,) = torch.autograd.grad(back, x, grad)
    assert torch.equal(grad_x[keep], grad[keep]) and torch.all(grad_x[~keep] == 0)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_nothing_to_pack(shape, device):
    for mask in (None, torch.zeros(shape[0], dtype=torch.int64), torch.ones(shape, dtype=torch.bool)):
        tokens, packing = pack(torch.randn(*shape, 2, device=device), mask)
        assert tokens.shape == (0, 2) and packing.cu_seqlens.tolist() == [0] * (shape[0] + 1)
        assert unpack(tokens, packing).shape == (*shape, 2)


def test_the_host_does_not_wait_for_a_gpu_when_it_has_the_lengths(device):
    x = torch.arange(20.0, device=device).view(4, 5)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, packing = pack(x, LENGTHS)
        back = unpack(tokens, packing)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back.cpu(), torch.where(KEEP, x.cpu(), 0.0))


WRONG = {
    "negative lengths": (torch.tensor([1, -1, 2, 3]), ValueError, r"\[0, L = 5\], got -1 to 3"),
    "lengths beyond L": (torch.tensor([1, 6, 2, 3]), ValueError, r"\[0, L = 5\], got 1 to 6"),
    "lengths of another batch": (torch.tensor([1, 2, 3]), ValueError, r"lengths of shape \(3,\).*batch of 4"),
    "float lengths": (torch.ones(4), TypeError, "integer tensor.*float32"),
    "keep of another shape": (torch.ones(4, 6).bool(), ValueError, r"\(4, 1, 1, 6\).*= \(4, 1, 1, 5\)"),
    "integer keep": (torch.ones(4, 5).long(), TypeError, r"bool keep mask.*got torch.int64 \(4, 5\)"),
    "three dimensions": (torch.ones(4, 1, 5).bool(), TypeError, r"got torch.bool \(4, 1, 5\)"),
    "a list": ([3, 0, 5, 1], TypeError, "got list"),
    "causal": (AttentionMask.causal(), ValueError, r"padding alone.*is causal\(\)"),
    "a window": (AttentionMask.window(1, None), ValueError, r"padding alone.*is window\(1, None\)"),
    "documents": (AttentionMask.documents(torch.zeros(4, 5).long()), ValueError, r"padding alone.*is documents\("),
    "alibi": (AttentionMask.alibi(torch.ones(2)), ValueError, r"padding alone.*is alibi\("),
    "a bias": (AttentionMask.bias(torch.zeros(5, 5)), ValueError, r"padding alone.*is bias\(float32 \(1, 1, 5, 5\)"),
    "dense": (AttentionMask.keep(torch.ones(5, 5).bool()), ValueError, r"padding alone.*is keep\(bool \(1, 1, 5, 5\)"),
    "a length for each query": (
        AttentionMask.lengths(torch.ones(4, 5).long()),
        ValueError,
        r"padding alone.*is lengths\(int64 \(4, 5\)",
    ),
    "keep for each head": (AttentionMask.keep(torch.ones(4, 2, 1, 5).bool()), ValueError, r"\(4, 2, 1, 5\) does not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks(name):
    mask, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        pack(torch.randn(4, 5, 2), mask)


def test_wrong_tensors():
    with pytest.raises(ValueError, match=r"\(batch, length, ...\), got shape \(5,\)"):
        pack(torch.randn(5))
    with pytest.raises(ValueError, match=r"expected 9 tokens.*\(8, 2\)"):
        unpack(torch.randn(8, 2), packing_of(LENGTHS, 4, 5))


@pytest.mark.parametrize("how", ["keep masks", "lengths"])
def test_several_masks_are_read_together(how, device):
    rows = ("xx.x", "x...", "...."), ("xxx", ".xx"), ("x.x.x",), ("xx", "xx")
    keeps = [torch.tensor([[letter == "x" for letter in row] for row in each], device=device) for each in rows]
    if how == "lengths":
        keeps = [keep.sort(1, descending=True).values for keep in keeps]
    masks = [keep.sum(1) if how == "lengths" else keep for keep in keeps]
    also = [torch.tensor(value, device=device) for value in (True, False)]
    packings, values = packings_of([(m, *k.shape, m.device) for m, k in zip(masks, keeps, strict=True)], also)
    assert values == [True, False]
    for keep, packing in zip(keeps, packings, strict=True):
        counts = keep.sum(1)
        assert torch.equal(packing.indices, keep.flatten().nonzero().squeeze(1))
        assert packing.cu_seqlens.tolist() == [0, *counts.cumsum(0).tolist()]
        assert (packing.total, packing.max_length, packing.shortest) == (counts.sum(), counts.max(), counts.min())
    assert [packing.has_gaps for packing in packings] == [how == "keep masks" and n in (0, 2) for n in range(4)]
