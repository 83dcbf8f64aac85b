"""Attention kernels of padded batches against the fp64 oracle, and at edges where such kernels fail.

Here the C++ kernels; tests/interpreter/test_attention_kernels.py runs the same on Triton. ``kernels.check`` holds the
output, the logsumexp, the weights and every gradient of a call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from attention_kernels import DIALECTS, HALVES, SEED, Kernels, distances, oracle, wide
from helpers import mask_parts

from transformer_fast.reference.dropout import attention_keep

WINDOWS = {
    "from below": lambda Lq, Lk: (None, -7),
    "causal window": lambda Lq, Lk: (0, -40),
    "both sides": lambda Lq, Lk: (5, -9),
    "one key a query": lambda Lq, Lk: (0, 0),
    "in the middle": lambda Lq, Lk: (Lq, 20),
    "first rows empty": lambda Lq, Lk: (-12, -45),
    "first rows empty, no window": lambda Lq, Lk: (-1, None),
    "last rows empty": lambda Lq, Lk: (None, Lk - Lq // 2),
    "crossed: all rows empty": lambda Lq, Lk: (3, 10),
    "past the end: all rows empty": lambda Lq, Lk: (None, Lk),
    "bounds nothing": lambda Lq, Lk: (None, 1 - Lq),
}
"""Bounds (causal, window) for Lq queries and Lk keys."""


def mask_of(name: str, B: int, H: int, Lq: int, Lk: int) -> dict:
    """Return one of the WINDOWS or of the DIALECTS."""
    if name in WINDOWS:
        return dict(zip(("causal", "window"), WINDOWS[name](Lq, Lk), strict=True))
    return mask_parts(B, H, Lq, Lk, torch.Generator().manual_seed(3))[name]


def documents(name: str, B: int, Lq: int, Lk: int) -> dict:
    """Return document ids of queries and keys."""
    generator = torch.Generator().manual_seed(1)

    def rising(rows, count):
        return torch.randint(0, count, (B, rows), generator=generator, dtype=torch.int32).sort(1).values

    ids = {
        "in order": lambda: (rising(Lq, 4), rising(Lk, 4)),
        "whole tiles": lambda: (torch.arange(Lq).div(32).int()[None], torch.arange(Lk).div(32).int()[None]),
        "anywhere": lambda: (rising(Lq, 3)[:, torch.randperm(Lq, generator=generator)], rising(Lk, 3)[:1]),
        "nothing shared": lambda: (torch.zeros(1, Lq, dtype=torch.int32), rising(Lk, 4) - 9),
        "some without a key": lambda: (rising(Lq, 9), rising(Lk, 4) * 2),
    }[name]()
    return dict(zip(("query_ids", "key_ids"), ids, strict=True))


PARTS = {
    "bias": lambda ours, B, H, Lq, Lk: {"bias": ours.random(1, H, Lq, Lk)},
    "bias of keys": lambda ours, B, H, Lq, Lk: {"bias": ours.random(B, 1, 1, Lk)},
    "distances": lambda ours, B, H, Lq, Lk: {"distance_bias": distances(ours, (B, H), Lq, Lk)},
    "documents": lambda ours, B, H, Lq, Lk: documents("in order", B, Lq, Lk),
    "documents anywhere": lambda ours, B, H, Lq, Lk: documents("anywhere", B, Lq, Lk),
    "softcap": lambda ours, B, H, Lq, Lk: {"softcap": 2.0},
    "all parts": lambda ours, B, H, Lq, Lk: {
        "distance_bias": distances(ours, (1, H), Lq, Lk), "softcap": 5.0, **documents("in order", B, Lq, Lk),
        "bias": ours.random(1, H, Lq, Lk),
    },
}  # fmt: skip
"""Parts of a call besides its mask: biases, softcap and sinks."""
SOME_MASKS = ["dense", "rows", "padding", "lengths", "lengths per query", "causal", "causal, first rows empty", "all"]
SOME_MASKS += ["both sides", "in the middle", "last rows empty"]


def part_of(name: str, kernels: Kernels, dtype: torch.dtype) -> dict:
    """Return one of PARTS for a batch entry, with the kernels' heads, lengths and dtype."""
    parts = PARTS[name](kernels, 1, kernels.batch[1], *kernels.lengths)
    return {name: t.to(wide(dtype)) if name.endswith("bias") else t for name, t in parts.items()}


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("mask", [*DIALECTS, *WINDOWS])
def test_every_mask(mask, dropout_p, dtype, zero_empty_rows, kernels):
    Lq, Lk = kernels.lengths
    parts = mask_of(mask, *kernels.batch[:2], Lq, Lk)
    batch = kernels.batch if any(isinstance(t, torch.Tensor) for t in parts.values()) else kernels.few
    call = kernels.call(24, parts, dropout_p=dropout_p, zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.inputs(*batch, Lq, Lk, 24, dtype), call, received=zero_empty_rows)


