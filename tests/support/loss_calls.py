"""Calls of ``linear_cross_entropy``, with PyTorch's loss beside them, and chunks of two sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_calls import Call, Draw, hold
from torch import Tensor

from transformer_fast.ops import cross_entropy, linear_cross_entropy
from transformer_fast.reference.cross_entropy import linear_cross_entropy as reference

IGNORED, VOCABULARY, ROWS = 3, 37, (3, 50)


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    """Parametrize with logits computed at once, and in chunks of 64 rows, the smallest."""
    if request.param == "chunks":
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})


def torch_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, target: Tensor, class_weight: Tensor | None = None,
    dtype: torch.dtype | None = None, seed: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Return ``F.cross_entropy`` of all logits, in their own dtype or in a wider one."""
    logits = F.linear(x, weight, bias).reshape(-1, weight.shape[0])
    logits = logits if dtype is None else logits.to(torch.promote_types(logits.dtype, dtype))
    rows = target.reshape(logits.shape) if target.is_floating_point() else target.flatten()
    loss = F.cross_entropy(logits, rows, class_weight, **options)
    return loss.reshape(x.shape[:-1]) if options.get("reduction") == "none" else loss


def our_loss(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, target: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(x, weight, bias, target, **options)


def loss_call(
    device: torch.device | str,
    float_type: torch.dtype = torch.float32,
    /,
    *,
    kind: str = "classes",
    weighted: bool = False,
    bias: bool = True,
    shape: tuple[int, ...] | None = None,
    vocabulary: int = VOCABULARY,
    d: int = 16,
    function: Callable[..., Tensor] = our_loss,
    **options: Any,
) -> Call:
    """Return a call on rows (*shape, d); some targets are class 3, or all are probabilities.

    Args:
        shape: ROWS by default.
    """
    shape = ROWS if shape is None else shape
    draw = Draw(1, float_type, device)
    tensors = {"x": draw.floats(*shape, d), "weight": draw.floats(vocabulary, d)}
    if bias:
        tensors["bias"] = draw.floats(vocabulary)
    if kind == "classes":
        tensors["target"] = draw.whole(*shape, below=vocabulary)
    else:
        tensors["target"] = draw.floats(*shape, vocabulary).float().softmax(-1).to(float_type)
    if weighted:
        tensors["class_weight"] = torch.sigmoid(draw.floats(vocabulary))
    return Call("linear_cross_entropy", partial(function, **options), tensors, ("class_weight",))


def by_torch(call: Call) -> Call:
    """Return the call of PyTorch's loss with the same arguments."""
    return call._replace(function=partial(torch_loss, **call.function.keywords))


def hold_to_torch(call: Call, sums: tuple[str, ...] = ("output 0", "weight", "bias")) -> dict[str, Tensor]:
    """Check a call against PyTorch's loss by the gate, and the oracle against the same loss in float64."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in call.tensors.items()}
    options = {name: value for name, value in call.function.keywords.items() if name != "dtype"}
    exact = call._replace(function=partial(torch_loss, **options), tensors=wide)
    oracle = exact._replace(function=lambda bias=None, **given: reference(bias=bias, **given, **options))
    torch.testing.assert_close(oracle.trained(), exact.trained(), msg=lambda m: f"the oracle: {m}")
    terms = call.tensors["weight"].shape[0] if "x" in sums else call.tensors["x"][..., 0].numel()
    return hold(call, by_torch(call).function, rows=terms, sums=sums)


def assert_no_loss(call: Call, wrong: int) -> None:
    """Give one row a target outside the vocabulary: on a CPU the error has its number; elsewhere the loss is NaN."""
    target = call.tensors["target"]
    target[0, :2], target[1, 4] = -100, wrong
    if target.device.type == "cpu":
        place = f"target {target.shape[1] + 4} of {target.numel()}"
        with pytest.raises(IndexError, match=rf"{place} is {wrong}, .*expected 0 <= target < 37"):
            call.outputs()
    else:
        assert call.outputs()[0].isnan()
