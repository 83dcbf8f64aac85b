"""Strides, empty inputs, threads, seeds, frozen inputs, derivatives and graphs of every op.

Attention has tests of its own for strides, empty inputs, threads and graphs; for operators see test_op_arguments.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from op_calls import Call, assert_equal, attention_calls, by_dispatcher, calls, on_threads, token_calls
from torch import Tensor

import transformer_fast as tfast
from transformer_fast import ops

CALLS = calls()
ALL = CALLS | attention_calls() | token_calls()
DROPS = [name for name in ALL if name.endswith(", dropout")]
NO_ROWS = calls(leading=(0,))
WITH_ROWS = [name for name, call in NO_ROWS.items() if not all(t.numel() for t in call.tensors.values())]
"""Calls whose shapes can be chosen; those of an op's record have their own."""
PRODUCTS = "linear", "linear_cross_entropy"
"""Ops that a library computes, which may round differently for other strides."""


def test_every_public_op_is_in_the_table() -> None:
    found = {call.op for call in ALL.values()}
    assert found == {*ops.__all__} - {"decompositions", "positional_table"}


def every_second(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def last_first(t: Tensor) -> Tensor:
    order = range(t.dim() - 1, -1, -1)
    return t.permute(*order).contiguous().permute(*order)


def wider(t: Tensor) -> Tensor:
    return torch.cat((t, t), -1)[..., : t.shape[-1]]


def expanded(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


@pytest.mark.parametrize("d", [21, 64, 1100])
@pytest.mark.parametrize("view", [every_second, last_first, wider, expanded])
@pytest.mark.parametrize("name", CALLS)
def test_any_strides_give_the_same_bits(
    name: str, view: Callable[[Tensor], Tensor], d: int, device: torch.device
) -> None:
    call = calls(d=d, device=device)[name]
    strided = {key: view(t) for key, t in call.tensors.items()}
    assert not all(t.is_contiguous() for t in strided.values())
    ours, dense = (call.trained(**{key: f(t) for key, t in strided.items()}) for f in (lambda t: t, Tensor.contiguous))
    if call.op in PRODUCTS:
        torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-4)
    else:
        assert_equal(ours, dense)
        assert ours[0].is_contiguous() or call.op == "dropout"


def sums_in_an_order_of_strides(call: Call, leaf: str) -> bool:
    """Return True if the strides of a gradient decide in which order this leaf's gradient is summed.

    On a GPU, Triton compiles another kernel for strides that 16 divides, whose threads hold other columns of a row; and
    the gradient of a table without offsets is torch's sum, whose threads are laid out by strides.
    """
    by_torch = leaf == "table" and "offset" not in call.tensors
    return call.tensors[leaf].is_cuda and (call.op == "layer_norm" or by_torch)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("linear_cross_entropy")])
def test_gradients_of_any_strides_give_the_same_bits(name: str, device: torch.device) -> None:
    call = calls(device=device)[name]
    leaves = {key: call.tensors[key].detach().requires_grad_() for key in call.leaves}
    outputs = call.outputs(**leaves)
    grad = torch.randn_like(outputs[0])
    one = torch.randn(grad.shape[-1:], device=device).expand_as(grad)
    for dense, *others in ((grad, last_first(grad)), (one.contiguous(), one)):
        rest = [torch.ones_like(out) for out in outputs[1:]]
        expected = torch.autograd.grad(outputs, leaves.values(), [dense, *rest], retain_graph=True)
        for other in others:
            found = torch.autograd.grad(outputs, leaves.values(), [other, *rest], retain_graph=True)
            for leaf, ours, same in zip(leaves, found, expected, strict=True):
                close = {} if call.op in PRODUCTS or sums_in_an_order_of_strides(call, leaf) else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(ours, same, **close, msg=lambda text, leaf=leaf: f"{leaf}: {text}")


@pytest.mark.parametrize("leading", [(0,), (0, 5), (3, 0), (4, 0, 5)])
@pytest.mark.parametrize("name", WITH_ROWS)
def test_no_rows(name: str, leading: tuple[int, ...], device: torch.device) -> None:
    call = calls(leading=leading, device=device)[name]
    results = call.trained()
    outputs, gradients = results[: -len(call.leaves)], results[-len(call.leaves) :]
    assert all(out.dim() == 0 or out.shape[: len(leading)] == leading for out in outputs)
    for leaf, gradient in zip(call.leaves, gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(call.tensors[leaf])), leaf


