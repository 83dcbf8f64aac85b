"""``linear_cross_entropy`` against PyTorch's own loss and the fp64 oracle, on every backend of this machine.

tests/interpreter/test_cross_entropy.py runs the same on Triton.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager

import transformer_fast as tfast
from transformer_fast.ops import cross_entropy, linear_cross_entropy
from transformer_fast.reference.cross_entropy import linear_cross_entropy as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORED = 3


def inputs(device, dtype=torch.float32, rows=150, vocabulary=37, d=16, bias=True):
    """x (3, rows / 3, d), weight, bias as leaves, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    shapes = (3, rows // 3, d), (vocabulary, d), *([(vocabulary,)] if bias else [])
    leaves = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, vocabulary, (3, rows // 3), generator=generator).to(device)
    return leaves, target


def outcome(function, leaves, target, **options):
    x, weight, *bias = leaves
    loss = function(x, weight, bias[0] if bias else None, target, **options)
    return (loss, *torch.autograd.grad(loss * 0.7, leaves))


def eager(x, weight, bias, target, **options):
    logits = F.linear(x, weight, bias).flatten(0, -2)
    return F.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, target.flatten(), **options)


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    if request.param == "chunks":  # of 64 rows, the fewest
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "ignore_index": IGNORED, "reduction": "sum"}], ids=str
)
def test_loss_and_gradients(options, bias, dtype, device):
    leaves, target = inputs(device, dtype, bias=bias)
    actual = outcome(linear_cross_entropy, leaves, target, **options, dtype=torch.float32)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact, oracle = outcome(eager, wide, target, **options), outcome(reference, wide, target, **options)
    for one, other in zip(exact, oracle, strict=True):  # the oracle is PyTorch's loss
        torch.testing.assert_close(one, other)
    plain = outcome(eager, leaves, target, **options)
    assert actual[0].dtype == torch.float32
    assert linear_cross_entropy(*leaves, *[None] * (not bias), target, **options).dtype == dtype
    rows = target.numel()
    for name, a, e, x in zip(("loss", "grad_x", "grad_weight", "grad_bias"), actual, plain, exact):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=4 * rows**0.5 if name != "grad_x" else 8)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_double_precision_is_double_throughout(reduction):
    leaves, target = inputs("cpu", torch.float64)
    options = {"label_smoothing": 0.1, "ignore_index": IGNORED, "reduction": reduction}
    actual = outcome(linear_cross_entropy, leaves, target, **options)
    for a, e in zip(actual, outcome(eager, leaves, target, **options), strict=True):
        torch.testing.assert_close(a, e, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 64, 257, 1025, 70_001])
def test_any_vocabulary(vocabulary, device):
    leaves, target = inputs(device, rows=9, vocabulary=vocabulary)
    options = {"label_smoothing": 0.3, "ignore_index": 0}
    target[0, 0] = vocabulary - 1
    actual = outcome(linear_cross_entropy, leaves, target, **options, reduction="sum")
    wide = [t.detach().double().requires_grad_() for t in leaves]
    results = (outcome(eager, t, target, **options, reduction="sum") for t in (leaves, wide))
    for name, a, e, x in zip(("loss", "grad_x", "grad_weight", "grad_bias"), actual, *results, strict=True):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=4 * vocabulary**0.5 if name == "grad_x" else 8)


def test_millions_of_rows(device):
    leaves, target = inputs(device, rows=2**20 + 2, vocabulary=5, d=2)
    actual = outcome(linear_cross_entropy, leaves, target, label_smoothing=0.1, ignore_index=IGNORED)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    results = (outcome(eager, t, target, label_smoothing=0.1, ignore_index=IGNORED) for t in (leaves, wide))
    for name, a, e, x in zip(("loss", "grad_x", "grad_weight", "grad_bias"), actual, *results, strict=True):
        assert_as_exact_as_eager(a, e, x, what=name, ulps=8 if name == "grad_x" else 4 * target.numel() ** 0.5)


def test_large_and_infinite_logits(device):
    leaves, target = inputs(device, rows=6, vocabulary=40)
    with torch.no_grad():
        leaves[0].mul_(300)
        leaves[2][5] = -math.inf
    target[target == 5] = 6
    actual, expected = outcome(linear_cross_entropy, leaves, target), outcome(eager, leaves, target)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=1e-3, rtol=1e-5)


