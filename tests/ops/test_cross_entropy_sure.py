"""``linear_cross_entropy`` of rows that are sure of their target: losses down to 1e-6, beside logits of up to 10,000.

A loss is a difference of logits. Computed from the logarithm of the sum, it has the rounding of the largest logit.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from loss_calls import our_loss, torch_loss
from op_calls import Call, Draw, hold
from torch import Tensor

from transformer_fast.ops import cross_entropy
from transformer_fast.testing import assert_as_exact_as_eager

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = [0.0, 20.0, 100.0, 10_000.0, -10_000.0]
LOSSES = [1e-6, 1e-3, 1.0, 30.0]
ROWS = 8


def oracle(
    x: Tensor, weight: Tensor, *, target: Tensor, class_weight: Tensor | None = None,
    label_smoothing: float = 0.0, reduction: str = "mean", dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss by torch; in float64, where torch rounds losses below 1e-10 away, by its terms."""
    if x.dtype != torch.float64:
        class_weight = class_weight if dtype is None or class_weight is None else class_weight.to(dtype)
        options = {"label_smoothing": label_smoothing, "reduction": reduction, "dtype": dtype}
        return torch_loss(x, weight, target=target, class_weight=class_weight, **options)
    logits = torch.nn.functional.linear(x, weight)
    largest, place = logits.max(1, keepdim=True)
    others = (logits - largest).exp().scatter(1, place, 0.0).sum(1, keepdim=True)
    by_class = (largest - logits) + others.log1p()
    soft = target.is_floating_point()
    wanted = target if soft else torch.nn.functional.one_hot(target, weight.shape[0]).to(logits)
    weights = logits.new_ones(weight.shape[0]) if class_weight is None else class_weight
    losses = ((wanted * (1 - label_smoothing) + label_smoothing / weight.shape[0]) * weights * by_class).sum(1)
    if reduction == "none":
        return losses
    return (
        losses.sum() / (losses.numel() if soft else (wanted * weights).sum()) if reduction == "mean" else losses.sum()
    )


def hold_loss(call: Call) -> None:
    """Check the loss of a call by the gate."""
    options = call.function.keywords
    wide = {name: t.double() if t.is_floating_point() else t for name, t in call.tensors.items()}
    eager, exact = (oracle(**tensors, **options) for tensors in (call.tensors, wide))
    assert_as_exact_as_eager(*call.outputs(), eager, exact, what=str(options))


def sure_call(
    device: torch.device,
    dtype: torch.dtype,
    largest: float,
    loss: float,
    *,
    vocabulary: int = 37,
    probabilities: bool = False,
    weighted: bool = False,
    **options: object,
) -> Call:
    """Return a call whose rows have about one loss each, and logits up to about ``largest``.

    The rows of x are those of the unit matrix, so that no product rounds: the logits are the columns of the weight.
    """
    draw = Draw(5, device=device)
    # With this gap the probabilities of the other classes have the wanted sum. All terms below are at most 0.
    gap = math.log((vocabulary - 1) / math.expm1(loss))
    logits = -draw.floats(ROWS, vocabulary, dtype=torch.float64).abs() - max(0.0, gap)
    target = torch.arange(ROWS, device=device) * 5 % vocabulary
    target[-1] = vocabulary - 1
    logits.scatter_(1, target.unsqueeze(1), min(0.0, gap))
    tensors = {
        "x": torch.eye(ROWS, device=device, dtype=dtype),
        "weight": (logits + largest).t().contiguous().to(dtype),
    }
    classes = torch.nn.functional.one_hot(target, vocabulary).to(dtype)
    tensors["target"] = classes if probabilities else target
    if weighted:
        tensors["class_weight"] = torch.sigmoid(draw.floats(vocabulary, dtype=dtype))
    function = partial(our_loss, **options, dtype=torch.float32)
    return Call("linear_cross_entropy", function, tensors, ("x", "class_weight", "target"))


@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_of_a_sure_row_keeps_its_digits(dtype, reduction, device):
    for largest, loss, smoothing in itertools.product(LARGEST, LOSSES, (0.0, 1e-6, 0.1, 1.0)):
        hold_loss(sure_call(device, dtype, largest, loss, label_smoothing=smoothing, reduction=reduction))


@pytest.mark.parametrize("vocabulary", [2, 1025, 5000])
def test_a_sure_row_of_any_vocabulary(vocabulary, device):
    for largest, loss, smoothing in itertools.product(LARGEST, LOSSES, (0.0, 0.1)):
        hold_loss(sure_call(device, torch.float32, largest, loss, vocabulary=vocabulary, label_smoothing=smoothing))


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("probabilities", [False, True], ids=["classes", "probabilities"])
def test_a_sure_row_with_weights_and_probabilities(probabilities, weighted, device):
    for dtype, largest, loss, reduction in itertools.product(DTYPES, LARGEST, LOSSES, cross_entropy.REDUCTIONS):
        for smoothing in (0.0, 0.1):
            options = {"probabilities": probabilities, "weighted": weighted, "reduction": reduction}
            hold_loss(sure_call(device, dtype, largest, loss, **options, label_smoothing=smoothing))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_the_gradient_of_a_sure_row_keeps_its_digits(smoothing, reduction, device):
    for largest, loss in itertools.product(LARGEST, LOSSES):
        call = sure_call(device, torch.float32, largest, loss, label_smoothing=smoothing, reduction=reduction)
        hold(call, lambda seed, options=call.function.keywords, **given: oracle(**given, **options))


def test_the_gradient_of_a_target_that_gets_no_mass_of_its_own(device):
    """With smoothing 1 the gradient of a target is its probability less 1 / vocabulary, both far below 1."""
    for loss in LOSSES:
        call = sure_call(device, torch.float32, 0.0, loss, vocabulary=5000, label_smoothing=1.0, reduction="sum")
        hold(call, lambda seed, options=call.function.keywords, **given: oracle(**given, **options))


def few_ulps(logits: Tensor, others: Tensor) -> dict[str, float]:
    """Return the tolerance of a row's odds: 4 units in the last place, and on a GPU what its exp and division add.

    There exp(x) is 2^(x log2 e): the constant and the product are rounded (0.12 |x| and 0.5 |x| units), the powers
    (ex2.approx of PTX) are exact to 2^-22.5, 1.42 units, and the quotients (div.full) to 2 units. A sum has the average
    of its powers' errors, by their sizes.
    """
    depth = (others.softmax(1) * (logits.amax(1, keepdim=True) - logits)).sum(1).max().item()
    units = 4 + (0.62 * depth + 1.42 + 2 if logits.is_cuda else 0)
    return {"rtol": units * torch.finfo(torch.float32).eps, "atol": 0.0}


def test_a_sure_row_is_exact_to_a_few_ulps(device):
    """The loss is log(1 + odds of all other classes), and the gradient of the target minus their probability."""
    for largest, loss in itertools.product(LARGEST, LOSSES):
        call = sure_call(device, torch.float32, largest, loss, reduction="sum")
        logits, target = call.tensors["weight"].double().t(), call.tensors["target"].unsqueeze(1)
        of_others = logits.scatter(1, target, -math.inf)
        others, close = of_others.logsumexp(1) - logits.gather(1, target).squeeze(1), few_ulps(logits, of_others)
        found, gradient = call.trained(grads=[torch.ones((), device=device)])
        torch.testing.assert_close(found.double(), others.exp().log1p().sum(), **close)
        torch.testing.assert_close(gradient.t().gather(1, target).squeeze(1).double(), -others.sigmoid(), **close)
