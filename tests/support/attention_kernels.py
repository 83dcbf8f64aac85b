"""Attention kernels of one backend, called as ops: inputs, call, oracle, and gate of all results.

The tests in tests/ops that take the fixture ``kernels`` are of the C++ kernels. tests/interpreter imports them and
gives them the Triton kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import mask_parts
from torch import Tensor

import transformer_fast as tfast
from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.reference.attention import attention, attention_decode, attention_packed
from transformer_fast.reference.dropout import attention_keep, rescale
from transformer_fast.testing import assert_as_exact_as_eager

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEED = torch.tensor([-987_654_321_987_654_321])
HALVES = [torch.float16, torch.bfloat16]
DIALECTS = list(mask_parts(1, 1, 1, 1, torch.Generator()))
"""Names of :func:`helpers.mask_parts`."""

OPS = torch.ops.transformer_fast
GRADIENTS = ("q", "k", "v", "bias", "distance_bias", "sinks")
"""What the op of the backward gives gradients of, in its order."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The attention kernels of a backend.

    Attributes:
        backend: "native" or "triton".
        device: where their tensors are. The oracle computes on the CPU.
        batch: batch entries, heads of queries and heads of keys; more than one of each that masks tell apart.
        few: the same where nothing tells them apart. A program takes the interpreter milliseconds.
        lengths: of queries and of keys, more than a tile of each, and no multiple of one.
        repeated: (B, H, Hkv, Lq, Lk) of calls that run several times: the kernels share them out in different ways.
        threads: the number of threads of each of these runs.
    """

    backend: str
    device: torch.device
    batch: tuple[int, int, int]
    few: tuple[int, int, int]
    lengths: tuple[int, int]
    repeated: tuple[tuple[int, ...], ...]
    threads: tuple[int, ...]

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normal numbers on the device, equal for all dtypes up to rounding."""
        return torch.randn(shape, dtype=torch.float64).to(self.device, dtype)

    def inputs(self, B: int, H: int, Hkv: int, Lq: int, Lk: int, D: int, dtype=torch.float32) -> list[Tensor]:
        """Return q, k, v and the gradient of the output of a padded batch."""
        return [self.random(B, h, L, D, dtype=dtype) for h, L in ((H, Lq), (Hkv, Lk), (Hkv, Lk), (H, Lq))]

    def packed_inputs(self, lengths_q, lengths_k, H: int, Hkv: int, D: int, dtype=torch.float32) -> list[Tensor]:
        """Return :meth:`inputs` of a packed batch, (tokens, heads, D): slices of wider tensors."""
        tokens = [(sum(lengths_q), H), *[(sum(lengths_k), Hkv)] * 2, (sum(lengths_q), H)]
        return [self.random(T, 2 * heads, D + 8, dtype=dtype)[:, ::2, :D] for T, heads in tokens]

    def call(self, D: int, parts: dict[str, Any] | None = None, **more: Any) -> AttentionParams:
        """Return the other arguments of a call, on the device; with a seed if there is dropout."""
        given = {"scale": D**-0.5} | (parts or {}) | more
        if given.get("dropout_p"):
            given["seed"] = SEED
        return AttentionParams(**on(self.device, given))

    def packed_call(self, lengths_q, lengths_k, D: int, parts: dict[str, Any] | None = None, **more: Any):
        """Return the other arguments of a call with sequences of these lengths."""
        longest = max(lengths_q, default=0), max(lengths_k, default=0)
        packed = PackedBatch(*(starts(n).to(self.device) for n in (lengths_q, lengths_k)), *longest)
        return self.call(D, parts, packed=packed, **more)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionParams) -> Tensor:
        """Return the output of a call."""
        with tfast.backend(self.backend):
            return OPS.attention(q, k, v, **call.keywords())[0]

    def outcome(self, tensors, call: AttentionParams, grad_logsumexp: Tensor | None = None) -> dict[str, Tensor]:
        """Return all results of a call by name: output, logsumexp, gradients, and the weights of a padded batch."""
        q, k, v, grad_out = tensors
        options = call.keywords()
        with tfast.backend(self.backend):
            out, logsumexp, _ = OPS.attention(q, k, v, **options)
            received = grad_out, q, k, v, out, logsumexp, grad_logsumexp, None
            found = {"out": out, "logsumexp": logsumexp}
            if call.packed is None:
                found["weights"] = OPS.attention_weights(q, k, **options)
            # The gradient of a part alone is computed by a kernel of its own.
            for names in (("q", "k", "v"), *((name,) for name in learned_parts(call))):
                needs = [name in names for name in GRADIENTS]
                grads = OPS.attention_backward(*received, needs, **options)
                found |= {f"grad_{name}": grad for name, grad in zip(GRADIENTS, grads, strict=True) if name in names}
        return found

    def recorded(self, tensors, call: AttentionParams, grad_logsumexp: Tensor | None = None) -> dict[str, Tensor]:
        """Return the results of :meth:`outcome` through autograd, which sums a bias gradient differently and may
        keep weights."""
        *qkv, grad_out = tensors
        learned = {name: t.detach().clone().requires_grad_() for name, t in learned_parts(call).items()}
        leaves = [*(t.detach().clone().requires_grad_() for t in qkv), *learned.values()]
        options = call.keywords() | learned
        with tfast.backend(self.backend):
            results = OPS.attention(*leaves[:3], **options)
        received = (grad_out,) if grad_logsumexp is None else (grad_out, grad_logsumexp)
        grads = torch.autograd.grad(results[: len(received)], leaves, received)
        found = dict(zip(("out", "logsumexp"), (t.detach() for t in results[:2]), strict=True))
        return found | {f"grad_{name}": g for name, g in zip(("q", "k", "v", *learned), grads, strict=True)}

    def check(
        self, tensors, call: AttentionParams, *, received: bool = True, way: Callable | None = None, **ulps: float
    ) -> dict[str, Tensor]:
        """Hold all results of a call to the gate, and return them.

        Args:
            received: whether a gradient comes in through the logsumexp; it is NaN where that is -inf.
            way: :meth:`outcome`, or :meth:`recorded`.
            ulps: allowances of single results instead of the backend's.
        """
        q, k, *_ = tensors
        rows = (q.shape[1], q.shape[0]) if call.packed else q.shape[:3]
        grad_logsumexp = self.random(*rows, dtype=wide(q.dtype)) if received else None
        eager, exact = (oracle(tensors, call, dtype, grad_logsumexp) for dtype in (q.dtype, torch.float64))
        if received:
            grad_logsumexp.masked_fill_((exact["logsumexp"] == -math.inf).to(self.device), math.nan)
        found = (way or self.outcome)(tensors, call, grad_logsumexp)
        for name, ours in found.items():
            part = learned_parts(call).get(name.removeprefix("grad_"))
            expected = part.dtype if part is not None else wide(q.dtype) if name == "logsumexp" else q.dtype
            assert ours.dtype == expected, name
            ours, near, x = ours.cpu(), eager[name].to(expected), exact[name]
            if name == "logsumexp":
                assert torch.equal(ours == -math.inf, x == -math.inf), "logsumexp: other rows are empty"
            if name == "weights":
                assert not ours[x == 0].any(), "weights: of blocked or dropped keys"
            largest = self.largest_rounding(name, tensors, call, exact, received)
            if largest is not None:
                assert ours.abs().max() <= largest, name
            else:
                allowed = ulps.get(name, self.ulps(name, q, k, call))
                assert_as_exact_as_eager(ours, near, x, ulps=allowed, what=name)
        return found

    def ulps(self, name: str, q: Tensor, k: Tensor, call: AttentionParams) -> float:
        """Return the allowance of a result, in units in the last place."""
        part = learned_parts(call).get(name.removeprefix("grad_"))
        # The gradient of a bias is a sum of terms that are rounded, through the output, to q's type.
        coarser = 1.0 if part is None else max(1.0, torch.finfo(q.dtype).eps / torch.finfo(part.dtype).eps)
        longest = (
            max(call.packed.max_seqlen_q, call.packed.max_seqlen_k) if call.packed else max(q.shape[2], k.shape[2])
        )
        if self.backend == "native" and name != "grad_distance_bias":
            if name == "grad_bias" and q.dtype in HALVES:
                return 8.0 * max(summed(name, q, k, call), longest) ** 0.5 * coarser
            # The oracle of fp64 is fp64 too, so its own rounding is as large as the kernel's.
            return 8.0 * (longest**0.5 if q.dtype == torch.float64 else 1.0)
        if part is not None:
            return 4.0 * summed(name, q, k, call) ** 0.5 * coarser
        if name in ("grad_k", "grad_v"):  # sums over all queries of all heads of their group
            Lq = call.packed.max_seqlen_q if call.packed else q.shape[2]
            return 4.0 * (q.shape[1] // k.shape[1] * Lq) ** 0.5
        return 4.0

    def largest_rounding(self, name, tensors, call, exact, received: bool) -> float | None:
        """Return the largest rounding error of a Triton gradient that is 0 by cancellation; None for all others.

        One of the cancelling terms comes from the output, which is rounded to its dtype. Eager never rounds it, so
        eager's error is no measure.
        """
        if self.backend == "native":
            return None
        q, k, v, grad_out = tensors
        if name in ("grad_q", "grad_k") and exact[name].numel() and not exact[name].any():  # one visible key a row
            largest = grad_out.abs().max() * v.abs().max() * max(q.abs().max(), k.abs().max())
            return float(torch.finfo(q.dtype).eps * largest * q.shape[-1] * abs(call.scale))
        of_each_query = name == "grad_bias" and not call.packed and call.bias.shape[3] == 1
        if of_each_query and not received:  # the softmax does not see it
            full = dataclasses.replace(call, bias=call.bias.expand(*q.shape[:3], k.shape[2]))
            terms = oracle(tensors, full, torch.float64, None)[name].abs().max()
            return float(self.ulps(name, q, k, call) * torch.finfo(call.bias.dtype).eps * terms)
        return None

    def check_decode(self, q, k, v, lengths, page_size: int | None = None, **parts: Any) -> dict[str, Tensor]:
        """Hold a call of decoding to the gate. Caches are (B, Hkv, S, D); with a page size they are laid out in pages.

        Args:
            parts: the other arguments of the oracle; causal is 0 and scale D ** -0.5 if they are left out.
        """
        options = {"causal": 0, "window": None, "scale": q.shape[-1] ** -0.5} | parts
        stored, table = (k, v), None
        if page_size is not None:
            *stored, table = in_pages((k, v), page_size, lengths)
            options = of_capacity(options, k.shape[2], table.shape[1] * page_size)
        found = self.decode(q, *stored, lengths, table, **options)
        eager, exact = (decode_oracle(q, *stored, lengths, table, options, dtype) for dtype in (q.dtype, torch.float64))
        for ours, near, x, name in zip(found.values(), eager, exact, found, strict=True):
            assert ours.dtype == (q.dtype if name == "out" else wide(q.dtype)), name
            assert torch.equal(ours.cpu() == -math.inf, x == -math.inf), name
            ulps = 4.0 if self.backend == "triton" else 8.0 * (k.shape[2] ** 0.5 if q.dtype == torch.float64 else 1.0)
            assert_as_exact_as_eager(ours.cpu(), near.to(ours.dtype), x, ulps=ulps, what=name)
        return found

    def decode(self, q, k, v, lengths, table=None, **options: Any) -> dict[str, Tensor]:
        """Output and logsumexp of decoding; causal is 0, and scale D ** -0.5, if they are left out."""
        options = {"causal": 0, "window": None, "scale": q.shape[-1] ** -0.5} | options
        op = torch.ops.transformer_fast.attention_decode
        with tfast.backend(self.backend):
            return dict(zip(("out", "logsumexp"), op(q, k, v, lengths, table, **options), strict=True))

    def assert_same_bits(self, run: Callable[[], Iterable[Tensor]]) -> None:
        """Hold several runs to the same bits, on another number of threads each."""
        assert_same_bits(run, self.threads)


NATIVE = Kernels(
    "native",
    torch.device("cpu"),
    batch=(2, 4, 2),
    few=(1, 2, 1),
    lengths=(70, 150),
    repeated=((2, 4, 2, 70, 90), (1, 1, 1, 150, 300), (1, 2, 1, 2, 900)),
    threads=(1, 2, 3, 2),
)
TRITON = Kernels(
    "triton", GPU, batch=(2, 2, 1), few=(1, 1, 1), lengths=(33, 40), repeated=((1, 2, 1, 33, 40),), threads=(1, 1)
)


@pytest.fixture
def kernels() -> Kernels:
    """Return the C++ kernels. tests/interpreter has a fixture of the same name for the Triton kernels."""
    return NATIVE


@pytest.fixture(params=[torch.float32, *HALVES, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Parametrize with every dtype of the C++ kernels."""
    return request.param


def assert_same_bits(run: Callable[[], Iterable[Tensor]], threads: tuple[int, ...] = (1, 2, 3, 2)) -> None:
    """Hold several runs to the same bits, on another number of threads each."""
    before, runs = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            runs.append(list(run()))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def on(device: torch.device | str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with their tensors on a device."""
    return {name: t.to(device) if isinstance(t, Tensor) else t for name, t in given.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and their logsumexp."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def learned_parts(call: AttentionParams) -> dict[str, Tensor]:
    """Return the parts of a call that get a gradient."""
    return {name: t for name in ("bias", "distance_bias") if (t := getattr(call, name)) is not None}


def summed(name: str, q: Tensor, k: Tensor, call: AttentionParams) -> float:
    """Return the number of terms of the sum that is a bias gradient."""
    if name == "grad_bias" and call.packed:
        return q.shape[1] / call.bias.shape[0]
    if name == "grad_bias":
        return q.shape[:3].numel() * k.shape[2] / call.bias.numel()
    return q.shape[:-1].numel() / call.distance_bias.shape[:2].numel()


def oracle(tensors, call: AttentionParams, dtype: torch.dtype, grad_logsumexp: Tensor | None) -> dict[str, Tensor]:
    """Return :meth:`Kernels.outcome` of the reference, in ``dtype`` on the CPU."""
    *qkv, grad_out = (t.detach().cpu().to(dtype) for t in tensors)
    learned = {
        name: t.detach().cpu().to(torch.promote_types(dtype, t.dtype)).requires_grad_()
        for name, t in learned_parts(call).items()
    }
    leaves = [*(t.requires_grad_() for t in qkv), *learned.values()]
    options = on("cpu", call.keywords()) | learned
    weights = None
    if call.packed:
        out, _, logsumexp = attention_packed(*qkv, **options)
    else:
        empty_rows = "zero" if options.pop("zero_empty_rows") else "uniform"
        out, weights, logsumexp = attention(*qkv, **options, empty_rows=empty_rows)
    received = (grad_out,)
    if grad_logsumexp is not None:
        received = grad_out, grad_logsumexp.cpu().to(logsumexp.dtype)
    grads = torch.autograd.grad((out, logsumexp)[: len(received)], leaves, received)
    found = {"out": out.detach(), "logsumexp": logsumexp.detach()}
    found |= {f"grad_{name}": g for name, g in zip(("q", "k", "v", *learned), grads, strict=True)}
    if weights is not None:
        if call.dropout_p > 0.0:
            weights = torch.where(kept(call.dropout_p, *weights.shape), weights * rescale(call.dropout_p), 0.0)
        found["weights"] = weights.detach()
    return found


@functools.cache
def kept(dropout_p: float, *shape: int) -> Tensor:
    """Return the weights that dropout keeps, as documented."""
    return attention_keep(SEED, dropout_p, *shape)


def decode_oracle(q, k, v, lengths, table, options: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp of decoding, by the reference in ``dtype`` on the CPU."""
    q, k, v = (t.cpu().to(dtype) for t in (q, k, v))
    table = None if table is None else table.cpu()
    return attention_decode(q, k, v, lengths=lengths.cpu(), page_table=table, **on("cpu", options))


def starts(lengths: Iterable[int]) -> Tensor:
    """Return ``cu_seqlens`` of sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def in_pages(caches: tuple[Tensor, ...], page_size: int, lengths: Tensor) -> tuple[Tensor, ...]:
    """The caches (B, Hkv, S, D) as pages in any order, among pages of NaN, and their table.

    What is past the end of a cache is NaN, and entries of the table past the last key lead nowhere.
    """
    B, Hkv, S, D = caches[0].shape
    per_row = -(-S // page_size)
    order = torch.randperm(B * per_row + 3, generator=torch.Generator().manual_seed(7))[: B * per_row]
    pages = []
    for t in caches:
        padded = torch.nn.functional.pad(t.cpu(), (0, 0, 0, per_row * page_size - S), value=math.nan)
        page = torch.full((B * per_row + 3, page_size, Hkv, D), math.nan, dtype=t.dtype)
        page[order] = padded.reshape(B, Hkv, per_row, page_size, D).permute(0, 2, 3, 1, 4).flatten(0, 1)
        pages.append(page.to(t.device))
    table = order.reshape(B, per_row).to(torch.int32)
    table[torch.arange(per_row) * page_size >= lengths.cpu()[:, None]] = 2**30
    return *pages, table.to(caches[0].device)


def of_capacity(options: dict[str, Any], S: int, capacity: int) -> dict[str, Any]:
    """Return the parts of a call on a cache of S keys, for pages that hold more keys."""
    pad, more = torch.nn.functional.pad, dict(options)
    if more.get("key_ids") is not None:
        more["key_ids"] = pad(more["key_ids"], (0, capacity - S), value=-7)
    if more.get("distance_bias") is not None:
        more["distance_bias"] = pad(more["distance_bias"], (capacity - S, 0), value=math.nan)
    return more


def cached(kernels: Kernels, H: int, Hkv: int, Lq: int, S: int, D: int, lengths, dtype=torch.float32):
    """Return q, the two caches with NaN past each sequence's length, and the lengths."""
    lengths = torch.tensor(lengths, dtype=torch.int32, device=kernels.device)
    q, k, v = (kernels.random(len(lengths), h, L, D, dtype=dtype) for h, L in ((H, Lq), (Hkv, S), (Hkv, S)))
    unused = torch.arange(S, device=kernels.device) >= lengths[:, None]
    return q, *(t.masked_fill_(unused[:, None, :, None], math.nan) for t in (k, v)), lengths


def distances(kernels: Kernels, shape: tuple[int, ...], before: int, after: int) -> Tensor:
    """A bias by distance like ALiBi's, (*shape, before + after - 1), with noise so that a wrong diagonal shows.

    Args:
        before: the entry of distance 0, counted from 1: the number of queries, or the capacity of a cache.
        after: the number of keys, or of new queries.
    """
    distance = torch.arange(before + after - 1, device=kernels.device) - (before - 1)
    return kernels.random(*shape, before + after - 1) - 0.1 * distance.abs()


def outcome(call: Callable[..., Tensor], tensors, grad_out: Tensor) -> tuple[Tensor, ...]:
    """The output of a function, and the gradients of its tensors."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