@pytest.mark.parametrize("mask", SOME_MASKS)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_with_every_mask(part, mask, dtype, kernels):
    zero_empty_rows = SOME_MASKS.index(mask) % 2 == 0
    parts = mask_of(mask, 1, kernels.batch[1], *kernels.lengths) | part_of(part, kernels, dtype)
    call = kernels.call(20, parts, dropout_p=0.2 * zero_empty_rows, zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.inputs(1, *kernels.batch[1:], *kernels.lengths, 20, dtype), call)


def test_every_pair_of_masks(kernels):
    every = mask_parts(1, 2, 20, 40, torch.Generator().manual_seed(8))
    single = [parts for parts in every.values() if len(parts) == 1]
    tensors = kernels.inputs(1, 2, 2, 20, 40, 8)
    for number, one in enumerate(single):
        for other in single[number + 1 :]:
            kernels.check(tensors, kernels.call(8, one | other))


LENGTHS = [(1, 1), (1, 5), (15, 17), (17, 15), (97, 64), (64, 97), (127, 129), (129, 127), (3, 257), (257, 3), (257, 1)]
LENGTHS += [(1, 129), (15, 1), (64, 32)]
BOUNDS = {
    "causal": lambda Lq, Lk: (Lk - Lq, None),
    "window": lambda Lq, Lk: (Lk - Lq, Lk - Lq - 15),
    "one key": lambda Lq, Lk: (0, 0),
    "from below": lambda Lq, Lk: (None, -33),
}


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(("Lq", "Lk"), LENGTHS)
def test_lengths_that_break_tiles(Lq, Lk, bounds, dtype, kernels):
    causal, window = BOUNDS[bounds](Lq, Lk)
    call = kernels.call(16, causal=causal, window=window, dropout_p=0.1 * (bounds != "one key"))
    # Beside one visible key all but what comes in through the logsumexp cancels, to the rounding of the output.
    received = kernels.backend == "native" or (Lk > 1 and bounds != "one key")
    kernels.check(kernels.inputs(*kernels.few, Lq, Lk, 16, dtype), call, received=received)


@pytest.mark.parametrize("bounds", ["causal", "window", "from below"])
@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1025), (1025, 1)])
def test_long_on_one_side(Lq, Lk, bounds, dtype, kernels):
    test_lengths_that_break_tiles(Lq, Lk, bounds, dtype, kernels)


@pytest.mark.parametrize(("Lq", "Lk", "bounds"), [(1025, 66, "causal"), *((257, 257, name) for name in BOUNDS)])
def test_long_on_both_sides(Lq, Lk, bounds, dtype, kernels):
    test_lengths_that_break_tiles(Lq, Lk, bounds, dtype, kernels)


@pytest.mark.parametrize("Lq", [2, 35])  # few queries take another product
@pytest.mark.parametrize("D", [1, 3, 8, 16, 20, 40, 64, 80, 96, 128, 200, 256])
def test_head_dims(D, Lq, dtype, kernels):
    call = kernels.call(D, lengths=torch.tensor([41], dtype=torch.int32))
    kernels.check(kernels.inputs(*kernels.few, Lq, 50, D, dtype), call)


