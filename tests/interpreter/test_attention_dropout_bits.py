"""Dropout bits that the forward keeps for the backward: the reference's mask, and the gradients of drawing again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton import configs
from transformer_fast.triton.attention.backward import attention_backward
from transformer_fast.triton.attention.forward import attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered")

OPS = torch.ops.transformer_fast
B, H, LQ, LK, D = 1, 2, 140, 150, 64


@pytest.fixture(autouse=True)
def short_calls_are_long(monkeypatch):
    """Let short calls keep bits too; tiles are those of keeping, so that sums have one order."""
    monkeypatch.setattr("transformer_fast.triton.attention.launches.LONG", 64)
    for key in configs.ATTENTION:
        if key[2:4] == (16, 64) and key[4] in ("long", "packed long"):
            monkeypatch.setitem(configs.ATTENTION, key, configs.ATTENTION[*key[:4], "kept"])


def call_of(device: torch.device, p: float = 0.3, **options) -> tuple[tuple[torch.Tensor, ...], AttentionParams]:
    """Return (q, k, v, gradient of out) with two key heads, and the dropout arguments."""
    generator = torch.Generator().manual_seed(5)
    shapes = (B, H, LQ, D), (B, H // 2, LK, D), (B, H // 2, LK, D), (B, H, LQ, D)
    tensors = tuple(torch.randn(shape, generator=generator).to(device, torch.float16) for shape in shapes)
    seed = torch.tensor([2**40 + 7], device=device)
    return tensors, AttentionParams(scale=D**-0.5, dropout_p=p, seed=seed, **options)


def trained(tensors: tuple[torch.Tensor, ...], call: AttentionParams, keep: bool) -> tuple[torch.Tensor, ...]:
    """Return (out, gradients of q, k and v), and the bits."""
    *qkv, grad = tensors
    out, logsumexp, dropout_bits = attention_forward(*qkv, call, None if keep else 0)
    assert (dropout_bits is not None) == keep
    return out, *attention_backward(grad, *qkv, out, logsumexp, call, None, dropout_bits)[:3], dropout_bits


def unpacked(dropout_bits: torch.Tensor) -> torch.Tensor:
    """Return the bits as bool (B, H, LQ, LK), by the layout in the module's documentation."""
    i, j = torch.arange(LQ, device=dropout_bits.device)[:, None], torch.arange(LK, device=dropout_bits.device)
    lane = i % 8 * 4 + j // 2 % 4
    bit = i // 8 % 2 * 16 + j // 32 % 2 * 8 + j // 8 % 4 * 2 + j % 2
    words = dropout_bits.view(B * H, -1, 2 * -(-LK // 128), 8, 32)
    return (words[:, i // 128, j // 64, i // 16 % 8, lane] >> bit & 1 == 1).unflatten(0, (B, H))


@pytest.mark.cover(2)
@pytest.mark.parametrize("p", [0.1, 0.3, 0.9999])
def test_bits_are_those_of_the_reference(device, p):
    tensors, call = call_of(device, p)
    dropout_bits = attention_forward(*tensors[:3], call, None)[2]
    assert torch.equal(unpacked(dropout_bits), reference.dropout.attention_keep(call.seed, p, B, H, LQ, LK))


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradients_are_those_of_drawing(device, empty_rows):
    """Bit for bit, with tiles at the edge, tiles that no query sees, and queries without keys."""
    lengths = torch.tensor([101], dtype=torch.int32, device=device)
    tensors, call = call_of(device, lengths=lengths, causal=-3, zero_empty_rows=empty_rows == "zero")
    *kept, _ = trained(tensors, call, keep=True)
    *drawn, _ = trained(tensors, call, keep=False)
    assert all(torch.equal(*pair) for pair in zip(kept, drawn, strict=True))
    assert not torch.isnan(torch.stack(kept[:1])).any() and kept[3].any()


def test_the_backward_reads_them(device):
    """With all bits cleared no gradient reaches the values; with all bits set gradients differ from those of
    drawing."""
    (q, k, v, grad), call = call_of(device)
    out, logsumexp, dropout_bits = attention_forward(q, k, v, call, None)
    _, _, grad_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call, None, torch.zeros_like(dropout_bits))
    assert not grad_v.any()
    ones = torch.full_like(dropout_bits, -1)
    grad_q, _, grad_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call, None, ones)
    drawn_q, _, drawn_v, *_ = attention_backward(grad, q, k, v, out, logsumexp, call)
    assert not torch.equal(grad_q, drawn_q) and not torch.equal(grad_v, drawn_v)


@pytest.mark.parametrize("causal", [None, 0])
def test_a_packed_batch_is_that_of_its_sequences(device, causal):
    """Bits of sequences of other lengths than the longest, of an empty one, and of one that begins within a block:
    the same mask, and the gradients of drawing again, bit for bit."""
    lengths = [140, 0, 33, 130, 1]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(6)
    shapes = (304, H, D), (304, H // 2, D), (304, H // 2, D), (304, H, D)
    tensors = tuple(torch.randn(shape, generator=generator).to(device, torch.float16) for shape in shapes)
    call = AttentionParams(
        scale=D**-0.5, dropout_p=0.3, seed=torch.tensor([2**40 + 7], device=device), causal=causal,
        packed=PackedBatch(starts, starts, 140, 140),
    )  # fmt: skip
    *kept, bits = trained(tensors, call, keep=True)
    *drawn, _ = trained(tensors, call, keep=False)
    assert all(torch.equal(*pair) for pair in zip(kept, drawn, strict=True)) and kept[3].any()
    assert bits.shape == (H * (304 // 128 + 5) * 4 * 8 * 32,)
    results = attention_forward(*tensors[:3], call)[:2]
    _, _, grad_v, *_ = attention_backward(tensors[3], *tensors[:3], *results, call, None, torch.zeros_like(bits))
    assert not grad_v.any()


def op_call(device: torch.device, packed: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return (q, k, v, gradient of out), and the op's other arguments; tiles of a padded batch are skipped."""
    tensors, call = call_of(device, causal=0)
    if not packed:
        return tensors, call.keywords()
    starts_q, starts_k = (torch.tensor([0, 100, n], dtype=torch.int32, device=device) for n in (LQ, LK))
    call = replace(call, causal=None, packed=PackedBatch(starts_q, starts_k, 100, 100))
    return tuple(t[0].transpose(0, 1).contiguous() for t in tensors), call.keywords()


@pytest.mark.parametrize("packed", [False, True])
def test_the_op_under_torchs_checks(device, packed, monkeypatch):
    """Words that the forward does not write, here new ones in each call, must reach no result."""
    (q, k, v, _), options = op_call(device, packed)
    fills, empty = itertools.count(), torch.empty

    def words(*size: Any, **keywords: Any) -> torch.Tensor:
        found = empty(*size, **keywords)
        return found.fill_(next(fills)) if keywords.get("dtype") == torch.int32 else found

    monkeypatch.setattr("transformer_fast.triton.attention.dropout_bits.torch.empty", words)
    with tfast.backend("triton"):
        torch.library.opcheck(OPS.attention, [t.requires_grad_() for t in (q, k, v)], options)


@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_number_of_words_raises(device, packed):
    """Kernels would read and write past the end of fewer words."""
    (q, k, v, grad), options = op_call(device, packed)
    with tfast.backend("triton"):
        with pytest.raises(ValueError, match=r"dropout_words must be \d+ words, .* or none, got 7;"):
            OPS.attention(q, k, v, 7, **options)
        out, logsumexp, bits = OPS.attention(q, k, v, **options)
        assert bits.shape == (0,)
        results = out, logsumexp, None, torch.zeros(7, dtype=torch.int32, device=device), [True] * 3 + [False] * 3
        with pytest.raises(ValueError, match=r"dropout_bits must be \d+ words, .* or none, got 7;"):
            OPS.attention_backward(grad, q, k, v, *results, **options)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_graph_keeps_them(device, packed, dynamic, monkeypatch):
    """The forward of a graph gives its backward the bits: the gradients are those of an eager call, bit for bit. The
    graph keeps the number of words that it was made with, whatever share of the memory they may take later."""
    (q, k, v, grad), options = op_call(device, packed)
    graphs: list[torch.fx.Node] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.extend(node for node in graph.graph.nodes if "transformer_fast.attention" in str(node.target))
        return make_boxed_func(graph)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return OPS.attention(q, k, v, **options)[0]

    def outcome(attend: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=dynamic)
    with tfast.backend("triton"):
        eager = outcome(attend)
        assert all(map(torch.equal, outcome(compiled), eager))
        monkeypatch.setitem(configs.DROPOUT_BITS, "share", 0)
        assert all(map(torch.equal, outcome(compiled), eager))
    forward, backward = graphs
    assert forward.args[3] != 0 and backward.args[7] is not None  # dropout_words and dropout_bits


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_of_any_sizes_keeps_all_of_them(device, packed, monkeypatch):
    """A share without bound, with sizes that are symbols."""
    monkeypatch.setitem(configs.DROPOUT_BITS, "share", math.inf)
    test_a_compiled_graph_keeps_them(device, packed, True, monkeypatch)


def test_a_graph_whose_number_of_sequences_depends_on_data_keeps_none(device, monkeypatch):
    """The boundaries come from positions, so nobody knows the number of blocks when the graph is made."""
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(160, 1, D, generator=generator).to(device, torch.float16) for _ in range(3))
    seed = torch.tensor([2**40 + 7], device=device)
    positions = torch.cat([torch.arange(100), torch.arange(60)]).to(device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        starts = torch.cat([(positions == 0).nonzero().flatten(), positions.new_full((1,), 160)]).int()
        sequences = PackedBatch(starts, starts, 100, 100)
        options = AttentionParams(scale=0.1, dropout_p=0.3, seed=seed, packed=sequences).keywords()
        return OPS.attention(q, k, v, **options)[0]

    def outcome(attend: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out.float().sum(), leaves)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with tfast.backend("triton"):
        for ours, eager in zip(outcome(compiled), outcome(attend), strict=True):
            assert torch.equal(ours, eager)
