"""Masked attention against eager, every backend of ``scaled_dot_product_attention`` and FlexAttention.

"ours packed" is :func:`transformer_fast.attention_packed` on the same batch without its padding. Peers of a packed
batch are FlashAttention-2 with dropout, as torch calls it ("FA2 varlen"), and torch's public ``varlen_attn``, which has
no dropout. The others get their masks ready made: one dense keep tensor, or FlexAttention's block mask; ours
is timed with all that it does with the mask. What a peer refuses (a mask, dropout, a dtype) is in the record under
``refused``, in its own words.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.masks.packing import Packing, packing_of, take
from transformer_fast.ops import seeds as _seed

sys.path.insert(0, str(Path(__file__).parent))
from attention_cases import CASES, LONGEST_STORED, Case

SMALL_CASE = "test_attention[cpu-cpu-full-b1h1q1k5d8-p0.0-float32-infer]"
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
    "cuda": (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ),
}


SHORT = 1024
"""Keys up to which eager attention is also timed compiled."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, padded (B, H, L, D), and the same packed (T, H, D)."""

    padded: tuple[Tensor, ...]
    packed: tuple[Tensor, ...]


torch.utils._pytree.register_dataclass(Inputs)


class Setting:
    """A case on a device: its masks, and every way to compute it."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        lengths, self.mask = case.key_lengths().to(device), tfast.AttentionMask()
        if case.lengths != "full":
            self.mask = self.mask & tfast.AttentionMask.lengths(lengths)
        if case.causal:
            self.mask = self.mask & tfast.AttentionMask.causal(case.causal_offset)
        masked = case.causal or case.lengths != "full"
        self.dense = self.mask.dense(case.queries, case.keys, device) if masked else None
        self.queries = packing_of(case.query_lengths(), case.B, case.queries, device)
        self.keys = packing_of(case.key_lengths(), case.B, case.keys, device)

    def make_inputs(self) -> Inputs:
        case = self.case
        shapes = [(case.B, length, case.H, case.D) for length in (case.queries, case.keys, case.keys, case.queries)]
        tensors = [torch.randn(shape, device=self.device, dtype=case.dtype) for shape in shapes]
        packings: list[Packing] = [self.queries, self.keys, self.keys, self.queries]
        packed = tuple(take(t, packing).clone() for t, packing in zip(tensors, packings, strict=True))
        padded = tuple(t.transpose(1, 2) for t in tensors)
        for t in (*padded[:3], *packed[:3]):
            t.requires_grad_(case.backward)
        return Inputs(padded, packed)

    def ours(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tfast.attention(q, k, v, self.mask, dropout_p=self.case.dropout_p)

    def ours_packed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tfast.attention_packed(
            q,
            k,
            v,
            self.queries.cu_seqlens,
            self.keys.cu_seqlens,
            max_seqlen_q=self.queries.max_length,
            max_seqlen_k=self.keys.max_length,
            causal=self.case.causal,
            dropout_p=self.case.dropout_p,
        )

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.case.D)
        if self.dense is not None:
            scores = scores.masked_fill(~self.dense, -1e9)
        weights = scores.softmax(-1)
        return (F.dropout(weights, self.case.dropout_p) if self.case.dropout_p > 0 else weights) @ v

    def sdpa(self, backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        # A look-ahead alone has its own argument there, which some backends need; else the mask is dense.
        case = self.case
        only_causal = case.causal and case.lengths == "full" and case.Lq is None
        arguments = {"is_causal": True} if only_causal else {"attn_mask": self.dense}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **arguments, dropout_p=case.dropout_p)

        return call

    def fa2_varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # flash_attn_varlen_func calls the same kernel in its own package. Differentiable in torch 2.11.
        limits = self.queries.cu_seqlens, self.keys.cu_seqlens, self.queries.max_length, self.keys.max_length
        case = self.case
        return torch.ops.aten._flash_attention_forward(q, k, v, *limits, case.dropout_p, case.causal, False)[0]

    def torch_varlen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if self.case.dropout_p > 0:
            raise RuntimeError("varlen_attn has no dropout")
        limits = self.queries.cu_seqlens, self.keys.cu_seqlens, self.queries.max_length, self.keys.max_length
        window = (-1, 0) if self.case.causal else (-1, -1)
        return varlen_attn(q, k, v, *limits, window_size=window)

    def flex(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.case.dropout_p > 0:
            raise RuntimeError("flex_attention has no dropout")
        return compiled_flex_attention()(q, k, v, block_mask=self.block_mask)

    @functools.cached_property
    def block_mask(self):
        from torch.nn.attention.flex_attention import create_block_mask

        case, lengths = self.case, self.case.key_lengths().to(self.device)

        def visible(b, h, i, j):
            seen = j < lengths[b]
            return seen & (j <= i + case.causal_offset) if case.causal else seen

        if self.dense is None:
            return None
        return create_block_mask(visible, case.B, None, case.queries, case.keys, device=self.device)

    def calls(self) -> dict[str, Callable[[Inputs], object]]:
        """Every way, by name: functions of the inputs."""
        padded = {"ours": self.ours}
        if self.case.keys <= LONGEST_STORED:
            padded["eager"] = self.eager
        for backend in BACKENDS[self.device]:
            if backend is not SDPBackend.MATH or self.case.keys <= LONGEST_STORED:
                padded[f"sdpa {backend.name.lower()}"] = self.sdpa(backend)
        if self.device == "cuda":
            padded["flex"] = self.flex
            if self.case.keys <= SHORT:
                padded["eager compiled"] = torch.compile(self.eager, dynamic=False)
        timed = {name: self._timed(call, "padded") for name, call in padded.items()}
        if self.case.lengths != "full" and self.case.causal_offset in (None, 0):
            timed["ours packed"] = self._timed(self.ours_packed, "packed")
            if self.device == "cuda":
                timed["FA2 varlen"] = self._timed(self.fa2_varlen, "packed")
                timed["varlen_attn"] = self._timed(self.torch_varlen, "packed")
        return timed

    def _timed(self, function: Callable[..., Tensor], which: str) -> Callable[[Inputs], object]:
        def run(inputs: Inputs) -> object:
            *qkv, grad_out = getattr(inputs, which)
            out = function(*qkv)
            return torch.autograd.grad(out, qkv, grad_out) if self.case.backward else out

        return run

    def check(self, inputs: Inputs) -> None:
        """Raise unless our result equals the oracle's with the same dropout in one head, and the packed result the
        padded one.

        Gradients too, where a head is small enough for the oracle to be kept whole.
        """
        seed, rows = torch.tensor([7], device=self.device), min(self.case.queries, 512)
        *padded, grad_out = inputs.padded
        with (
            mock.patch.object(_seed, "draw_seed", lambda _: seed),
            mock.patch.object(_seed, "draw_launch_seed", lambda *_: seed),
        ):
            ours, packed = self.ours(*padded), self.ours_packed(*inputs.packed[:3])
        head = [t[:1, :1, :rows] if i == 0 else t[:1, :1] for i, t in enumerate(padded)]
        head = [t.detach().requires_grad_(self.case.backward) for t in head]
        expected = reference.attention.attention(
            *head,
            keep=None if self.dense is None else self.dense[:1, :, :rows],
            scale=1 / math.sqrt(self.case.D),
            dropout_p=self.case.dropout_p,
            seed=seed,
        )[0]
        self._close(ours[:1, :1, :rows], expected)
        if "ours packed" in self.calls():
            self._close(packed, take(ours.transpose(1, 2), self.queries))
        if self.case.backward and rows == self.case.queries:
            grads = torch.autograd.grad(ours, padded, grad_out)
            for ours_grad, grad in zip(grads, torch.autograd.grad(expected, head, grad_out[:1, :1]), strict=True):
                self._close(ours_grad[:1, :1], grad)

    def _close(self, actual: Tensor, expected: Tensor) -> None:
        tolerance = 2e-5 if self.case.dtype == torch.float32 else 2e-2
        atol = tolerance * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual, expected, atol=atol, rtol=tolerance)


@functools.cache
def compiled_flex_attention():
    """FlexAttention, compiled; a shape over dynamo's limit is an error there instead of a slow call, which stores all
    scores."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(flex_attention, dynamic=False)


@pytest.mark.parametrize(("on", "case"), [(on, case) for on, cases in CASES.items() for case in cases], ids=str)
def test_attention(versus, device, on, case):
    if on != device:
        pytest.skip(f"a case for {on}")
    setting = Setting(case, device)
    versus(
        setting.make_inputs,
        setting.calls(),
        check=setting.check,
        bytes_moved=case.bytes_moved(case.B * case.queries, case.B * case.keys),
        operations=case.operations(case.pairs()),
    )
