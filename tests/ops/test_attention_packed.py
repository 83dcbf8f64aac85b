"""``tfast.attention_packed`` as users call it, and its oracle against the padded one."""

import math

import pytest
import torch
from helpers import assert_as_exact_as_eager, fixed_seed

import transformer_fast as tfast
from transformer_fast import AttentionMask, backends
from transformer_fast.packing import packing_of, take
from transformer_fast.reference.attention import attention as padded_reference
from transformer_fast.reference.attention import attention_packed as reference

LENGTHS_Q, LENGTHS_K = torch.tensor([7, 0, 3, 17, 1]), torch.tensor([7, 4, 0, 33, 1])
H, HKV, D = 4, 2, 20
SCALE = 1 / math.sqrt(D)


def batch(self_attention, dtype=torch.float64, device="cpu"):
    """A padded batch (q, k, v, grad_out, each (B, L, heads, D)) and how its queries and keys are packed."""
    generator = torch.Generator().manual_seed(3)
    lengths_k = LENGTHS_Q if self_attention else LENGTHS_K
    packings = [packing_of(n, len(n), int(n.max()), device) for n in (LENGTHS_Q, lengths_k)]
    queries, keys = packings
    shapes = [(5, queries.length, H, D), *[(5, keys.length, HKV, D)] * 2, (5, queries.length, H, D)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes], *packings


def options(queries, keys):
    return {
        "cu_seqlens_q": queries.cu_seqlens,
        "cu_seqlens_k": keys.cu_seqlens,
        "max_q": queries.max_length,
        "max_k": keys.max_length,
    }


# Causal and window offsets. Those of the last one leave queries without keys in sequences that have some.
BOUNDS = [(None, None), (0, None), (1, -2), (None, 0), (5, 4)]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("self_attention", [False, True])
def test_the_oracle_is_the_padded_one_without_its_padding(self_attention, causal, window, dropout_p):
    (q, k, v, grad), queries, keys = batch(self_attention)
    seed = torch.tensor([11])
    same = {"scale": SCALE, "dropout_p": dropout_p, "seed": seed}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, _, logsumexp = padded_reference(
        *(t.transpose(1, 2) for t in leaves),
        lengths=keys.cu_seqlens.diff(),
        causal=causal,
        window=window,
        empty_rows="zero",
        **same,
    )
    expected = take(out.transpose(1, 2), queries)
    grads = torch.autograd.grad(expected, leaves, take(grad, queries))

    tokens = [take(t, packing) for t, packing in zip(leaves, (queries, keys, keys))]
    same |= {"causal": causal, "window": window, "zero_empty_rows": True}
    packed, packed_logsumexp = reference(*tokens, **options(queries, keys), **same)
    assert torch.allclose(packed, expected, atol=1e-12)
    assert torch.allclose(packed_logsumexp.t(), take(logsumexp.transpose(1, 2), queries), atol=1e-12)
    for actual, truth in zip(torch.autograd.grad(packed, leaves, take(grad, queries)), grads):
        assert torch.allclose(actual, truth, atol=1e-12)