@pytest.mark.parametrize(("H", "Hkv"), [(6, 2), (5, 1), (3, 3)])
def test_groups_of_heads(H, Hkv, kernels):
    kernels.check(kernels.inputs(1, H, Hkv, 5, 5, 8), kernels.call(8))


@pytest.mark.parametrize(("B", "Lq", "Lk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_do(B, Lq, Lk, kernels):
    tensors = kernels.inputs(B, 2, 1, Lq, Lk, 8)
    parts = {"bias": torch.randn(1, 2, 1, 1), "distance_bias": torch.zeros(1, 2, Lq + Lk - 1)}
    found = kernels.outcome(tensors, kernels.call(8, parts))
    assert found["logsumexp"].shape == (B, 2, Lq) and found["logsumexp"].eq(-math.inf).all()
    assert found["weights"].shape == (B, 2, Lq, Lk)
    for name, like in (("out", tensors[0]), *zip(("grad_q", "grad_k", "grad_v"), tensors), *parts.items()):
        t = found[name if name in found else f"grad_{name}"]
        assert t.shape == like.shape and t.eq(0).all(), name


def test_strided_and_expanded(kernels):
    (B, H), L, D = (2, 2), kernels.lengths[0], 16
    fused = kernels.random(B, L, 3, H, D)  # one projection for q, k and v, heads not yet moved forward
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    sliced = kernels.random(B, H, 2 * L, D + 3)[:, :, ::2, 3:]
    one_head, one_number = kernels.random(B, 1, L, D).expand(B, H, L, D), kernels.random(1, 1, 1, 1).expand(B, H, L, D)
    parts = {
        "keep": (torch.rand(L, L, B) > 0.3).permute(2, 0, 1).unsqueeze(1).expand(B, H, L, L),
        "key_keep": (torch.rand(B, 2 * L) > 0.2)[:, ::2].view(B, 1, 1, L),
        "lengths": torch.tensor([L - 9], dtype=torch.int32).expand(B),
        "bias": torch.randn(H, L, L).transpose(1, 2).unsqueeze(0).expand(B, H, L, L),
        "causal": 5,
    }
    kernels.check([q, k, v, sliced], kernels.call(D, parts, dropout_p=0.1))
    kernels.check([sliced, one_head, one_head, kernels.random(B, L, H, D).transpose(1, 2)], kernels.call(D, causal=5))
    dense = q.contiguous().transpose(1, 2).contiguous().transpose(1, 2)
    found = kernels.check([dense, k, v, one_number], kernels.call(D), way=kernels.recorded)
    assert found["out"].stride() == found["grad_q"].stride() == dense.stride(), "so merging heads is a view"


BIASES = ["BHqk", "1Hqk", "BHq1", "BH11", "1H1k", "B1q1", "B11k", "BH1k", "11qk", "1111"]


@pytest.mark.parametrize("bias_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("shape", BIASES)
def test_a_bias_of_any_shape_and_dtype(shape, dtype, bias_dtype, zero_empty_rows, kernels):
    (B, H, Hkv), (Lq, Lk) = kernels.batch, kernels.lengths
    shape = tuple({"B": B, "H": H, "q": Lq, "k": Lk, "1": 1}[size] for size in shape)
    bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.1 * (shape[3] > 1), -math.inf)
    bias = bias.to(torch.float64 if dtype == torch.float64 else bias_dtype)
    parts = {"bias": bias, "lengths": torch.tensor([0, Lk - 7], dtype=torch.int32), "causal": Lk // 2}
    call = kernels.call(24, parts, dropout_p=0.1 * zero_empty_rows, zero_empty_rows=zero_empty_rows)
    many = 8.0 * max(B * H * Lq * Lk / bias.numel(), Lk) ** 0.5
    allowed = {"grad_bias": many} if kernels.backend == "native" and dtype not in HALVES else {}
    received = kernels.backend == "native" or not zero_empty_rows
    found = kernels.check(kernels.inputs(B, H, Hkv, Lq, Lk, 24, dtype), call, received=received, **allowed)
    assert found["grad_bias"].shape == shape


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2), (1, 1)])
@pytest.mark.parametrize(("Lq", "Lk"), [(1, 1), (1, 129), (129, 1), (32, 32), (33, 64), (64, 65), (70, 45)])
def test_a_bias_by_distance_of_any_shape(Lq, Lk, shape, dtype, kernels):
    bias = distances(kernels, shape, Lq, Lk).to(wide(dtype))
    found = kernels.check(kernels.inputs(2, 2, 1, Lq, Lk, 16, dtype), kernels.call(16, distance_bias=bias))
    assert found["grad_distance_bias"].is_contiguous()


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("ahead", [0, -10])
def test_a_bias_by_distance_blocks(ahead, zero_empty_rows, kernels):
    """-inf at later keys is a causal mask; -inf at near keys leaves empty rows."""
    Lq, Lk = kernels.lengths
    blocked = torch.arange(Lq + Lk - 1, device=kernels.device) >= Lq + ahead
    bias = distances(kernels, (1, 2), Lq, Lk).masked_fill(blocked, -math.inf)
    bias[:, 1, Lq - 20] = -math.inf
    call = kernels.call(16, distance_bias=bias, zero_empty_rows=zero_empty_rows)
    found = kernels.check(kernels.inputs(1, 2, 1, Lq, Lk, 16), call)
    assert not found["grad_distance_bias"][bias == -math.inf].any()