def test_all_ignored_and_no_rows(device):
    leaves, target = inputs(device, rows=6)
    target.fill_(-100)
    for reduction in ("mean", "sum"):
        loss, *grads = outcome(linear_cross_entropy, leaves, target, reduction=reduction)
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert not any(grad.any() for grad in grads)
    none = leaves[0][:, :0], *leaves[1:], target[:, :0]
    assert linear_cross_entropy(*none, reduction="sum") == 0


@pytest.mark.parametrize("wrong", [-1, 37])
def test_a_target_outside_the_vocabulary_is_named_or_not_a_number(wrong, device):
    leaves, target = inputs(device)
    target[0, :2], target[1, 4] = -100, wrong
    if device.type == "cpu":
        with pytest.raises(IndexError, match=rf"target 54 of 150 is {wrong}, .*expected 0 <= target < 37"):
            linear_cross_entropy(*leaves, target)
    else:
        assert linear_cross_entropy(*leaves, target).isnan()


def test_no_gradient_is_computed_where_none_is_needed(device):
    leaves, target = inputs(device)

    def products(*tensors):
        with torch.profiler.profile() as profile:
            linear_cross_entropy(*tensors, target)
        return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))

    assert products(*leaves) == 3
    assert products(*(t.detach() for t in leaves)) == 1
    with torch.no_grad():
        assert products(*leaves) == 1


@pytest.mark.parametrize("frozen", range(3))
def test_frozen_inputs_get_no_gradient(frozen, device):
    leaves, target = inputs(device)
    leaves[frozen].requires_grad_(False)
    linear_cross_entropy(*leaves, target).backward()
    assert [t.grad is None for t in leaves] == [n == frozen for n in range(3)]


def test_every_backward_of_a_graph_that_is_kept_gives_the_same(device):
    leaves, target = inputs(device)
    loss = linear_cross_entropy(*leaves, target)
    first = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device=device))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_the_last_backward_hands_over_the_gradients_that_were_kept(device):
    leaves, target = inputs(device)
    loss = linear_cross_entropy(*leaves, target)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    used = "self_cpu_memory_usage" if device.type == "cpu" else "self_device_memory_usage"
    assert max(getattr(event, used) for event in profile.events()) < min(t.nbytes for t in leaves)


def test_two_runs_agree_bit_for_bit(device):
    leaves, target = inputs(device)
    for a, b in zip(*(outcome(linear_cross_entropy, leaves, target) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_autocast_casts_as_a_linear_layer(device):
    leaves, target = inputs(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(*leaves, target)
    expected = linear_cross_entropy(*(t.bfloat16() for t in leaves), target, dtype=torch.float32)
    assert torch.equal(loss, expected)
    loss.backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_compiles_without_a_graph_break(device):
    leaves, target = inputs(device)

    def step(*leaves):
        return linear_cross_entropy(*leaves, target, label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, step)), strict=True):
        torch.testing.assert_close(a, b)


def test_cannot_be_differentiated_twice(device):
    leaves, target = inputs(device)
    grads = torch.autograd.grad(linear_cross_entropy(*leaves, target), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy(_backward)? cannot be differentiated again"):
        grads[0].sum().backward()


def test_opcheck(device):
    leaves, target = inputs(device, rows=6)
    backend = "native" if device.type == "cpu" else "triton"
    x, weight, bias = leaves
    for gradients in ([True, True, True], [False, True, False], [False] * 3):
        args = (
            x.detach().flatten(0, 1),
            weight.detach(),
            bias.detach(),
            target.flatten(),
            0.1,
            -100,
            True,
            gradients,
            2**23,
            backend,
        )
        torch.library.opcheck(torch.ops.transformer_fast.linear_cross_entropy.default, args)


@pytest.mark.parametrize("packed", [False, True])
def test_the_model_gives_the_loss_of_its_logits(packed, device):
    torch.manual_seed(0)
    model = tfast.Transformer(20, 23, 16, 2, 2, 0.0, packed=packed).to(device)
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
