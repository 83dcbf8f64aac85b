"""Doors of the ops on the CPU (csrc/ops/op.h): the dispatcher's results for plain calls, errors for wrong ones, and no
result for a call that somebody observes."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from op_calls import Call, Draw, assert_equal, attention_calls, by_dispatcher, calls, token_calls
from subprocesses import program
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.ops import eager, seeds

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def taken(dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    """Return every call with a gradient that takes the fast path."""
    found = calls(dtype) | attention_calls(dtype)
    slow = ("linear", "attention, sinks", "linear_cross_entropy, class weights", "linear_cross_entropy, probabilities")
    return {name: call for name, call in found.items() if name not in slow}


def decoding(dtype: torch.dtype = torch.float32) -> dict[str, Call]:
    draw, found = Draw(0, dtype), token_calls(dtype)
    q, k, v = (draw.floats(0, heads, length, 8) for heads, length in ((4, 3), (2, 12), (2, 12)))
    names = ("attention_decode", "attention_decode, all keys", "attention_decode, pages")
    empty = Call(
        "attention_decode",
        tfast.attention_decode,
        {"q": q, "k_cache": k, "v_cache": v, "lengths": torch.ones(0).long()},
    )
    paged = found["attention_decode, pages"]
    unread = {"lengths": torch.tensor([8, 4]), "page_table": torch.tensor([[0, 1], [3, 99]], dtype=torch.int32)}
    more = {"nothing": empty, "a page without a key": paged._replace(tensors=paged.tensors | unread)}
    return {name: found[name] for name in names} | more


@pytest.fixture
def fast_calls():
    """Record the calls that take the fast path; another call fails the test."""
    noted = []

    class Watch:
        def __getattr__(self, name):
            def call(*args):
                result = getattr(extension.module(), name)(*args)
                assert result is not None, f"{name} declined"
                noted.append(name)
                return result

            return call

    with mock.patch.object(eager, "extension", SimpleNamespace(module=Watch)):
        yield noted


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", taken())
def test_it_is_taken_and_agrees_bit_for_bit(name, dtype, fast_calls):
    call = taken(dtype)[name]
    short = call.trained()
    assert len(fast_calls) == 1
    with by_dispatcher():
        long = call.trained()
    assert_equal(short, long)
    assert [(t.dtype, t.stride()) for t in short] == [(t.dtype, t.stride()) for t in long]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", decoding())
def test_decoding_is_taken_and_agrees_bit_for_bit(name, dtype, fast_calls):
    short = decoding(dtype)[name].outputs()
    assert fast_calls == ["attention_decode"]
    with by_dispatcher():
        assert_equal(short, decoding(dtype)[name].outputs())


@pytest.mark.parametrize("name", taken())
def test_without_gradients(name, fast_calls):
    call = taken()[name]
    leaves = {leaf: call.tensors[leaf].requires_grad_() for leaf in call.leaves}
    recorded = call.outputs(**leaves)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            results = call.outputs(**leaves)
        assert_equal(results, recorded)
        assert not any(t.requires_grad for t in results) and all(t.requires_grad for t in recorded)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_is_used(used, fast_calls):
    found = taken()["layer_norm, a sum, dropout"]
    call = found._replace(function=lambda **t: found.function(**t)[used])
    unused = ("weight", "bias") if used else ()
    ours = call.trained(unused)
    with by_dispatcher():
        assert_equal(ours, call.trained(unused))


def test_changing_what_was_saved_is_noticed(fast_calls):
    call = taken()["attention, keep, bias"]
    out = tfast.attention(*(call.tensors[name].requires_grad_() for name in "qkv"), mask := call.tensors["mask"])
    mask[0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensor_hooks_see_what_is_saved(fast_calls):
    x, packed = torch.randn(3, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        tfast.layer_norm(x, None, None).sum().backward()
    assert any(t.data_ptr() == x.data_ptr() for t in packed)


def test_a_graph_is_used_once_and_freed_with_its_results(fast_calls):
    """Saved tensors are freed by a backward that does not keep the graph, and with the results; a saved output does
    not keep itself alive."""
    call = taken()["layer_norm, a sum, dropout"]
    x, weight, bias, residual = (t.requires_grad_() for t in call.tensors.values())

    def held():  # through views of the weight that only the graph holds
        return torch._C._storage_Use_Count(weight.untyped_storage()._cdata)

    def results():
        return tfast.layer_norm(x, weight.view(-1), bias, residual=residual)

    before = held()
    out, summed = results()
    assert held() > before
    torch.autograd.grad(out.sum(), (x, weight))
    assert held() == before
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), (x, weight))
    out, summed = results()
    assert held() > before
    del out, summed
    assert held() == before


def test_a_long_chain_is_freed_without_recursion(fast_calls):
    x = torch.randn(1, 2, requires_grad=True)
    for _ in range(100_000):
        x = tfast.layer_norm(x, None, None)
    del x


class Subclass(torch.Tensor):
    pass


def test_what_somebody_watches_is_declined():
    x, native = torch.randn(3, 8), extension.module()

    def called(argument, eps=1e-5):
        return native.layer_norm(False, argument, None, None, None, eps, "layer", 0.0, None)

    for argument in (x.as_subclass(Subclass), torch.randn(3, 8, device="meta"), x.to_sparse()):
        assert called(argument) is None
    for eps in (numpy.float32(1e-5), torch.tensor(1e-5), fx.Proxy(fx.Graph().placeholder("eps"))):
        assert called(x, eps) is None
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta")):  # modes: operators, functions
        with mode:
            assert called(x) is None
    seen = []
    torch.vmap(lambda row: seen.append(called(row)) or row)(x)
    assert seen == [None]
    with forward_ad.dual_level():
        assert called(forward_ad.make_dual(x, x)) is None
    assert called(x) is not None


WRONG = {
    "x must be a tensor, got NoneType": {"x": None},
    "x must be a tensor, got list": {"x": [1.0]},
    "x must be a float tensor, got torch.int32": {"x": torch.ones(3, 8, dtype=torch.int32)},
    "residual must be a tensor, got int": {"residual": 3},
    "eps must be a number, got 'small'": {"eps": "small"},
    "eps must be a number, got True": {"eps": True},
    "kind must be a string, got None": {"kind": None},
    "dropout_p must be a number, got None": {"dropout_p": None},
    "seed must be a tensor, got int": {"seed": 7},
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_argument_is_named(says):
    given = {"x": torch.randn(3, 8), "residual": None, "weight": None, "bias": None, "eps": 1e-5, "kind": "layer"}
    given |= {"dropout_p": 0.0, "seed": None, **WRONG[says]}
    with pytest.raises(TypeError, match=f"^layer_norm: {says}$"):
        extension.module().layer_norm(False, *given.values())


@pytest.mark.parametrize("name", taken())
def test_another_backend_is_honoured(name):
    """The extension checks the call, and computes nothing."""
    module = extension.module()

    class ChecksAlone:
        def __getattr__(self, name):
            assert name.endswith("_check"), f"{name} was taken"
            return getattr(module, name)

    with tfast.backend("reference"), mock.patch.object(extension, "module", ChecksAlone):
        taken()[name].outputs()


def test_the_seed_is_the_number_torch_draws():
    torch.manual_seed(11)
    ours = [seeds.draw_seed(torch.device("cpu")) for _ in range(3)]
    after = torch.rand(1)
    torch.manual_seed(11)
    assert ours == [torch.randint(-(2**63), 2**63 - 1, (1,)) for _ in range(3)]
    assert torch.equal(after, torch.rand(1))


def test_a_first_call_in_inference_mode_does_not_close_the_way():
    """Regression: the first call decided which tensors are plain, and inference tensors have fewer dispatch keys."""
    program("""
import torch
from transformer_fast import extension
_C = extension.module()
x = torch.ones(2, 8)
with torch.inference_mode():
    assert _C.layer_norm(False, x, None, None, None, 1e-5, "layer", 0.0, None) is not None
assert _C.layer_norm(False, x, None, torch.nn.Parameter(torch.ones(8)), None, 1e-5, "layer", 0.0, None) is not None
""")
