"""Attention without mask and dropout in modules on a GPU is torch's. Fake tensors stand for those of a GPU."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerated import seen
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_fast as tfast
from transformer_fast.layers import MultiHeadAttention, torch_modules
from transformer_fast.layers.devices import attends_by_torch
from transformer_fast.masks import AttentionMask
from transformer_fast.ops import token_mask

layer_attention = importlib.import_module("transformer_fast.layers.attention")  # the package has its function there
KEEP = AttentionMask.keep(torch.ones(2, 1, 1, 5, dtype=torch.bool))
MASKS = {
    "none": (None, True), "empty": (AttentionMask(), True), "causal": (AttentionMask.causal(), True),
    "causal with an offset": (AttentionMask.causal(1), False), "window": (AttentionMask.window(2), False),
    "keep": (KEEP, False), "lengths": (AttentionMask.lengths(torch.tensor([5, 2])), False),
    "bias": (AttentionMask.bias(torch.zeros(5, 5)), False), "causal and keep": (AttentionMask.causal() & KEEP, False),
    "tensor": (torch.ones(2, 1, 5, 5, dtype=torch.bool), False),
}  # fmt: skip


@pytest.fixture
def gpu() -> Any:
    """Fake tensors on a GPU."""
    pytest.importorskip("triton")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize("name", MASKS)
def test_the_mask_decides(name: str, gpu: Any) -> None:
    mask, by_torch = MASKS[name]
    q = torch.empty(2, 4, 5, 8, device="cuda")
    assert attends_by_torch(q, mask) is by_torch
    assert not attends_by_torch(q, mask, dropout_p=0.1) and not attends_by_torch(q, mask, q)
    assert not attends_by_torch(torch.empty(2, 4, 5, 8), mask), "a CPU"
    for backend in ("native", "triton", "reference"):
        with tfast.backend(backend):
            assert not attends_by_torch(q, mask)


def test_a_layer_on_tokens_has_a_mask(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_fast.layers.devices.call_on_tokens", lambda: object())
    assert not attends_by_torch(torch.empty(2, 4, 5, 8, device="cuda"), None)
    assert token_mask.call_on_tokens() is None


TORCHS = nn.MultiheadAttention.forward
MODULES: dict[str, Callable[[float], tuple[nn.Module, Callable[[nn.Module, torch.Tensor, Any], Any]]]] = {
    "torch's": lambda p: (
        torch_modules.MultiheadAttention(32, 4, p, batch_first=True),
        lambda m, x, keep: m(x, x, x, need_weights=False, key_padding_mask=None if keep is None else ~keep)[0],
    ),
    "ours": lambda p: (
        MultiHeadAttention(4, 32, p),
        lambda m, x, keep: m(x, x, x, None if keep is None else keep.unsqueeze(1)),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of the CPU, and the choice is that of a GPU."""
    module, call = MODULES[name](0.1)
    x, keep = torch.randn(2, 5, 32), torch.arange(5) < torch.tensor([[5], [2]])
    expected = call(module.eval(), x, None)
    assert seen(lambda: call(module, x, None)) == ["ours"]
    query = types.SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(layer_attention, "attends_by_torch", lambda q, *others: attends_by_torch(query, *others))
    assert seen(lambda: call(module, x, None)) == ["torch"]
    torch.testing.assert_close(call(module, x, None), expected)
    assert seen(lambda: call(module, x, keep)) == ["ours"]
    assert "torch" not in seen(lambda: call(module.train(), x, None))
    if name == "torch's":
        assert "torch" not in seen(lambda: module.eval()(x, x, x)), "weights are requested"
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        masks = {"attn_mask": causal, "is_causal": True, "need_weights": False}
        assert seen(lambda: module(x, x, x, **masks)) == ["torch"]
        ours, theirs = (forward(module, x, x, x, **masks)[0] for forward in (type(module).forward, TORCHS))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [
    {}, {"mask": AttentionMask.causal()}, {"scale": 0.3, "empty_rows": "zero"}, {"heads": 2},
], ids=str)  # fmt: skip
def test_the_numbers_are_those_of_our_op(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where both can be computed."""
    options = dict(options)
    key_heads = options.pop("heads", 4)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, key_heads, 5, 8)
    expected = layer_attention.module_attention(q, k, k, **options)
    monkeypatch.setattr(layer_attention, "attends_by_torch", lambda *call: True)
    calls: list[Any] = []
    torchs = layer_attention.TORCH
    monkeypatch.setattr(layer_attention, "TORCH", lambda *args, **more: calls.append(more) or torchs(*args, **more))
    torch.testing.assert_close(layer_attention.module_attention(q, k, k, **options), expected)
    assert len(calls) == 1
    for more in ({"return_weights": True}, {"softcap": 2.0}):
        layer_attention.module_attention(q, k, k, **options, **more)
    assert len(calls) == 1
