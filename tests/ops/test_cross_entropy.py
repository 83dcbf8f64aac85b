"""``linear_cross_entropy`` against PyTorch's loss and the fp64 oracle, on every backend of this machine.

tests/interpreter/test_cross_entropy.py runs the same on Triton; test_every_op.py has what the op shares with others.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from loss_calls import IGNORED, assert_no_loss, by_torch, chunks, hold_to_torch, loss_call  # noqa: F401
from op_calls import assert_equal

import transformer_fast as tfast

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "ignore_index": IGNORED, "reduction": "sum"}], ids=str
)
def test_loss_and_gradients(options, bias, dtype, device):
    hold_to_torch(loss_call(device, dtype, bias=bias, **options, dtype=torch.float32))
    assert loss_call(device, dtype, bias=bias, **options).outputs()[0].dtype == dtype


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_double_precision_is_double_throughout(reduction):
    call = loss_call("cpu", torch.float64, label_smoothing=0.1, ignore_index=IGNORED, reduction=reduction)
    torch.testing.assert_close(call.trained(), by_torch(call).trained(), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 64, 257, 1025, 70_001])
def test_any_vocabulary(vocabulary, device):
    options = {"label_smoothing": 0.3, "ignore_index": 0, "reduction": "sum"}
    call = loss_call(device, shape=(3, 3), vocabulary=vocabulary, **options)
    call.tensors["target"][0, 0] = vocabulary - 1
    hold_to_torch(call, sums=("x",))


def test_millions_of_rows(device):
    shape = (3, 349_526)
    hold_to_torch(loss_call(device, shape=shape, vocabulary=5, d=2, label_smoothing=0.1, ignore_index=IGNORED))


def test_large_and_infinite_logits(device):
    call = loss_call(device, shape=(3, 2), vocabulary=40)
    call.tensors["x"].mul_(300)
    call.tensors["bias"][5] = -math.inf
    call.tensors["target"][call.tensors["target"] == 5] = 6
    torch.testing.assert_close(call.trained(), by_torch(call).trained(), atol=1e-3, rtol=1e-5)


def test_all_ignored_and_no_rows(device):
    for reduction, smoothing in (("mean", 0.0), ("mean", 0.1), ("sum", 0.0), ("sum", 0.1)):
        call = loss_call(device, shape=(3, 2), reduction=reduction, label_smoothing=smoothing)
        loss, *grads = call.trained(target=torch.full_like(call.tensors["target"], -100))
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert not any(grad.any() for grad in grads)
    assert loss_call(device, shape=(3, 0), reduction="sum").outputs()[0] == 0


def test_no_gradient_is_computed_where_none_is_needed(device):
    call = loss_call(device)
    leaves = {name: call.tensors[name].requires_grad_() for name in call.leaves}

    def products(**given):
        with torch.profiler.profile() as profile:
            call.outputs(**given)
        return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))

    assert products(**leaves) == 3
    assert products(**{name: t.detach() for name, t in leaves.items()}) == 1
    with torch.no_grad():
        assert products(**leaves) == 1


def test_every_backward_of_a_graph_that_is_kept_gives_the_same(device):
    call = loss_call(device)
    leaves = {name: call.tensors[name].requires_grad_() for name in call.leaves}
    (loss,), weight = call.outputs(), torch.tensor(3.0, device=device)
    first = torch.autograd.grad(loss, leaves.values(), weight, retain_graph=True)
    assert_equal(list(first), list(torch.autograd.grad(loss, leaves.values(), weight)))


def test_a_backward_leaves_the_gradients_that_the_op_returned(device):
    """Gradients that the caller did not request are not returned; the graph alone has them."""
    call = loss_call(device)
    x, weight, bias, target = (call.tensors[name] for name in ("x", "weight", "bias", "target"))
    leaves = [t.requires_grad_() for t in (x.flatten(0, 1), weight, bias)]

    def run(*gradients):
        given = *leaves, target.flatten(), 0.1, IGNORED, True, list(gradients), 2**20
        return torch.ops.transformer_fast.linear_cross_entropy(*given)

    for factor in (1.0, 3.0):
        loss, *returned = run(True, True, True)
        before = [t.clone() for t in returned]
        expected = torch.autograd.grad(run(True, False, False)[0], leaves, torch.tensor(factor, device=device))
        found = torch.autograd.grad(loss, leaves, torch.tensor(factor, device=device))
        assert_equal(list(found), list(expected))
        for gradient in found:
            gradient.zero_()
        assert_equal(returned, before)
    assert [t.numel() for t in run(False, True, False)[1:4]] == [0, weight.numel(), 0]


def test_the_last_backward_hands_over_the_gradients_that_were_kept(device):
    # The smallest leaf, the bias, has 4,000 bytes; on a GPU the number that scales the gradients has 512.
    call = loss_call(device, vocabulary=1000)
    leaves = [call.tensors[name].requires_grad_() for name in call.leaves]
    (loss,) = call.outputs()
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    used = "self_cpu_memory_usage" if device.type == "cpu" else "self_device_memory_usage"
    assert max(getattr(event, used) for event in profile.events()) < min(t.nbytes for t in leaves)


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_gives_the_loss_of_its_logits(packed, device):
    torch.manual_seed(0)
    model = tfast.Transformer(20, 23, 16, 1, 1, 0.0, packed=packed).to(device)
    src, trg = torch.randint(0, 20, (3, 7), device=device), torch.randint(0, 23, (3, 6), device=device)
    lengths = torch.tensor([6, 2, 4], device=device)
    target = torch.randint(1, 23, (3, 6), device=device)
    target[torch.arange(6, device=device) >= lengths[:, None]] = 0
    mask = tfast.AttentionMask
    masks = mask.lengths(lengths + 1), mask.lengths(lengths) & mask.causal()
    options = {"label_smoothing": 0.1, "ignore_index": 0}
    loss = model.loss(src, trg, *masks, target, **options)
    expected = F.cross_entropy(model(src, trg, *masks).flatten(0, 1), target.flatten(), **options)
    torch.testing.assert_close(loss, expected)
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(one, parameters) for one in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
