"""The eager fast path on the CPU (csrc/ops/eager.h): the numbers of the dispatcher, and never where it must not go."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch
from helpers import fixed_seed
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import transformer_fast as tfast
from transformer_fast import extension, ops
from transformer_fast.ops import _eager, _seed

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def calls(dtype=torch.float32):
    """name -> (op of the leaves, leaves): every public function with the options that change its path."""
    torch.manual_seed(0)
    x, residual, weight, bias = leaf(3, 5, 24, dtype=dtype), leaf(3, 5, 24, dtype=dtype), leaf(24), leaf(24)
    vocabulary, table = leaf(11, 24, dtype=dtype), torch.randn(9, 24)
    ids = torch.randint(0, 11, (3, 5))
    q, k, v = (leaf(2, 4, length, 8, dtype=dtype) for length in (6, 7, 7))
    keep, padding = torch.rand(2, 1, 6, 7) > 0.3, tfast.AttentionMask.keep(torch.rand(2, 1, 1, 7) > 0.3)
    lengths, added = tfast.AttentionMask.lengths(torch.tensor([4, 0])), torch.randn(1, 4, 6, 7)
    return {
        "layer_norm": (lambda x, w, b: tfast.layer_norm(x, w, b), (x, weight, bias)),
        "std norm": (lambda x, w: tfast.layer_norm(x, w, None, 1e-6, kind="std"), (x, weight)),
        "rms norm": (lambda x, w: tfast.layer_norm(x, w, None, kind="rms"), (x, weight)),
        "residual rms norm": (
            lambda x, r, w: tfast.layer_norm(x, w, None, kind="rms", residual=r, dropout_p=0.3),
            (x, residual, weight),
        ),
        "norm alone": (lambda x: tfast.layer_norm(x, None, None), (x,)),
        "residual norm": (lambda x, r, w, b: tfast.layer_norm(x, w, b, residual=r), (x, residual, weight, bias)),
        "residual dropout norm": (
            lambda x, r, w, b: tfast.layer_norm(x, w, b, residual=r, dropout_p=0.3),
            (x, residual, weight, bias),
        ),
        "dropout": (lambda x: ops.dropout(x, 0.3), (x,)),
        "relu dropout": (lambda x: ops.dropout(x, 0.3, relu=True), (x,)),
        "bias relu dropout": (lambda x, b: ops.dropout(x, 0.3, bias=b, relu=True), (x, bias)),
        "residual dropout": (lambda x, r: ops.dropout(x, 0.3, residual=r), (x, residual)),
        "linear_cross_entropy": (
            lambda x, w, b: tfast.linear_cross_entropy(x, w, b, ids, label_smoothing=0.1, ignore_index=3),
            (x, vocabulary, leaf(11, dtype=dtype)),
        ),
        "linear_cross_entropy, sum": (
            lambda x, w: tfast.linear_cross_entropy(x, w, None, ids, reduction="sum"),
            (x, vocabulary),
        ),
        "embed": (lambda w: tfast.embed(ids, w, table, scale=3.0, offset=2, padding_idx=-1), (vocabulary,)),
        "embed at offsets": (lambda w: tfast.embed(ids, w, table, offset=torch.tensor([0, 4, 2])), (vocabulary,)),
        "embed dropout": (lambda w: tfast.embed(ids.int(), w, dropout_p=0.3), (vocabulary,)),
        "add_positional": (lambda x: ops.add_positional(x, table, 2), (x,)),
        "add_positional at offsets": (lambda x: ops.add_positional(x, table, torch.arange(3), 0.3), (x,)),
        "add_positional dropout": (lambda x: ops.add_positional(x, table, 0, 0.3), (x,)),
        "attention": (lambda q, k, v: tfast.attention(q, k, v), (q, k, v)),
        "attention dropout": (
            lambda q, k, v: tfast.attention(q, k, v, lengths & padding, causal=1, dropout_p=0.3),
            (q, k, v),
        ),
        "attention masks": (
            lambda q, k, v: tfast.attention(q, k, v, keep, bias=added, scale=0.2, empty_rows="zero"),
            (q, k, v),
        ),
        "attention learned bias": (
            lambda q, k, v, b: tfast.attention(q, k, v, lengths, bias=b),
            (q, k, v, leaf(1, 4, 6, 7, dtype=dtype)),
        ),
        "attention learned bias of keys, dropout": (
            lambda q, k, v, b: tfast.attention(q, k, v, bias=b, dropout_p=0.2),
            (q, k, v, leaf(2, 1, 1, 7)),
        ),
        "attention learned bias, few queries": (
            lambda q, k, v, b: tfast.attention(q[:, :, :2], k, v, bias=b),
            (q, k, v, leaf(2, 4, 2, 7)),
        ),
    }


def decode_calls(dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8).to(dtype) for heads, length in ((4, 3), (2, 12), (2, 12)))
    pages = [t.view(2, 2, 3, 4, 8).permute(0, 2, 3, 1, 4).reshape(6, 4, 2, 8).contiguous() for t in (k, v)]
    table = torch.tensor([[0, 1, 2], [3, 4, 99]], dtype=torch.int32)  # the last page holds no key
    lengths = torch.tensor([12, 7])
    return {
        "cache": lambda: tfast.attention_decode(q, k, v, lengths),
        "all keys, int32": lambda: tfast.attention_decode(q, k, v, lengths.int(), causal=False, scale=0.3),
        "pages": lambda: tfast.attention_decode(q, *pages, lengths, page_table=table),
        "nothing": lambda: tfast.attention_decode(q[:0], k[:0], v[:0], lengths[:0]),
    }


def outcome(op, leaves):
    """Results and gradients."""
    with fixed_seed(5):
        results = op(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    grads = torch.autograd.grad(results, leaves, [torch.cos(r.detach().float()).to(r.dtype) for r in results])
    return (*results, *grads)


@pytest.fixture
def fast_calls():
    """Counts the calls that took the fast path; one that did not fails."""
    taken = []

    class Watch:
        def __getattr__(self, name):
            def call(*args):
                result = getattr(extension.module(), name)(*args)
                assert result is not None, f"{name} declined"
                taken.append(name)
                return result

            return call

    with mock.patch.multiple(_eager, native=Watch, fast_path=lambda op, q: (Watch(), False)):
        yield taken


def by_dispatcher():
    return mock.patch.multiple(_eager, native=lambda: None, fast_path=lambda op, q: (None, False))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", calls())
def test_it_is_taken_and_agrees_bit_for_bit(name, dtype, fast_calls):
    op, leaves = calls(dtype)[name]
    short = outcome(op, leaves)
    assert len(fast_calls) == 1
    with by_dispatcher():
        long = outcome(op, leaves)
    for ours, other in zip(short, long, strict=True):
        assert ours.dtype == other.dtype and ours.stride() == other.stride()
        assert torch.equal(ours, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", decode_calls())
def test_decoding_is_taken_and_agrees_bit_for_bit(name, dtype, fast_calls):
    call = decode_calls(dtype)[name]
    short = call()
    assert fast_calls == ["attention_decode"]
    with by_dispatcher():
        assert torch.equal(short, call())


@pytest.mark.parametrize("name", calls())
def test_without_gradients(name, fast_calls):
    op, leaves = calls()[name]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, fixed_seed(5):
            results = op(*leaves)
        with fixed_seed(5):
            recorded = op(*leaves)
        results, recorded = (r if isinstance(r, tuple) else (r,) for r in (results, recorded))
        for result, other in zip(results, recorded, strict=True):
            assert not result.requires_grad and other.requires_grad and torch.equal(result, other)


@pytest.mark.parametrize("name", [name for name in calls() if "add_positional" not in name])  # linear: it can be
def test_a_recorded_backward_is_computed_and_cannot_be_differentiated(name, fast_calls):
    op, leaves = calls()[name]
    with fixed_seed(5):
        results = op(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    grads = [torch.randn_like(r).requires_grad_() for r in results]
    recorded = torch.autograd.grad(results, leaves, grads, create_graph=True)
    for gradient, plain in zip(recorded, torch.autograd.grad(op_again(op, leaves), leaves, grads), strict=True):
        assert torch.equal(gradient, plain)
    with pytest.raises(RuntimeError, match=r'no second derivative.*backend\("reference"\)'):
        recorded[0].sum().backward()


def op_again(op, leaves):
    with fixed_seed(5):
        return op(*leaves)


@pytest.mark.parametrize("frozen", range(4))
def test_gradients_only_where_they_are_needed(frozen, fast_calls):
    op, leaves = calls()["residual dropout norm"]
    leaves[frozen].requires_grad_(False)
    needed = [t for t in leaves if t.requires_grad]
    with fixed_seed(5):
        grads = torch.autograd.grad(op(*leaves)[0].sum(), needed)
    with by_dispatcher(), fixed_seed(5):
        for ours, other in zip(grads, torch.autograd.grad(op(*leaves)[0].sum(), needed), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_is_used(used, fast_calls):
    op, leaves = calls()["residual dropout norm"]
    with fixed_seed(5):
        grads = torch.autograd.grad(op(*leaves)[used].sum(), leaves, allow_unused=True, materialize_grads=True)
    with by_dispatcher(), fixed_seed(5):
        others = torch.autograd.grad(op(*leaves)[used].sum(), leaves, allow_unused=True, materialize_grads=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_changing_what_was_saved_is_noticed(fast_calls):
    q, k, v = calls()["attention"][1]
    keep = torch.ones(2, 1, 6, 7, dtype=torch.bool)
    out = tfast.attention(q, k, v, keep)
    keep[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensor_hooks_see_what_is_saved(fast_calls):
    x = leaf(3, 8)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        tfast.layer_norm(x, None, None).sum().backward()
    assert any(t.data_ptr() == x.data_ptr() for t in packed)


def test_a_graph_is_used_once_and_freed_with_its_results(fast_calls):
    """What is saved is let go by a backward that does not keep it, and by dropping the results; an output that is saved
    does not keep itself."""
    x, residual, weight, bias = leaves = calls()["residual dropout norm"][1]

    def held():  # by views of the weight that only a graph knows
        return torch._C._storage_Use_Count(weight.untyped_storage()._cdata)

    def results():
        return tfast.layer_norm(x, weight.view(-1), bias, residual=residual)

    before = held()
    out, summed = results()
    assert held() > before
    torch.autograd.grad(out.sum(), leaves)
    assert held() == before
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), leaves)
    out, summed = results()
    assert held() > before
    del out, summed
    assert held() == before


def test_a_long_chain_is_freed_without_recursion(fast_calls):
    x = leaf(1, 2)
    for _ in range(100_000):
        x = tfast.layer_norm(x, None, None)
    del x


class Subclass(torch.Tensor):
    pass


def test_what_somebody_watches_is_declined():
    x = torch.randn(3, 8)
    decline = [x.as_subclass(Subclass), torch.randn(3, 8, device="meta"), x.to_sparse(), x.int(), None, [1.0]]
    native = extension.module()
    for argument in decline:
        assert native.layer_norm(argument, None, None, 1e-5, "layer", None, 0.0, None) is None
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert native.layer_norm(x, None, None, 1e-5, "layer", None, 0.0, None) is None
    with torch.device("meta"):  # a mode of torch functions
        assert native.layer_norm(x, None, None, 1e-5, "layer", None, 0.0, None) is None
    seen = []
    torch.vmap(lambda row: seen.append(native.layer_norm(row, None, None, 1e-5, "layer", None, 0.0, None)) or row)(x)
    assert seen == [None]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert native.layer_norm(dual, None, None, 1e-5, "layer", None, 0.0, None) is None
    assert native.layer_norm(x, None, None, 1e-5, "layer", None, 0.0, None) is not None


def test_autocast_casts_attention_all_the_same():
    q = leaf(1, 2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert tfast.attention(q, q, q).dtype == torch.bfloat16


@pytest.mark.parametrize("name", calls())
def test_another_backend_is_honoured(name):
    op, leaves = calls()[name]
    with tfast.backend("reference"), mock.patch.object(extension, "module", side_effect=AssertionError("taken")):
        seed = torch.tensor([5])
        with mock.patch.object(_seed, "draw_seed", lambda _: seed):
            op(*leaves)


def test_the_seed_is_the_number_torch_draws():
    torch.manual_seed(11)
    ours = [_seed.draw_seed(torch.device("cpu")) for _ in range(3)]
    after = torch.rand(1)
    torch.manual_seed(11)
    assert ours == [torch.randint(-(2**63), 2**63 - 1, (1,)) for _ in range(3)]
    assert torch.equal(after, torch.rand(1))


def test_a_first_call_in_inference_mode_does_not_close_the_way():
    """What a plain tensor is was once decided by the first call, and there inference tensors have fewer keys."""
    program = """
import torch
from transformer_fast import extension
_C = extension.module()
x = torch.ones(2, 8)
with torch.inference_mode():
    assert _C.layer_norm(x, None, None, 1e-5, "layer", None, 0.0, None) is not None
assert _C.layer_norm(x, torch.nn.Parameter(torch.ones(8)), None, 1e-5, "layer", None, 0.0, None) is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True)