def large() -> dict[str, tuple[str, dict[str, Any]]]:
    """Calls that are large enough for several threads: name in :func:`calls`, and number of rows."""
    sums = ("layer_norm, a sum, dropout", "layer_norm, a sum, std", "layer_norm, a sum, rms, dropout")
    wide = {f"{name}, wide": (name, {"leading": (14,), "d": 20_003}) for name in sums}
    long = {f"{name}, long": (name, {"leading": (1025,), "d": 257}) for name in sums}
    others = (
        "dropout, bias, ReLU, dropout",
        "linear_cross_entropy",
        "embed, offsets, dropout",
        "embed, alone, dropout",
    )
    rows = {"leading": (40, 75), "d": 72}
    return wide | long | {name: (name, rows) for name in (*others, "add_positional, offsets, dropout", "linear")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", large())
def test_two_runs_agree_bit_for_bit_on_any_number_of_threads(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    name, rows = large()[name]
    call = calls(dtype, **rows, device=device)[name]
    results = []
    for count in (3, 3) if call.op in PRODUCTS else (1, 2, 3, 3):
        with on_threads(count):
            results.append(call.trained())
    for other in results[1:]:
        assert_equal(other, results[0])


@pytest.mark.parametrize("name", DROPS)
def test_manual_seed_governs_the_dropout_of_every_backend(name: str, device: torch.device) -> None:
    call = ALL[name]
    tensors = {key: t.to(device) for key, t in call.tensors.items()}

    def drawn(backend: str = "auto") -> Tensor:
        with tfast.backend(backend):
            out = call.function(**tensors)
        return out[-1] if isinstance(out, tuple) else out

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert torch.equal(first, drawn()) and not torch.equal(first, second)
    torch.manual_seed(1)
    torch.testing.assert_close(drawn("reference"), first)


@pytest.mark.parametrize("name", CALLS)
def test_frozen_inputs_leave_the_other_gradients_as_they_are(name: str, device: torch.device) -> None:
    call = calls(device=device)[name]
    all_of_them = dict(zip(call.leaves, call.trained()[-len(call.leaves) :], strict=True))
    for count in range(1, len(call.leaves)):
        for frozen in itertools.combinations(call.leaves, count):
            rest = [leaf for leaf in call.leaves if leaf not in frozen]
            assert_equal(call.trained(frozen)[-len(rest) :], [all_of_them[leaf] for leaf in rest], f"{frozen}")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.op not in PRODUCTS])
def test_autocast_changes_nothing(name: str, device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        call = calls(dtype, device=device)[name]
        with torch.autocast(device.type, torch.bfloat16):
            ours = call.outputs()
        assert_equal(list(ours), list(call.outputs()))
        assert [t.dtype for t in ours] == [t.dtype for t in call.outputs()]


@pytest.mark.parametrize("way", ["fast path", "dispatcher"])
@pytest.mark.parametrize(
    "name", [name for name, call in ALL.items() if call.op not in ("add_positional", "linear", "attention_decode")]
)
def test_a_backward_is_recorded_and_cannot_be_differentiated_but_by_the_reference(name: str, way: str) -> None:
    call = ALL[name]

    def gradients() -> tuple[tuple[Tensor, ...], ...]:
        """Return the gradients, with and without a graph for the second derivative."""
        leaves = {leaf: call.tensors[leaf].detach().requires_grad_() for leaf in call.leaves}
        runs = [call.outputs(**leaves) for _ in range(2)]
        grads = [out.detach().cos().requires_grad_() for out in runs[0]]
        pairs = zip(runs, (True, False), strict=True)
        return tuple(torch.autograd.grad(outs, leaves.values(), grads, create_graph=kept) for outs, kept in pairs)

    with by_dispatcher() if way == "dispatcher" else tfast.backend("auto"):
        recorded, plain = gradients()
    assert_equal([t.detach() for t in recorded], list(plain))
    with pytest.raises(
        RuntimeError, match=r'cannot be differentiated again.*no second derivative.*backend\("reference"\)'
    ):
        recorded[0].sum().backward()
    with tfast.backend("reference"):
        gradients()[0][0].square().sum().backward()


SMALL = calls(torch.float64, leading=(2, 3), d=11)


@pytest.mark.parametrize("name", SMALL)
def test_gradcheck(name: str) -> None:
    call = SMALL[name]
    leaves = {leaf: call.tensors[leaf].double().requires_grad_() for leaf in call.leaves}
    kept = {"ids": call.tensors["ids"].clamp(1, 9)} if call.op == "embed" else {}  # a padding row has no gradient

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return call.outputs(**kept, **dict(zip(leaves, given, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(leaves.values()))
    if call.op == "add_positional" and "offset" not in call.tensors:
        assert torch.autograd.gradgradcheck(run, tuple(leaves.values()))


@pytest.mark.cover(6)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in DROPS])
def test_compiles_in_one_graph(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    call = calls(device=device)[name]
    compiled = call._replace(function=torch.compile(call.function, backend="aot_eager", fullgraph=True))
    for ours, eager in zip(compiled.trained(), call.trained(), strict=True):
        torch.testing.assert_close(ours, eager)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    rows, d = (1 << 31) // 512 + 9, 512
    memory = numpy.empty((rows, d), numpy.float16)  # never touched but for two rows, so it takes no memory
    weight = torch.from_numpy(memory)
    weight[0], weight[rows - 1] = 1.0, 3.0
    out = ops.embed(torch.tensor([rows - 1, 0]), weight, scale=2.0)
    assert torch.equal(out, torch.tensor([[6.0], [2.0]], dtype=torch.float16).expand(2, d))