@pytest.mark.parametrize("zero_empty_rows", [False, True], ids=["uniform", "zero"])
@pytest.mark.parametrize("name", ["in order", "whole tiles", "anywhere", "nothing shared", "some without a key"])
def test_documents(name, zero_empty_rows, dtype, kernels):
    call = kernels.call(16, documents(name, 2, *kernels.lengths), zero_empty_rows=zero_empty_rows)
    kernels.check(kernels.inputs(2, 1, 1, *kernels.lengths, 16, dtype), call)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("softcap", [None, 0.05, 2.0, 30.0, 1e6])
def test_any_scale_and_softcap(softcap, scale, dtype, kernels):
    """Scores range from nearly all capped to so small that tanh must return them unchanged."""
    call = kernels.call(16, {"causal": 20}, scale=scale, softcap=softcap)
    kernels.check(kernels.inputs(1, 2, 1, 20, 40, 16, dtype), call)


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("mask", ["none", "both sides", "all"])
def test_large_and_equal_scores(mask, magnitude, capped, received, kernels):
    """Large scores take the path on which rows are summed again."""
    (B, H, _), (Lq, Lk) = kernels.batch, kernels.lengths
    q, *rest = kernels.inputs(*kernels.batch, Lq, Lk, 16)
    parts = mask_of(mask, B, H, Lq, Lk)
    if capped:
        bias = distances(kernels, (1, H), Lq, Lk) * magnitude
        parts |= documents("in order", B, Lq, Lk) | {"softcap": 50.0, "distance_bias": bias}
    kernels.check((q * magnitude, *rest), kernels.call(16, parts), received=received)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
def test_rows_without_keys(dropout_p, kernels):
    Lk = kernels.lengths[1]
    q, k, v, grad_out = kernels.inputs(2, 1, 1, 6, Lk, 8)
    call = kernels.call(8, lengths=torch.tensor([0, 9], dtype=torch.int32), dropout_p=dropout_p)
    found = kernels.check((q, k, v, grad_out), call)
    assert found["logsumexp"][0].eq(-math.inf).all()
    assert not found["grad_q"][0].any() and not found["grad_k"][0].any()
    if dropout_p == 0:
        torch.testing.assert_close(found["out"][0], v[0].mean(1, keepdim=True).expand_as(q[0]), rtol=0, atol=1e-6)
        mean = (grad_out[0].sum(1, keepdim=True) / Lk).expand_as(v[0])
        torch.testing.assert_close(found["grad_v"][0], mean, rtol=0, atol=1e-6)
    if dropout_p == 1:
        none = kernels.outcome((q, k, v, grad_out), call)
        assert not any(none[name].any() for name in ("out", "grad_q", "grad_k", "grad_v"))
    zeros = kernels.check((q, k, v, grad_out), replace(call, zero_empty_rows=True))
    assert not any(zeros[name][0].any() for name in ("out", "grad_q", "grad_k", "grad_v"))


