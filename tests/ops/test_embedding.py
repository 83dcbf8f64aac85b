"""The embedding line: forward and gradients against the oracle, exact masks, repeatability."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import assert_as_exact_as_eager, fixed_seed
from torch import Tensor

import transformer_fast as tfast
from transformer_fast import extension, reference
from transformer_fast.ops.embedding import add_positional, embed, positional_table

pytestmark = pytest.mark.skipif(not extension.load(), reason=extension.status())

SEED = -0x123456789ABCDEF
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
    ids = torch.randint(0, vocabulary, shape, device=device)
    weight = torch.randn(vocabulary, d, device=device).to(dtype)
    table = positional_table(offset + shape[-1] + 2, d).to(device)
    return ids, weight, table


def gradients(run: Callable[..., Tensor], *inputs: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The result, then the gradient of each input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = run(*leaves)
    out.backward(grad.to(out))
    return out.detach(), *(leaf.grad for leaf in leaves)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_matches_the_oracle(dtype: torch.dtype, shape: str, dropout_p: float, device: torch.device) -> None:
    supported(device, dtype)
    ids, weight, table = case(*SHAPES[shape], dtype, device)
    offset = SHAPES[shape][3]
    options = {"scale": 5.5, "offset": offset, "dropout_p": dropout_p}
    grad = torch.randn(*ids.shape, weight.shape[1], device=device).to(dtype)
    seed = torch.tensor([SEED], device=device)

    def truth(precision: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
        return gradients(
            lambda w, t: reference.embedding.embed(ids, w, t, **options, seed=seed),
            weight.to(precision),
            table,
            grad=grad,
        )

    with fixed_seed(SEED):
        ours = gradients(lambda w, t: embed(ids, w, t, **options), weight, table, grad=grad)
    rows = max(ids.numel() // ids.shape[-1], int(ids.flatten().bincount().max()))
    eager, exact = truth(dtype, table), truth(torch.float64, table.double())
    for what, a, e, x in zip(("out", "grad_weight", "grad_table"), ours, eager, exact):
        assert a.dtype == e.dtype, what
        assert_as_exact_as_eager(a, e, x, ulps=4.0 if what == "out" else 4.0 * rows**0.5, what=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ["one", "odd", "tail", "flat", "wide"])
def test_add_positional_matches_the_oracle(dtype: torch.dtype, shape: str, device: torch.device) -> None:
    supported(device, dtype)
    leading, _, d, offset = SHAPES[shape]
    x = torch.randn(*leading, d, device=device).to(dtype)
    table = positional_table(offset + leading[-1], d).to(device)
    grad, seed = torch.randn_like(x), torch.tensor([SEED], device=device)

    def truth(precision: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
        return gradients(
            lambda x, t: reference.embedding.add_positional(x, t, offset, 0.25, seed),
            x.to(precision),
            table,
            grad=grad,
        )

    with fixed_seed(SEED):
        ours = gradients(lambda x, t: add_positional(x, t, offset, 0.25), x, table, grad=grad)
    eager, exact = truth(dtype, table), truth(torch.float64, table.double())
    for what, a, e, t in zip(("out", "grad_x", "grad_table"), ours, eager, exact):
        assert_as_exact_as_eager(a, e, t, ulps=8.0, what=what)


@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("d", [1, 7, 8, 31, 512, 1030])
def test_the_mask_is_the_contract_bit_for_bit(p: float, d: int, device: torch.device) -> None:
    weight = torch.full((3, d), 2.0, device=device)
    ids = torch.randint(0, 3, (6, 11), device=device)
    with fixed_seed(SEED) as seed:
        out = embed(ids, weight, dropout_p=p)
        added = add_positional(weight[ids], torch.zeros(11, d, device=device), dropout_p=p)
    keep = reference.dropout.elementwise_keep(seed, p, ids.numel(), d).view(*ids.shape, d).to(device)
    expected = torch.where(keep, 2.0 * reference.dropout.rescale(p), 0.0)
    assert torch.equal(out, expected)
    assert torch.equal(added, expected)


def test_the_known_answer_of_philox_comes_out_of_the_kernel(device: torch.device) -> None:
    # Random123's vector for counter 0, key 0. Row 0, column c of seed 0 is draw c; it is kept up to that threshold.
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    for column, draw in enumerate(part for word in words for part in (word & 0xFFFF, word >> 16)):
        weight = torch.ones(1, 8, device=device)
        with fixed_seed(0):
            kept, dropped = (
                embed(torch.zeros(1, dtype=torch.long, device=device), weight, dropout_p=threshold / 65536)
                for threshold in (draw, draw + 1)
            )
        assert kept[0, column] > 0 and dropped[0, column] == 0


def test_manual_seed_governs_dropout_and_backends_agree(device: torch.device) -> None:
    ids, weight, table = case((4, 6), 10, 32, 0, torch.float32, device)

    def run(backend: str) -> Tensor:
        torch.manual_seed(7)
        with tfast.backend(backend):
            return embed(ids, weight, table, dropout_p=0.3)

    first = run("auto")
    assert torch.equal(first, run("auto"))
    assert torch.equal(first == 0, run("reference") == 0)
    assert not torch.equal(first, embed(ids, weight, table, dropout_p=0.3))


@pytest.mark.parametrize("kind", ["all one id", "as frequent as words"])
def test_a_million_rows(kind: str, device: torch.device) -> None:
    """Small integers, whose sums are exact in any order."""
    shape, d = (4, 2**18 + 1), 3
    frequent = (1000 ** torch.rand(shape)).long()  # Zipf: the share of id i is in proportion to 1 / i
    ids = (torch.full(shape, 7) if kind == "all one id" else frequent).to(device)
    weight = torch.randint(-8, 9, (1000, d), device=device).float()
    grad = torch.randint(-8, 9, (*shape, d), device=device).float()
    with fixed_seed(SEED) as seed:
        out, grad_weight = gradients(lambda w: embed(ids, w, dropout_p=0.5, padding_idx=0), weight, grad=grad)
    keep = reference.dropout.elementwise_keep(seed, 0.5, ids.numel(), d).view(out.shape).to(device)
    assert torch.equal(out, torch.where(keep, 2 * weight[ids], 0.0))
    passed = torch.where(keep, 2 * grad, 0.0).flatten(0, 1)
    assert torch.equal(grad_weight, torch.zeros_like(weight).index_add_(0, ids.flatten(), passed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_hot_id_is_exact_and_repeats_for_every_number_of_threads(dtype: torch.dtype) -> None:
    ids = torch.full((40, 75), 3)
    ids[5] = torch.arange(75) % 9
    weight, grad = torch.randn(9, 72, dtype=dtype), torch.randn(40, 75, 72, dtype=dtype)
    seed = torch.tensor([SEED])

    def run(w: Tensor) -> Tensor:
        return embed(ids, w, scale=3.0, dropout_p=0.2, padding_idx=1)

    results = []
    for count in (1, 2, 3, 2):
        with threads(count), fixed_seed(SEED):
            results.append(gradients(run, weight, grad=grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
    eager, exact = (
        gradients(
            lambda w: reference.embedding.embed(ids, w, scale=3.0, dropout_p=0.2, padding_idx=1, seed=seed),
            weight.to(precision),
            grad=grad,
        )[1]
        for precision in (dtype, torch.float64)
    )
    assert_as_exact_as_eager(results[0][1], eager, exact, ulps=4 * 3000**0.5, what="grad_weight")


def test_a_bigger_batch_uses_threads_without_changing_a_bit() -> None:
    ids, weight, table = case((16, 64), 5000, 256, 0, torch.float32, torch.device("cpu"))
    grad = torch.randn(16, 64, 256)
    results = []
    for count in (1, 2):
        with threads(count), fixed_seed(SEED):
            results.append(gradients(lambda w: embed(ids, w, table, dropout_p=0.1), weight, grad=grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    used = torch.zeros(5000, dtype=torch.bool).index_fill_(0, ids.flatten(), True)
    assert not results[0][1][~used].any() and results[0][1][used].any(1).all()


def test_padding_row_is_read_but_gets_no_gradient(device: torch.device) -> None:
    ids = torch.tensor([[0, 2, 1, 2], [2, 2, 0, 1]], device=device)
    weight = torch.randn(3, 12, device=device)
    for padding_idx in (2, -1):
        out, grad = gradients(lambda w, i=padding_idx: embed(ids, w, padding_idx=i), weight, grad=torch.ones(2, 4, 12))
        assert torch.equal(out, weight[ids])
        assert not grad[2].any() and torch.equal(grad[:2], torch.full((2, 12), 2.0, device=device))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty_batches(shape: tuple[int, ...], device: torch.device) -> None:
    weight, table = torch.randn(4, 6, device=device), torch.randn(9, 6, device=device)
    ids = torch.zeros(shape, dtype=torch.long, device=device)
    out, grad, grad_table = gradients(
        lambda w, t: embed(ids, w, t, dropout_p=0.5), weight, table, grad=torch.ones(*shape, 6, device=device)
    )
    assert out.shape == (*shape, 6) and not grad.any() and not grad_table.any()
    assert add_positional(torch.zeros(*shape, 4, 6, device=device), table, 0, 0.5).shape == (*shape, 4, 6)


@pytest.mark.parametrize("d", [21, 64, 1100])
def test_any_strides_give_the_same_bits(d: int, device: torch.device) -> None:
    ids, weight, table = case((5, 6), 8, d, 2, torch.float32, device)
    strided_ids = ids.t().contiguous().t()
    views = (weight.t().contiguous().t(), weight.repeat_interleave(2, 1)[:, ::2], torch.cat((weight, weight), 1)[:, :d])
    strided_table = table.t().contiguous().t()
    upstream = torch.randn(d, device=device).expand(5, 6, d)
    with fixed_seed(SEED):
        plain = gradients(lambda w: embed(ids, w, table, offset=2, dropout_p=0.1), weight, grad=upstream.contiguous())
        for view in views:
            assert not view.is_contiguous()
            assert torch.equal(embed(strided_ids, view, strided_table, offset=2, dropout_p=0.1), plain[0])
        leaf = weight.clone().requires_grad_()
        embed(ids.int(), leaf, table, offset=2, dropout_p=0.1).backward(upstream)
        assert torch.equal(leaf.grad, plain[1])
        x = torch.randn(6, 5, d, device=device)
        permuted = add_positional(x.transpose(0, 1), table, 1, 0.3)
        assert torch.equal(permuted, add_positional(x.transpose(0, 1).contiguous(), table, 1, 0.3))
        added = add_positional(x.transpose(0, 1), table, 1)
        assert added.is_contiguous() and torch.equal(added, x.transpose(0, 1) + table[1:7])


def test_decoding_step_by_step_equals_the_whole_sequence(device: torch.device) -> None:
    ids, weight, table = case((3, 9), 20, 48, 0, torch.float32, device)
    whole = embed(ids, weight, table, scale=7.0)
    steps = [embed(ids[:, t : t + 1], weight, table, scale=7.0, offset=t) for t in range(9)]
    assert torch.equal(whole, torch.cat(steps, 1))


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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
def test_an_offset_for_each_sequence(weights: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    supported(device, weights)
    ids, weight, table = case((2, 4, 3), 20, 40, 9, weights, device)
    offset = torch.tensor([[0, 9, 2, 2], [5, 1, 0, 7]], device=device, dtype=dtype)
    grad, seed = torch.randn(2, 4, 3, 40, device=device).to(weights), torch.tensor([SEED], device=device)
    options = {"scale": 3.0, "dropout_p": 0.2}

    def truth(precision: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
        options["seed"] = seed
        return gradients(
            lambda w, t: reference.embedding.embed(ids, w, t, offset=offset, **options),
            weight.to(precision),
            table,
            grad=grad,
        )

    with fixed_seed(SEED):
        ours = gradients(lambda w, t: embed(ids, w, t, offset=offset, **options), weight, table, grad=grad)
        again = gradients(
            lambda w, t: add_positional(w[ids] * 3.0, t, offset, 0.2).to(weights), weight.float(), table, grad=grad
        )
    eager, exact = truth(weights, table), truth(torch.float64, table.double())
    for what, a, e, x in zip(("out", "grad_weight", "grad_table"), ours, eager, exact):
        assert_as_exact_as_eager(a, e, x, ulps=4.0 * ids.numel() ** 0.5, what=what)
    assert torch.equal(ours[0] == 0, again[0] == 0)
    torch.testing.assert_close(ours[0].float(), again[0].float(), rtol=2e-2, atol=2e-2)
    alone = embed(ids[1, 3], weight, table, scale=3.0, offset=7)
    assert torch.equal(embed(ids, weight, table, scale=3.0, offset=offset)[1, 3], alone)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    rows, d = (1 << 31) // 512 + 9, 512
    weight = torch.empty(rows, d, dtype=torch.float16)  # never touched but for two rows, so it takes no memory
    weight[0], weight[rows - 1] = 1.0, 3.0
    out = embed(torch.tensor([rows - 1, 0]), weight, scale=2.0)
    assert torch.equal(out, torch.tensor([[6.0], [2.0]], dtype=torch.float16).expand(2, d))


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
    """First the sines, then the cosines; of an odd width one sine more."""
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angle = position / 10000 ** (2 * torch.arange((d + 1) // 2, dtype=torch.float64) / d)
    expected = torch.cat((angle.sin(), angle[:, : d // 2].cos()), dim=1)
    torch.testing.assert_close(positional_table(length, d, layout="halves").double(), expected, atol=1e-7, rtol=0)


def test_positional_table_names_a_wrong_layout() -> None:
    with pytest.raises(ValueError, match='layout must be "interleaved" or "halves", got \'sines\''):
        positional_table(3, 4, layout="sines")


def test_positional_table_follows_default_devices_and_allows_none() -> None:
    assert positional_table(0, 4).shape == (0, 4)
    with torch.device("meta"):
        assert positional_table(5, 4).is_meta


def test_autocast_changes_nothing(device: torch.device) -> None:
    ids, weight, table = case((2, 3), 4, 16, 0, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        assert embed(ids, weight, table).dtype == torch.float32


def test_gradcheck() -> None:
    ids = torch.tensor([[0, 2, 2], [1, 2, 0]])
    weight = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    table = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    with fixed_seed(SEED):
        assert torch.autograd.gradcheck(
            lambda w, t: embed(ids, w, t, scale=2.0, offset=1, dropout_p=0.3), (weight, table)
        )
        assert torch.autograd.gradcheck(lambda x, t: add_positional(x, t, 1, 0.3), (x, table))
        assert torch.autograd.gradgradcheck(lambda x, t: add_positional(x, t, 1, 0.3), (x, table))


def test_second_derivative_of_the_lookup_is_refused_clearly() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad((embed(torch.tensor([0, 1]), weight) ** 2).sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_opcheck(dropout_p: float, device: torch.device) -> None:
    ops = torch.ops.transformer_fast
    ids, weight, table = case((2, 5), 7, 12, 1, torch.float32, device)
    seed = torch.tensor([3], device=device) if dropout_p else None
    weight.requires_grad_()
    torch.library.opcheck(ops.embed.default, (ids, weight, table, 2.0, 1, None, 3, dropout_p, seed, True))
    x = torch.randn(2, 5, 12, device=device, requires_grad=True)
    torch.library.opcheck(ops.add_positional.default, (x, table, 1, None, dropout_p, seed))
    torch.library.opcheck(ops.add_positional.default, (x, None, 0, None, dropout_p, seed))
    offsets = torch.tensor([1, 0], device=device)
    torch.library.opcheck(ops.embed.default, (ids, weight, table, 2.0, 0, offsets, 3, dropout_p, seed, True))
    torch.library.opcheck(ops.add_positional.default, (x, table, 0, offsets, dropout_p, seed))
    args = (x.detach(), ids, 7, 2.0, 3, dropout_p, seed, True)
    torch.library.opcheck(ops.embed_backward.default, args)


def test_compiles_in_one_graph() -> None:
    ids, weight, table = case((2, 5), 7, 12, 0, torch.float32, torch.device("cpu"))
    compiled = torch.compile(lambda i, w, t: embed(i, w, t, scale=2.0), backend="aot_eager", fullgraph=True)
    grad = torch.randn(2, 5, 12)
    expected = gradients(lambda w: embed(ids, w, table, scale=2.0), weight, grad=grad)
    actual = gradients(lambda w: compiled(ids, w, table), weight, grad=grad)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))
