"""torch's registry of flash implementations can activate our CPU kernels and remove them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.attention as torchs
from torch.nn.functional import scaled_dot_product_attention as sdpa

import transformer_fast as tfast
from transformer_fast.compat import register_flash_attention_impl
from transformer_fast.testing import assert_as_exact_as_eager

LENGTHS = torch.tensor([[40], [7]])
KEEP = (torch.arange(70) < LENGTHS)[:, None, None]
OPTIONS = {
    "none": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3, "is_causal": True},
    "keep mask": {"attn_mask": KEEP},
    "float mask": {"attn_mask": torch.randn(2, 1, 33, 70, generator=torch.Generator().manual_seed(2))},
    "mask of two dimensions": {"attn_mask": KEEP[1, 0].expand(33, 70).clone()},
}


@pytest.fixture
def activated() -> Iterator[Callable[[], None]]:
    """Activate our kernels in this test; calling the fixture removes them."""
    before = set(torchs.list_flash_attention_impls())
    register_flash_attention_impl()
    assert set(torchs.list_flash_attention_impls()) == before | {"transformer_fast"}
    torchs.activate_flash_attention_impl("transformer_fast")
    yield torchs.restore_flash_attention_impl
    if torchs.current_flash_attention_impl() is not None:
        torchs.restore_flash_attention_impl()


def outcome(call, tensors, **options):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def inputs(dtype=torch.float32):
    q, kv = torch.randn(2, 33, 4, 16), torch.randn(2, 2, 70, 4, 16)
    return [t.to(dtype).transpose(1, 2) for t in (q, *kv)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_calls_of_torch_run_our_kernels(options, dtype, activated):
    tensors, given = inputs(dtype), dict(OPTIONS[options])
    if options == "float mask":
        given["attn_mask"] = given["attn_mask"].to(dtype)
    ours = outcome(sdpa, tensors, **given)
    assert torch.equal(ours[0], tfast.scaled_dot_product_attention(*tensors, **given))
    with torchs.sdpa_kernel(torchs.SDPBackend.MATH):
        eager = outcome(sdpa, tensors, **given)
        if "attn_mask" in given and given["attn_mask"].dtype != torch.bool:
            given["attn_mask"] = given["attn_mask"].double()
        exact = outcome(sdpa, [t.double() for t in tensors], **given)
    for a, b, c in zip(ours, eager, exact):
        assert_as_exact_as_eager(a, b, c, ulps=4 * 70**0.5)


def test_restored_torch_runs_its_own(activated):
    tensors = inputs()
    ours = outcome(sdpa, tensors)
    activated()
    theirs = outcome(sdpa, tensors)
    assert torchs.current_flash_attention_impl() is None
    assert not all(map(torch.equal, ours, theirs))  # the two round at different places
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_two_runs_of_a_compiled_call(activated):
    torch._dynamo.reset()
    q, k, v = inputs()
    call = torch.compile(lambda q: sdpa(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(q), sdpa(q, k, v, is_causal=True))


LAYOUTS = {
    "heads first": lambda t: t.contiguous(),
    "length first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "width first": lambda t: t.mT.contiguous().mT,
    "part of a wider tensor": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", ["none", "causal", "float mask"])
def test_strides_are_those_that_torch_promises(options, layout, activated):
    tensors, given = [LAYOUTS[layout](t) for t in inputs()], {"dropout_p": 0.0, "is_causal": False} | OPTIONS[options]
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default
        for end in ("", "_backward")
    )
    out, logsumexp = forward(*tensors, **given)
    order = (
        LAYOUTS[layout](torch.randn(out.shape)),
        *tensors,
        out,
        logsumexp,
        given.pop("dropout_p"),
        given.pop("is_causal"),
    )
    for op, args in ((forward, tensors + list(order[6:])), (backward, order)):
        on_meta = [
            torch.empty_strided(t.shape, t.stride(), device="meta") if isinstance(t, torch.Tensor) else t for t in args
        ]
        promised = op(*on_meta, **{name: t.to("meta") for name, t in given.items()})
        assert [t.stride() for t in op(*args, **given)] == [t.stride() for t in promised]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_compiled_by_inductor(layout, activated):
    torch._dynamo.reset()
    tensors = [LAYOUTS[layout](t) for t in inputs()]
    expected = outcome(sdpa, tensors, is_causal=True)
    found = outcome(torch.compile(sdpa, fullgraph=True), tensors, is_causal=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_there_is_not_is_said():
    with (
        mock.patch("transformer_fast.extension.load", lambda: False),
        mock.patch("transformer_fast.extension.obstacle", lambda: "it was not built"),
        pytest.raises(tfast.BackendError, match="register_flash_attention_impl: it was not built"),
    ):
        register_flash_attention_impl()