def outcome(call, tensors, grad_out):
    """The output and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves)
    return (out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))


def packed_batch(self_attention, dtype, device):
    tensors, queries, keys = batch(self_attention, dtype, device)
    packings = (queries, keys, keys, queries)
    return [take(t, packing) for t, packing in zip(tensors, packings)], options(queries, keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize(("causal", "window"), BOUNDS)
@pytest.mark.parametrize("self_attention", [False, True])
def test_the_public_op_matches_the_oracle(self_attention, causal, window, empty_rows, dropout_p, dtype, device):
    (*qkv, grad_out), sequences = packed_batch(self_attention, dtype, device)
    mask = AttentionMask(causal_offset=causal, window_offset=window)
    options = {"mask": mask, "dropout_p": dropout_p, "empty_rows": empty_rows}
    with fixed_seed(5) as seed:
        actual = outcome(lambda *t: tfast.attention_packed(*t, **sequences, **options), qkv, grad_out)
    same = {**sequences, "causal": causal, "window": window, "dropout_p": dropout_p}
    same |= {"scale": SCALE, "seed": seed.to(device), "zero_empty_rows": empty_rows == "zero"}
    eager = outcome(lambda *t: reference(*t, **same)[0], qkv, grad_out)
    exact = outcome(lambda *t: reference(*t, **same)[0], [t.double() for t in qkv], grad_out)
    for name, a, e, x in zip(("out", "grad_q", "grad_k", "grad_v"), actual, eager, exact):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=8)


def test_the_mask_of_dropout_is_the_padded_one_and_lengths_are_looked_up(device):
    (q, k, v, _), queries, keys = batch(True, torch.float32, device)
    lengths = AttentionMask.lengths(keys.cu_seqlens.diff())
    with fixed_seed(9):
        padded = tfast.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), lengths, causal=True, dropout_p=0.5, empty_rows="zero"
        )
        tokens = [take(t, packing) for t, packing in zip((q, k, v), (queries, keys, keys))]
        packed = tfast.attention_packed(*tokens, queries.cu_seqlens, keys.cu_seqlens, causal=True, dropout_p=0.5)
    assert torch.allclose(packed, take(padded.transpose(1, 2), queries), atol=1e-6)


def test_strided_inputs_and_another_value_dim(device):
    (q, k, _, grad), sequences = packed_batch(False, torch.float32, device)
    v = torch.randn(k.shape[0], 2 * HKV, 12, device=device)[:, ::2]
    wide = torch.randn(q.shape[0], D, H, device=device)
    tensors, grad = (wide.transpose(1, 2), k.repeat(1, 1, 2)[..., D:], v), grad[:, :1, :12].expand(-1, H, -1)
    actual = outcome(lambda *t: tfast.attention_packed(*t, **sequences), tensors, grad)
    exact = outcome(lambda *t: reference(*t, **sequences, scale=SCALE)[0], [t.double() for t in tensors], grad)
    for a, x in zip(actual, exact):
        assert a.shape == x.shape and torch.allclose(a.double(), x, atol=1e-5)


def test_two_runs_agree_bit_for_bit(device):
    (*qkv, grad_out), sequences = packed_batch(True, torch.float32, device)
    with fixed_seed(5):
        runs = [
            outcome(lambda *t: tfast.attention_packed(*t, **sequences, causal=True, dropout_p=0.3), qkv, grad_out)
            for _ in range(2)
        ]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.parametrize("lengths", [[], [0, 0], [3]])
def test_few_sequences(lengths, device):
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q = torch.randn(sum(lengths), 2, 8, device=device, requires_grad=True)
    out = tfast.attention_packed(q, q, q, cu_seqlens, cu_seqlens)
    assert out.shape == q.shape and out.isfinite().all()
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_logsumexp_and_its_gradient_are_those_of_a_padded_batch(device, backend):
    """With dropout too: beside it the logsumexp is what it is without."""
    lengths = torch.tensor([5, 1, 3], device=device)
    packing = tfast.packing.packing_of(lengths, 3, 5, device)
    padded = [torch.randn(3, 5, 2, 8, device=device, requires_grad=True) for _ in range(3)]
    mask = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.causal()
    with tfast.backend(backend), fixed_seed(4):
        tokens = [tfast.packing.take(t, packing) for t in padded]
        cu = packing.cu_seqlens
        out, logsumexp = tfast.attention_packed(*tokens, cu, cu, causal=True, dropout_p=0.2, return_logsumexp=True)
        q, k, v = (t.transpose(1, 2) for t in padded)
        expected, rows = tfast.attention(q, k, v, mask, dropout_p=0.2, return_logsumexp=True)
    expected = tfast.packing.take(expected.transpose(1, 2), packing)
    rows = tfast.packing.take(rows.transpose(1, 2), packing).T
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logsumexp, rows, atol=1e-5, rtol=1e-5)
    weigh = torch.randn_like(rows)
    # The logsumexp alone, and together with the output.
    for loss, same in (
        ((logsumexp * weigh).sum(), (rows * weigh).sum()),
        ((logsumexp * weigh).sum() + out.sum(), (rows * weigh).sum() + expected.sum()),
    ):
        ours = torch.autograd.grad(loss, padded, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(same, padded, retain_graph=True, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            a, b = (torch.zeros_like(padded[0]) if t is None else t for t in (a, b))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradcheck_in_double():
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]).int(), torch.tensor([0, 3, 4, 4]).int()
    q, k, v = (torch.randn(n, 2, 4, dtype=torch.float64, requires_grad=True) for n in (5, 4, 4))
    with fixed_seed(1):
        assert torch.autograd.gradcheck(
            lambda q, k, v: tfast.attention_packed(q, k, v, cu_q, cu_k, causal=True, dropout_p=0.2), (q, k, v)
        )


def test_opcheck():
    op, backward = torch.ops.transformer_fast.attention_packed, torch.ops.transformer_fast.attention_packed_backward
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (5, 4, 4))
    cu_q, cu_k = torch.tensor([0, 2, 2, 5]).int(), torch.tensor([0, 3, 4, 4]).int()
    backend = backends.resolve("attention", q.device, q.dtype)
    tail = (cu_q, cu_k, 3, 3, 0, -1, 0.3, 0.1, torch.tensor([3]), False, backend)
    torch.library.opcheck(op.default, (q, k, v, *tail))
    q, k, v = (t.detach() for t in (q, k, v))
    out, logsumexp = op(q, k, v, *tail)
    for grad_logsumexp in (None, torch.randn_like(logsumexp)):
        args = torch.randn_like(out), q, k, v, out, logsumexp, grad_logsumexp
        torch.library.opcheck(backward.default, (*args, *tail))


def test_a_second_derivative_is_refused_by_the_kernels_and_given_by_the_reference():
    cu = torch.tensor([0, 2, 5]).int()
    q = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(tfast.attention_packed(q, q, q, cu, cu).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    with tfast.backend("reference"):
        (grad,) = torch.autograd.grad(tfast.attention_packed(q, q, q, cu, cu).square().sum(), q, create_graph=True)
        grad.sum().backward()
    assert q.grad.isfinite().all()


def test_autocast_and_compile(device):
    (q, k, v, _), sequences = packed_batch(True, torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        out = tfast.attention_packed(q, k, v, **sequences)
    assert torch.equal(out, tfast.attention_packed(q.bfloat16(), k.bfloat16(), v.bfloat16(), **sequences))

    def step(q):
        return tfast.attention_packed(q, k, v, **sequences, causal=True).square().sum()

    q.requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for grad in zip(torch.autograd.grad(compiled(q), q), torch.autograd.grad(step(q), q)):
        assert torch.allclose(*grad, atol=1e-6)


def test_triton_says_how_wide_a_head_may_be(device):
    q, cu = torch.randn(2, 1, 257, device=device), torch.tensor([0, 2], device=device).int()
    if device.type == "cuda":
        with pytest.raises(ValueError, match=r"head_dim up to 256.*\(2, 1, 257\)"):
            tfast.attention_packed(q, q, q, cu, cu)
    else:
        assert tfast.attention_packed(q, q, q, cu, cu).shape == q.shape


def cu(*starts: int) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


Q, K = torch.randn(5, 4, 8), torch.randn(7, 2, 8)
CU_Q, CU_K = cu(0, 2, 5), cu(0, 3, 7)
WRONG = {
    "q is not a tensor": (([1.0], K, K, CU_Q, CU_K), {}, TypeError, "q must be a tensor, got list"),
    "q is padded": ((Q[None], K, K, CU_Q, CU_K), {}, ValueError, r"q must be \(tokens.*\(1, 5, 4, 8\)"),
    "q is integer": ((Q.long(), K, K, CU_Q, CU_K), {}, TypeError, "float tensor, got torch.int64"),
    "dtypes differ": ((Q, K.half(), K, CU_Q, CU_K), {}, TypeError, "share a dtype.*float32.*float16"),
    "devices differ": ((Q, K.to("meta"), K, CU_Q, CU_K), {}, ValueError, "one device, got cpu, meta, cpu"),
    "head_dims differ": ((Q, K[..., :6], K, CU_Q, CU_K), {}, ValueError, r"head_dim.*4, 8\).*2, 6\)"),
    "tokens of k and v differ": ((Q, K, K[:6], CU_Q, CU_K), {}, ValueError, r"k and v.*\(7, 2, 8\).*\(6, 2, 8\)"),
    "heads do not divide": ((Q[:, :3], K, K, CU_Q, CU_K), {}, ValueError, "multiple of those of k and v"),
    "cu_seqlens is a list": ((Q, K, K, [0, 2, 5], CU_K), {}, TypeError, "cu_seqlens_q must be an int32.*got list"),
    "cu_seqlens is int64": ((Q, K, K, CU_Q, CU_K.long()), {}, TypeError, "cu_seqlens_k .* int32.*torch.int64"),
    "cu_seqlens of two dimensions": ((Q, K, K, CU_Q[None], CU_K), {}, ValueError, r"got shape \(1, 3\)"),
    "cu_seqlens is empty": ((Q, K, K, CU_Q[:0], CU_K), {}, ValueError, r"got shape \(0,\)"),
    "cu_seqlens on another device": ((Q, K, K, CU_Q.to("meta"), CU_K), {}, ValueError, "q is on cpu but.*_q on meta"),
    "cu_seqlens does not rise": (
        (Q, K, K, cu(0, 6, 5), CU_K),
        {},
        ValueError,
        r"cu_seqlens_q must rise from 0 to 5.*\(5, 4, 8\), got \[0, 6, 5\]",
    ),
    "cu_seqlens starts late": ((Q, K, K, CU_Q, cu(1, 3, 7)), {}, ValueError, r"from 0 to 7.*\[1, 3, 7\]"),
    "cu_seqlens ends early": ((Q, K, K, CU_Q, cu(0, 3, 6)), {}, ValueError, r"from 0 to 7.*\[0, 3, 6\]"),
    "numbers of sequences differ": ((Q, K, K, CU_Q, cu(0, 7)), {}, ValueError, r"\(3,\) and \(2,\)"),
    "max_k too small": ((Q, K, K, CU_Q, CU_K), {"max_k": 3}, ValueError, "max_k is 3, but a sequence of k has 4"),
    "dropout above 1": ((Q, K, K, CU_Q, CU_K), {"dropout_p": 1.5}, ValueError, r"dropout_p.*\[0, 1\], got 1.5"),
    "unknown empty_rows": ((Q, K, K, CU_Q, CU_K), {"empty_rows": "nan"}, ValueError, '"zero", got \'nan\''),
    "causal with an offset": ((Q, K, K, CU_Q, CU_K), {"causal": 2}, TypeError, "True or False, got 2"),
    "a mask that is a tensor": (
        (Q, K, K, CU_Q, CU_K), {"mask": torch.ones(3) > 0}, TypeError, "must be an AttentionMask, got Tensor",
    ),
    "a mask with padding": (
        (Q, K, K, CU_Q, CU_K), {"mask": AttentionMask.lengths(torch.tensor([1]))}, ValueError,
        "window, causal, documents, alibi and relative alone, got key_lengths",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    arguments, more, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        tfast.attention_packed(*arguments, **more)
