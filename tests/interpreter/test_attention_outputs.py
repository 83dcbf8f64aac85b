"""tests/ops/test_attention_outputs.py on the Triton kernels."""

import pytest
import test_attention_outputs
import torch
from test_attention_outputs import *  # noqa: F403

import transformer_fast as tfast

pytestmark = [pytest.mark.usefixtures("on_triton", "small_tiles"), pytest.mark.cover("values")]


for test in (test_the_logsumexp_and_its_gradient, test_weights_before_and_after_dropout):  # noqa: F405
    pytest.mark.cover(1)(test)  # test_attention_kernels.py has every dtype
del test


@pytest.fixture(autouse=True)
def few_heads(monkeypatch, device):
    """Use two query heads and one key head on CPU, because each head is a program."""
    if device.type == "cpu":
        monkeypatch.setattr(test_attention_outputs, "H", 2)
        monkeypatch.setattr(test_attention_outputs, "HKV", 1)


@pytest.mark.parametrize("magnitude", [1.0, 10.0])  # a large logsumexp is not exact enough for weights
def test_a_sink_is_one_more_key_without_a_value(magnitude, device):
    q, k, v = (torch.randn(1, 2, length, 16, device=device) for length in (40, 70, 70))
    q, sinks = q * magnitude, torch.tensor([0.5, 3.0], device=device) * magnitude
    _, logsumexp = tfast.attention(q, k, v, sinks=sinks, return_logsumexp=True)
    out, weights = tfast.attention(q, k, v, sinks=sinks, return_weights=True)
    scores = torch.cat([q @ k.mT / 4, sinks.view(1, 2, 1, 1).expand(1, 2, 40, 1)], -1)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(weights, scores.softmax(-1)[..., :-1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out, weights @ v, rtol=1e-4, atol=1e-5)


def test_a_logsumexp_between_8_and_16_costs_no_digits(device):
    """Ten equal scores of 13: float32 rounds their logsumexp so that weights computed from it sum to 1 - 5e-7."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 10, 16), torch.zeros(1, 1, 10, 16)
    signs = torch.tensor([1.0, -1.0]).repeat(5)
    q[..., 0], k[..., 0], k[..., 1], v[..., 0] = 13.0, 1.0, signs, signs
    q, k, v = q.to(device).requires_grad_(), k.to(device), v.to(device)
    out = tfast.attention(q, k, v, scale=1.0)
    (grad,) = torch.autograd.grad(out[..., 0].sum(), q)
    assert abs(grad[0, 0, 0, 1].item() - 1) < 2.5e-7


@pytest.mark.parametrize("offset", [0, 30])
def test_a_prefix(offset, device):
    """Output and gradients against a keep mask in the reference."""
    q, k, v = (torch.randn(2, 2, n, 16, device=device, requires_grad=True) for n in (40, 70, 70))
    mask = tfast.AttentionMask.prefix(torch.tensor([35, 0], device=device), offset)
    mask &= tfast.AttentionMask.lengths(torch.tensor([70, 51], device=device))
    results = []
    for backend, given in (("triton", mask), ("reference", mask.dense(40, 70))):
        torch.manual_seed(5)
        with tfast.backend(backend):
            out = tfast.attention(q, k, v, given, dropout_p=0.2)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