def test_dropout_drops_exactly_what_the_contract_says(kernels):
    """One-hot values and constant scores show the dropped weights in the output."""
    Lq, Lk = kernels.lengths
    q, k = (torch.zeros(2, 2, n, Lk, device=kernels.device) for n in (Lq, Lk))
    v = torch.eye(Lk, device=kernels.device).expand(2, 2, Lk, Lk)
    out = kernels.forward(q, k, v, kernels.call(1, dropout_p=0.3)).cpu()
    assert torch.equal(out != 0, attention_keep(SEED, 0.3, 2, 2, Lq, Lk))
    assert torch.allclose(out[out != 0], torch.tensor(1 / Lk / 0.7))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("how", ["lengths", "key_keep", "keep", "bias", "window", "documents", "distances", "causal"])
def test_what_is_stored_at_blocked_keys_never_shows(how, dropout_p, bad, kernels):
    Lq, Lk = 20, kernels.lengths[1]
    q, k, v, grad_out = kernels.inputs(1, 2, 1, Lq, Lk, 8)
    j, distance = torch.arange(Lk), torch.arange(Lq + Lk - 1) - (Lq - 1)
    kept = j < Lk - 7
    if how in ("key_keep", "keep"):
        kept = kept & (torch.rand(Lk) > 0.5)
    blocks = torch.where(kept, 0.0, -math.inf)
    parts, kept = {
        "lengths": ({"lengths": torch.tensor([Lk - 7], dtype=torch.int32)}, kept),
        "key_keep": ({"key_keep": kept.view(1, 1, 1, Lk)}, kept),
        "keep": ({"keep": kept.expand(1, 1, Lq, Lk)}, kept),
        "bias": ({"bias": blocks.expand(1, 1, Lq, Lk)}, kept),
        "documents": ({"query_ids": torch.ones(1, Lq).int(), "key_ids": kept.int()[None], "softcap": 2.0}, kept),
        "window": ({"causal": 9, "window": 4}, (j >= 4) & (j < Lq + 9)),
        "causal": ({"causal": -5, "bias": torch.randn(1, 2, Lq, Lk)}, j < Lq - 5),
        "distances": ({"distance_bias": torch.where(distance < 9, 0.0, -math.inf).expand(1, 2, -1)}, j < Lq + 8),
    }[how]
    call = kernels.call(8, parts, dropout_p=dropout_p, zero_empty_rows=how == "causal")
    blocked = ~kept.view(1, 1, Lk, 1).to(kernels.device)
    clean = kernels.outcome((q, k, v, grad_out), call)
    stained = kernels.outcome((q, k.masked_fill(blocked, bad), v.masked_fill(blocked, bad), grad_out), call)
    for name, t in clean.items():
        assert t.isfinite().all() or (name == "logsumexp" and how == "causal"), name
        torch.testing.assert_close(stained[name], t, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", ["causal", "window", "documents"])
def test_a_key_shows_to_nobody_but_those_that_see_it(how, bad, kernels):
    Lq, Lk, where = 80, 110, 70
    q, k, v, grad_out = kernels.inputs(1, 1, 1, Lq, Lk, 8)
    ids = {"query_ids": (torch.arange(Lq) // 30).int()[None], "key_ids": (torch.arange(Lk) // 40).int()[None]}
    parts = {"causal": {"causal": 20}, "window": {"window": 20}, "documents": ids}[how]
    i = torch.arange(Lq, device=kernels.device)
    seeing = {"causal": i >= 50, "window": i <= 50, "documents": i // 30 == 1}[how]
    call = kernels.call(8, parts, zero_empty_rows=True)
    clean = kernels.outcome((q, k, v, grad_out), call)
    k[:, :, where], v[:, :, where] = bad, bad
    stained = kernels.outcome((q, k, v, grad_out), call)
    for name in ("out", "logsumexp", "grad_q"):
        torch.testing.assert_close(stained[name][:, :, ~seeing], clean[name][:, :, ~seeing], atol=1e-6, rtol=1e-5)
        finite = stained[name][:, :, seeing].isfinite()
        assert not (finite.all() if name == "logsumexp" and bad == math.inf else finite.any()), f"{name} hides it"


def test_a_blocked_nan_shows_in_no_uniform_row(kernels):
    q, k, v, grad_out = kernels.inputs(1, 1, 1, 4, 6, 8)
    v[:, :, 5], k[:, :, 5] = math.nan, math.nan
    call = kernels.call(8, lengths=torch.tensor([[0, 3, 5, 0]], dtype=torch.int32))
    found = kernels.outcome((q, k, v, grad_out), call)
    exact = oracle((q, k, v, grad_out), call, torch.float64, None)
    for name in ("out", "logsumexp", "grad_q", "grad_k"):
        torch.testing.assert_close(found[name].cpu(), exact[name].float(), atol=1e-6, rtol=0)
    assert found["grad_v"].isfinite().all()


def test_scores_far_below_zero(kernels):
    """L % 128 == 64 and a row's logsumexp below -88, where exp(score) is 0 in fp32."""
    q, k, v, grad_out = kernels.inputs(1, 1, 1, 192, 192, 16)
    found = kernels.check((q.abs() + 4, -(k.abs() + 6), v, grad_out), kernels.call(16))
    assert found["logsumexp"].max() < -88


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("Lq", [9, 40])
def test_blocked_and_huge_entries_of_a_bias(Lq, bias_dtype, dtype, kernels):
    """Rows shifted by a huge bias, as in TensorFlow's tutorial, keep their softmax; their logsumexp loses its
    digits."""
    lowest, Lk = torch.finfo(bias_dtype).min, kernels.lengths[1]
    bias = torch.randn(1, 2, Lq, Lk).to(bias_dtype)
    bias[:, 1, :, 30:] = max(-1e9, lowest)
    for row, number in ((3, -3000.0), (4, lowest), (5, max(-1e9, lowest)), (6, -math.inf), (7, -math.inf)):
        bias[:, :, row, : 30 if row == 6 else None] = number
    bias[..., 8] = -math.inf
    bias = (bias.double() if dtype == torch.float64 else bias).to(kernels.device)
    tensors = kernels.inputs(2, 2, 1, Lq, Lk, 16, dtype)
    found = kernels.check(tensors, kernels.call(16, bias=bias), received=False)
    assert not found["grad_bias"][bias == -math.inf].any()
    torch.testing.assert_close(found["weights"].sum(-1).float().cpu(), torch.ones(2, 2, Lq), rtol=0, atol=40 * 2**-8)


def test_same_bits_in_every_run_on_any_number_of_threads(dtype, kernels):
    for B, H, Hkv, Lq, Lk in kernels.repeated:
        tensors = kernels.inputs(B, H, Hkv, Lq, Lk, 20, dtype)
        bias, near = torch.randn(1, H, Lq, Lk), distances(kernels, (1, H), Lq, Lk).to(wide(dtype))
        for parts in (
            {"causal": Lk - Lq, "window": -50, "bias": bias.to(dtype)},
            mask_of("all", B, H, Lq, Lk),
            {"causal": Lk - Lq, "distance_bias": near, "softcap": 3.0} | documents("in order", B, Lq, Lk),
        ):
            run = functools.partial(kernels.outcome, tensors, kernels.call(20, parts, dropout_p=0.1))
            kernels.assert_same_bits(lambda: run().values())  # noqa: B023


def test_a_query_has_the_same_output_in_any_company(kernels):
    """A row of scores depends on neither the other queries nor the batch."""
    q, k, v, _ = kernels.inputs(3, 1, 1, 70, 60, 16)
    whole, call = kernels.forward(q, k, v, kernels.call(16)), kernels.call(16)
    assert torch.equal(whole[1:2, :, 16:48], kernels.forward(q[1:2, :, 16:48], k[1:2], v[1:2], call))
