"""Embedding with positions: forward and gradients against the oracle, exact masks, repeatability.

test_every_op.py has what it shares with other ops: strides, threads, seeds, derivatives.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from op_calls import SEED, Call, hold

import transformer_fast as tfast
from transformer_fast import extension, reference
from transformer_fast.ops.embedding import add_positional, embed, positional_table
from transformer_fast.testing import fixed_dropout_seed

pytestmark = pytest.mark.skipif(not extension.load(), reason=extension.status())

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# ids shape, vocabulary, d, offset: narrow and odd widths, one vector and a tail, more than one chunk of 1024 columns,
# the widest rows
SHAPES = {
    "one": ((1, 1), 1, 1, 0),
    "odd": ((3, 5), 7, 15, 2),
    "toy": ((4, 9), 11, 20, 0),
    "vector": ((2, 17), 50, 64, 3),
    "tail": ((5, 7), 13, 97, 1),
    "flat": ((33,), 40, 128, 5),
    "deep": ((2, 3, 4), 9, 40, 0),
    "wide": ((2, 3), 5, 2053, 1),
    "many": ((8, 130), 300, 24, 0),
    "widest": ((2, 2), 3, 65_536, 0),
}


def supported(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cuda" and dtype == torch.float64:
        pytest.skip("the CUDA kernels take no float64; the reference runs")


def case(shape: tuple[int, ...], vocabulary: int, d: int, offset: int, dtype: torch.dtype, device: torch.device):
    """Return ids, a weight, and a table of positions that is a little longer than needed."""
    ids = torch.randint(0, vocabulary, shape, device=device)
    weight = torch.randn(vocabulary, d, device=device).to(dtype)
    return ids, weight, positional_table(offset + shape[-1] + 2, d).to(device)


def hold_embed(ids, weight, table, **options) -> None:
    """Compare the lookup with the oracle. Sums run over the batch, or over the rows with one id."""
    tensors = {"weight": weight} if table is None else {"weight": weight, "table": table}
    call = Call("embed", lambda **given: embed(ids, **given, **options), tensors)
    oracle = lambda **given: reference.embedding.embed(ids, **given, **options)  # noqa: E731
    rows = max(ids.numel() // ids.shape[-1], int(ids.flatten().bincount().max()))
    hold(call, oracle, ulps=4, rows=rows, sums=("weight", "table"))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_matches_the_oracle(dtype: torch.dtype, shape: str, dropout_p: float, device: torch.device) -> None:
    supported(device, dtype)
    hold_embed(*case(*SHAPES[shape], dtype, device), scale=5.5, offset=SHAPES[shape][3], dropout_p=dropout_p)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["one", "odd", "tail", "flat", "wide"])
def test_add_positional_matches_the_oracle(dtype: torch.dtype, shape: str, device: torch.device) -> None:
    supported(device, dtype)
    leading, _, d, offset = SHAPES[shape]
    table = positional_table(offset + leading[-1], d).to(device)
    tensors = {"x": torch.randn(*leading, d, device=device).to(dtype), "table": table}
    hold(
        Call("add_positional", lambda x, table: add_positional(x, table, offset, 0.25), tensors),
        lambda x, table, seed: reference.embedding.add_positional(x, table, offset, 0.25, seed),
    )


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_offset_for_each_sequence(dtype: torch.dtype, kind: torch.dtype, device: torch.device) -> None:
    supported(device, dtype)
    ids, weight, table = case((2, 4, 3), 20, 40, 9, dtype, device)
    offset = torch.tensor([[0, 9, 2, 2], [5, 1, 0, 7]], device=device, dtype=kind)
    hold_embed(ids, weight, table, scale=3.0, offset=offset, dropout_p=0.2)
    with fixed_dropout_seed(SEED):
        whole = embed(ids, weight, table, scale=3.0, offset=offset, dropout_p=0.2)
        placed = add_positional(weight.float()[ids] * 3.0, table, offset, 0.2).to(dtype)
    assert torch.equal(whole == 0, placed == 0)
    torch.testing.assert_close(whole.float(), placed.float(), rtol=2e-2, atol=2e-2)
    alone = embed(ids[1, 3], weight, table, scale=3.0, offset=7)
    assert torch.equal(embed(ids, weight, table, scale=3.0, offset=offset)[1, 3], alone)


def test_the_gradient_of_a_float32_table_is_summed_in_float32(device: torch.device) -> None:
    """257 is no bfloat16."""
    ids, offset = (
        torch.zeros(257, 1, dtype=torch.long, device=device),
        torch.zeros(257, dtype=torch.long, device=device),
    )
    weight = torch.zeros(1, 8, dtype=torch.bfloat16, device=device)
    for given in (0, offset):
        tables = [torch.zeros(1, 8, device=device, requires_grad=True) for _ in range(2)]
        embed(ids, weight, tables[0], offset=given).sum().backward()
        add_positional(weight[ids], tables[1], given).sum().backward()
        for table in tables:
            assert torch.equal(table.grad, torch.full_like(table, 257.0))


@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("d", [1, 7, 8, 31, 512, 1030])
def test_the_mask_is_the_contract_bit_for_bit(p: float, d: int, device: torch.device) -> None:
    weight = torch.full((3, d), 2.0, device=device)
    ids = torch.randint(0, 3, (6, 11), device=device)
    with fixed_dropout_seed(SEED) as seed:
        out = embed(ids, weight, dropout_p=p)
        added = add_positional(weight[ids], torch.zeros(11, d, device=device), dropout_p=p)
    keep = reference.dropout.elementwise_keep(seed, p, ids.numel(), d).view(*ids.shape, d).to(device)
    expected = torch.where(keep, 2.0 * reference.dropout.rescale(p), 0.0)
    assert torch.equal(out, expected)
    assert torch.equal(added, expected)


@pytest.mark.parametrize("kind", ["all one id", "as frequent as words"])
def test_a_million_rows(kind: str, device: torch.device) -> None:
    """Values are small integers, whose sums are exact in any order."""
    shape, d = (4, 2**18 + 1), 3
    frequent = (1000 ** torch.rand(shape)).long()  # Zipf: the share of id i is in proportion to 1 / i
    ids = (torch.full(shape, 7) if kind == "all one id" else frequent).to(device)
    weight = torch.randint(-8, 9, (1000, d), device=device).float()
    grad = torch.randint(-8, 9, (*shape, d), device=device).float()
    call = Call("embed", lambda weight: embed(ids, weight, dropout_p=0.5, padding_idx=0), {"weight": weight})
    out, grad_weight = call.trained(grads=[grad])
    keep = reference.dropout.elementwise_keep(torch.tensor([SEED]), 0.5, ids.numel(), d).view(out.shape).to(device)
    assert torch.equal(out, torch.where(keep, 2 * weight[ids], 0.0))
    passed = torch.where(keep, 2 * grad, 0.0).flatten(0, 1)
    assert torch.equal(grad_weight, torch.zeros_like(weight).index_add_(0, ids.flatten(), passed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_frequent_id_and_a_padding_row(dtype: torch.dtype) -> None:
    ids = torch.full((40, 75), 3)
    ids[5] = torch.arange(75) % 9
    for padding_idx in (1, -8, -1):
        hold_embed(ids, torch.randn(9, 72, dtype=dtype), None, scale=3.0, dropout_p=0.2, padding_idx=padding_idx)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48, 65, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_width_are_what_they_are_alone(dtype: torch.dtype, d: int, device: torch.device) -> None:
    supported(device, dtype)
    ids, weight, table = case((3, 400), 20, d, 0, dtype, device)
    for w in (weight, weight.t().contiguous().t()):
        whole, looked_up = embed(ids, w, table, scale=3.0), embed(ids, w)
        placed = add_positional(looked_up, table)
        assert torch.equal(looked_up, weight[ids])
        for t in (0, 1, 17, 200, 399):
            assert torch.equal(whole[1, t], embed(ids[1, t : t + 1], weight, table, scale=3.0, offset=t)[0])
            assert torch.equal(placed[1, t], add_positional(looked_up[1:2, t : t + 1], table, t)[0, 0])


@pytest.mark.parametrize("length,d", [(1, 1), (1, 8), (31, 2), (33, 7), (5000, 6), (257, 513)])
def test_positional_table_is_fp64_rounded_once(length: int, d: int) -> None:
    table = positional_table(length, d)
    expected = reference.embedding.positional_table(length, d)
    assert table.dtype == torch.float32 and table.shape == (length, d)
    # The last place may differ where fp64's own error straddles a rounding boundary.
    assert (table.double() - expected.double()).abs().max() <= 2.0**-24
    assert (table != expected).double().mean() < 1e-3


@pytest.mark.parametrize("length,d", [(1, 1), (33, 7), (40, 64)])
def test_positional_table_in_halves(length: int, d: int) -> None:
    """Sines come first, then cosines; an odd width has one more sine."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angle = position / 10000 ** (2 * torch.arange((d + 1) // 2, dtype=torch.float64) / d)
    expected = torch.cat((angle.sin(), angle[:, : d // 2].cos()), dim=1)
    torch.testing.assert_close(positional_table(length, d, layout="halves").double(), expected, atol=1e-7, rtol=0)


def test_positional_table_follows_default_devices_and_allows_none() -> None:
    assert positional_table(0, 4).shape == (0, 4)
    with torch.device("meta"):
        assert positional_table(5, 4).is_meta


def test_one_id_without_a_dimension_gives_one_row(device: torch.device) -> None:
    weight, table = torch.randn(5, 6, device=device, requires_grad=True), torch.randn(4, 6, device=device)
    one, two = torch.tensor(3, device=device), torch.tensor(2, device=device)
    row, options = torch.tensor([3], device=device), {"scale": 2.0, "padding_idx": 1}
    assert torch.equal(embed(one, weight), torch.nn.functional.embedding(one, weight))
    assert torch.equal(
        embed(one, weight, table, offset=two, **options)[None], embed(row, weight, table, offset=2, **options)
    )
    with fixed_dropout_seed(5):
        dropped = embed(one, weight, dropout_p=0.5)
        assert torch.equal(dropped[None], embed(row, weight, dropout_p=0.5))
    (grad,) = torch.autograd.grad(embed(one.int(), weight).sum(), weight)
    assert torch.equal(grad.sum(1), torch.tensor([0.0, 0, 0, 6, 0], device=device))
    with pytest.raises(IndexError, match=r"is 5, .*0 <= id < 5") if device.type == "cpu" else contextlib.nullcontext():
        embed(torch.tensor(5, device=device), weight)
    with tfast.backend("reference"):
        assert embed(one, weight).shape == (6,)
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(weight.detach()))
    assert tfast.accelerate(model).swapped
    assert torch.equal(model(one), weight[3])
    compiled = torch.compile(embed, fullgraph=True, backend="eager")
    assert torch.equal(compiled(one, weight), weight[3])


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad: int) -> None:
    ids = torch.zeros(2, 3, 4, dtype=torch.long)
    ids[1, 0, 2] = ids[1, 2, 3] = bad
    expected = rf"ids\[1, 0, 2\] is {bad}, but the vocabulary has 7 rows"
    with pytest.raises(IndexError, match=expected):
        embed(ids, torch.randn(7, 5))
    with pytest.raises(IndexError, match=expected):
        torch.ops.transformer_fast.embed_backward(torch.zeros(2, 3, 4, 5), ids, 7, 1.0, None, 0.0, None, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
class TestOnAGpu:
    def test_an_id_outside_the_vocabulary_gives_a_nan_row_and_no_gradient(self) -> None:
        ids = torch.tensor([0, 5, -1, 2, 2**40], device="cuda")
        weight = torch.ones(3, 40, device="cuda", requires_grad=True)
        out = embed(ids, weight, dropout_p=0.5)
        (grad,) = torch.autograd.grad(out, weight, torch.ones_like(out))
        assert out[[1, 2, 4]].isnan().all() and not out[[0, 3]].isnan().any()
        assert not grad.isnan().any() and not grad[1].any()

    def test_the_atomic_gradient_agrees_and_the_sorted_one_repeats(self) -> None:
        ids = torch.randint(0, 50, (64, 100), device="cuda") ** 2 // 50
        grad, seed = torch.randn(64, 100, 96, device="cuda"), torch.tensor([SEED]).cuda()
        sort, again, atomic = (
            torch.ops.transformer_fast.embed_backward(grad, ids, 50, 2.0, 4, 0.1, seed, deterministic)
            for deterministic in (True, True, False)
        )
        assert torch.equal(sort, again)
        torch.testing.assert_close(sort, atomic, rtol=1e-5, atol=1e-3)

    def test_graph_replays_draw_fresh_masks(self) -> None:
        ids, weight = torch.randint(0, 10, (4, 8), device="cuda"), torch.randn(10, 64, device="cuda")
        table = positional_table(8, 64).cuda()
        embed(ids, weight, table, dropout_p=0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = embed(ids, weight, table, dropout_p=0.5)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(first, out)
