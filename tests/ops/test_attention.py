"""``tfast.attention`` as users call it: every backend of this machine against the fp64 oracle, and the op itself."""

import math

import pytest
import torch
from helpers import assert_as_exact_as_eager, fixed_seed, mask_parts

import transformer_fast as tfast
from transformer_fast import AttentionMask, backends
from transformer_fast.reference.attention import attention as reference

MASKS = list(mask_parts(1, 1, 1, 1, torch.Generator()))


def normal_form(parts: dict) -> AttentionMask:
    names = {"keep": "keep_mask", "key_keep": "key_keep_mask", "lengths": "key_lengths"}
    names |= {"causal": "causal_offset", "window": "window_offset"}
    return AttentionMask(**{names[name]: part for name, part in parts.items()})


def to(parts: dict, device: torch.device) -> dict:
    return {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}


def inputs(B, H, Hkv, Lq, Lk, D, dtype, device, generator):
    shapes = (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def outcome(call, tensors, grad_out):
    """The output and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves)
    return (out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_mask_matches_the_oracle(mask, dropout_p, empty_rows, dtype, device):
    generator = torch.Generator().manual_seed(11)
    parts = to(mask_parts(2, 4, 17, 33, generator)[mask], device)
    *qkv, grad_out = inputs(2, 4, 2, 17, 33, 20, dtype, device, generator)
    options = {"scale": 1 / math.sqrt(20), "dropout_p": dropout_p, "empty_rows": empty_rows}
    with fixed_seed(5) as seed:
        actual = outcome(lambda *t: tfast.attention(*t, normal_form(parts), **options), qkv, grad_out)
    seed = seed.to(device)
    eager = outcome(lambda *t: reference(*t, **parts, **options, seed=seed)[0], qkv, grad_out)
    wide = [t.double() for t in qkv]
    exact = outcome(lambda *t: reference(*t, **parts, **options, seed=seed)[0], wide, grad_out)
    for name, a, e, x in zip(("out", "grad_q", "grad_k", "grad_v"), actual, eager, exact):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=8)


@pytest.mark.parametrize("lengths", [[2], [[2]], [[2], [3], [0]], [[2, 2, 2, 0]]])
def test_lengths_broadcast(lengths, device):
    q = torch.randn(3, 2, 4, 8, device=device)
    lengths = torch.tensor(lengths, device=device)
    expected = reference(q, q, q, lengths=lengths, scale=8**-0.5)[0]
    assert torch.allclose(tfast.attention(q, q, q, AttentionMask.lengths(lengths)), expected, atol=1e-5)


def test_opcheck():
    op = torch.ops.transformer_fast.attention.default
    seed = torch.tensor([3])
    q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    keep, lengths = torch.rand(2, 1, 5, 7) > 0.3, torch.tensor([7, 2], dtype=torch.int32)
    backend = backends.resolve("attention", q.device, q.dtype)
    torch.library.opcheck(op, (q, k, v, keep, None, lengths, None, 2, -3, 0.3, 0.1, seed, False, backend))
    transposed = (torch.randn(2, n, 3, 8, requires_grad=True).transpose(1, 2) for n in (5, 7, 7))
    torch.library.opcheck(op, (*transposed, *(None,) * 6, 0.3, 0.0, None, True, backend))
    out, logsumexp = op(q.detach(), k.detach(), v.detach(), *(None,) * 6, 0.3, 0.0, None, False, backend)
    ops, q, k, v = torch.ops.transformer_fast, q.detach(), k.detach(), v.detach()
    results = torch.randn_like(out), q, k, v, out, logsumexp
    mask, options = (keep, None, lengths), (2, -3, 0.3, 0.1, seed, False, backend)
    for grad_logsumexp in (None, torch.randn_like(logsumexp)):
        torch.library.opcheck(ops.attention_backward.default, (*results, grad_logsumexp, *mask, None, *options))
        bias = torch.randn(1, 3, 1, 7)
        torch.library.opcheck(ops.attention_grad_bias.default, (*results, grad_logsumexp, *mask, bias, *options))
    torch.library.opcheck(ops.attention_weights.default, (q, k, logsumexp, *mask, None, *options))


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
def test_gradcheck_in_double(empty_rows):
    q, k, v = (torch.randn(2, n, 3, 4, dtype=torch.float64).transpose(1, 2).requires_grad_() for n in (3, 5, 5))
    mask = AttentionMask.keep(torch.rand(2, 1, 3, 5) > 0.5) & AttentionMask.lengths(torch.tensor([5, 0]))
    with fixed_seed(1):
        assert torch.autograd.gradcheck(
            lambda q, k, v: tfast.attention(q, k, v, mask, dropout_p=0.2, empty_rows=empty_rows), (q, k, v)
        )


def test_a_second_derivative_is_refused_by_the_kernels_and_given_by_the_reference():
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    (grad,) = torch.autograd.grad(tfast.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    with tfast.backend("reference"):
        (grad,) = torch.autograd.grad(tfast.attention(q, k, v).square().sum(), q, create_graph=True)
        grad.sum().backward()
    assert q.grad.isfinite().all()


def test_manual_seed_governs_dropout(device):
    q = torch.randn(1, 2, 40, 8, device=device)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tfast.attention(q, q, q, dropout_p=0.3))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_weights_before_and_after_dropout(device):
    q, k, v = (torch.randn(2, 2, n, 8, device=device) for n in (5, 9, 9))
    mask = AttentionMask.lengths(torch.tensor([9, 4], device=device))
    with fixed_seed(4):
        out, dropped = tfast.attention(q, k, v, mask, dropout_p=0.5, return_weights="dropped")
        _, weights = tfast.attention(q, k, v, mask, dropout_p=0.5, return_weights=True)
        fused = tfast.attention(q, k, v, mask, dropout_p=0.5)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 2, 5, device=device), atol=1e-5)
    assert set(torch.unique(dropped == 0).tolist()) == {False, True}
    assert torch.allclose((dropped / weights)[dropped != 0], torch.tensor(2.0, device=device))
    assert torch.allclose(dropped @ v, out, atol=1e-5) and torch.allclose(out, fused, atol=1e-5)


def test_value_dim_may_differ(device):
    generator = torch.Generator().manual_seed(2)
    for D, Dv in ((8, 20), (20, 8)):
        q, k, _, _ = inputs(2, 3, 3, 5, 6, D, torch.float32, device, generator)
        _, _, v, grad_out = inputs(2, 3, 3, 5, 6, Dv, torch.float32, device, generator)
        actual = outcome(tfast.attention, (q, k, v), grad_out)
        exact = outcome(lambda *t, D=D: reference(*t, scale=D**-0.5)[0], (q.double(), k.double(), v.double()), grad_out)
        for a, x in zip(actual, exact):
            assert torch.allclose(a.double(), x, atol=1e-5)


def test_bias_is_added_and_gets_a_gradient(device):
    q, k, v = (torch.randn(2, 3, n, 8, device=device) for n in (5, 7, 7))
    bias = torch.randn(1, 3, 5, 7, device=device)
    expected = reference(q, k, v, bias=bias, scale=8**-0.5)[0]
    assert torch.allclose(tfast.attention(q, k, v, bias=bias), expected, atol=1e-5)
    bias.requires_grad_()
    (grad,) = torch.autograd.grad(tfast.attention(q, k, v, bias=bias).sum(), bias)
    (expected_grad,) = torch.autograd.grad(reference(q, k, v, bias=bias, scale=8**-0.5)[0].sum(), bias)
    assert torch.allclose(grad, expected_grad, atol=1e-6)


def test_autocast_runs_in_its_dtype(device):
    q, k, v = (torch.randn(2, 3, n, 8, device=device, requires_grad=True) for n in (5, 7, 7))
    with torch.autocast(device.type, torch.bfloat16):
        out = tfast.attention(q, k, v)
        mixed = tfast.attention(q, k.bfloat16(), v)
    assert out.dtype == mixed.dtype == torch.bfloat16
    expected = tfast.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(out, expected)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_sizes_of_zero(device):
    for B, Lq, Lk in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q = torch.randn(B, 2, Lq, 8, device=device, requires_grad=True)
        k = torch.randn(B, 2, Lk, 8, device=device, requires_grad=True)
        out = tfast.attention(q, k, k)
        assert out.shape == q.shape and torch.all(out == 0 if Lk == 0 else out.isfinite())
        out.sum().backward()
        assert torch.all(q.grad.isfinite()) and torch.all(k.grad.isfinite())


def test_compiles_without_a_graph_break():
    def step(q, k, v, lengths):
        return tfast.attention(q, k, v, AttentionMask.lengths(lengths), causal=True).square().sum()

    q, k, v = (torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3))
    lengths = torch.tensor([6, 3])
    expected = torch.autograd.grad(step(q, k, v, lengths), (q, k, v))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for grad, expected_grad in zip(torch.autograd.grad(compiled(q, k, v, lengths), (q, k, v)), expected):
        assert torch.allclose(grad, expected_grad, atol=1e-6)


def test_explain_names_the_path_and_the_reason():
    q = torch.randn(1, 2, 3, 4)
    text = tfast.explain(q, q, q, AttentionMask.lengths(torch.tensor([2])), causal=True, dropout_p=0.1)
    assert "lengths (1,) and causal with offset 0" in text and "dropout: 0.1" in text
    with tfast.backend("reference"):
        assert "backend: reference" in tfast.explain(q, q, q) and "asked for" in tfast.explain(q, q, q)
    assert "additive bias (1, 1, 3, 3)" in tfast.explain(q, q, q, bias=torch.zeros(3, 3))


def test_explain_counts_the_tiles_that_hold_work():
    """By hand, for tiles of 64 x 128: two batches of 4 x 2 tiles, one of which sees 130 keys and the other 10."""
    q, k = torch.zeros(2, 1, 256, 8), torch.zeros(2, 1, 256, 8)
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.lengths(torch.tensor([130, 10])))
    assert "work: 75.0% of 16 tiles of 64 queries x 128 keys hold any (4 full, 8 at an edge of the mask)" in text
    with tfast.backend("native"):
        text = tfast.explain(q, k, k, AttentionMask.window(40, right=None))
    assert "window with offset -40" in text
    # Of two batches each: the last 64 queries see no key below 152, and the first 128 all from 128 on.
    assert "work: 87.5% of 16 tiles of 64 queries x 128 keys hold any (4 full, 10 at an edge of the mask)" in text


def test_explain_and_the_call_refuse_alike():
    q = torch.randn(1, 2, 3, 257)
    with tfast.backend("triton"):
        for call in (tfast.explain, tfast.attention):
            with pytest.raises(tfast.BackendError, match="TRITON_INTERPRET=1"):
                call(q, q, q)
