"""Gate for a random call of tests/fuzz/fuzz.py: outputs and all gradients."""

from __future__ import annotations

import functools
import os
import warnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_fast.testing import assert_as_exact_as_eager, errors, fixed_dropout_seed, poisoned_memory

from .fuzz_config import DEVICE, DTYPES, Config
from .fuzz_inputs import Special

DROPOUT_SEED = 2**41 + 7
ORDERS = 8
# Largest error, in multiples of the gate, that another order of summation may excuse. One of 2,000 C++ calls (seed 21)
# was looked at twice, at 1.03 times.
MOST_BEYOND = 1.5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Every n-th configuration runs its call twice; n is larger in the interpreter, which has one thread.
RUN_AGAIN = 8 if INTERPRETED else 1


def hold(
    c: Config, ours, oracle, qkv: list[Tensor], bias: Tensor | None, special: Special, *, rows: int, scale: float
) -> None:
    """Hold every output and every gradient to the gate, and two runs of ours to the same bits.

    Eager's error depends on the order in which it sums. A tensor of few numbers can have a small error by chance. So a
    call that fails, by MOST_BEYOND at most, is held to the largest error, element by element, of eager in ORDERS orders
    of the sums over D, with a part of the scale on the query and the key, as torch's own attention has it. A warning
    names it. The interpreter's products are numpy's, so there eager is the worse, element by element, of one with
    torch's products and one with numpy's.
    """
    learned = bias is not None and c.bias == "learned"
    names = ("grad_q", "grad_k", "grad_v", "grad_bias")[: 3 + learned]
    names = (*names, *[f"grad_{name}" for name in special.leaves])
    generator = c.generator
    weights: list[Tensor] = []

    def outcome(call, dtype: torch.dtype | None, seed: Tensor) -> list[Tensor]:
        """Return the outputs, then the gradients."""
        leaves = [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in qkv]
        added = None if bias is None else (bias if dtype is None else bias.to(dtype)).detach().requires_grad_(learned)
        own = {
            name: (t if dtype is None else t.to(dtype)).detach().requires_grad_() for name, t in special.leaves.items()
        }
        outputs = list(call(*leaves, added, own, seed))
        for out in outputs[len(weights) :]:
            weights.append(torch.randn(out.shape, generator=generator).to(DEVICE))
        # The weights of a call are for people; the logsumexp has a gradient.
        ends = [0, 1] if c.outputs == "logsumexp" else [0]
        loss = sum((torch.where(outputs[i].isfinite(), outputs[i], 0.0) * weights[i]).sum() for i in ends)
        wanted = [*leaves, *([added] if learned else []), *own.values()]
        grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
        return [*[t.detach() for t in outputs], *grads]

    with fixed_dropout_seed(DROPOUT_SEED) as seed:
        seed = seed.to(DEVICE)
        with poisoned_memory():
            actual = outcome(ours, None, seed)
            again = outcome(ours, None, seed) if c.number % RUN_AGAIN == 0 else actual
    eager, exact = outcome(oracle, None, seed), outcome(oracle, torch.float64, seed)
    if INTERPRETED:
        with NumpyProducts():
            eager = worse(eager, outcome(oracle, None, seed), exact)

    @functools.cache
    def in_other_orders() -> list[Tensor]:
        worst = eager
        root = qkv[0].shape[-1] ** -0.25
        for _ in range(ORDERS - 1):
            order = torch.randperm(qkv[0].shape[-1], generator=generator)

            def reordered(q: Tensor, k: Tensor, *rest: object, order: Tensor = order) -> tuple[Tensor, ...]:
                return oracle(q[..., order] * root, k[..., order] / root, *rest)

            worst = worse(worst, outcome(reordered, None, seed), exact)
        return worst

    def gate(number: int, *, what: str, ulps: float = 4.0, rounding: float = 0.0) -> None:
        a, alone, x = actual[number], eager[number], exact[number]
        error, allowed, _ = errors(a, alone, x, ulps)
        if rounding > 0.0 and error <= allowed + rounding:
            return
        if allowed < error <= MOST_BEYOND * allowed and torch.equal(a.isfinite(), x.isfinite()):
            warnings.warn(
                f"held to eager in {ORDERS} orders, {error / allowed:.2f} times one: {what} of {c}", stacklevel=2
            )
            alone = in_other_orders()[number]
        assert_as_exact_as_eager(a, alone, x, what=what, ulps=ulps)

    for first, second in zip(actual, again, strict=True):
        assert torch.equal(first.nan_to_num(3.0), second.nan_to_num(3.0)), "two runs differ"
    outputs = len(actual) - len(names)
    for number, what in enumerate(("out", c.outputs)[:outputs]):
        if what == "logsumexp":
            assert torch.equal(actual[number] == -torch.inf, exact[number] == -torch.inf), f"{what}: other empty rows"
        gate(number, what=what)
    # The gradient of a score is a difference, and one side of it went through the output, rounded to the type. Where
    # the two are nearly equal (a row with one visible key) its ulps are theirs; eager rounds nothing there.
    subtracted = (exact[0] * weights[0]).nan_to_num(0.0).abs().sum(-1)
    subtracted = float(subtracted.max()) if subtracted.numel() else 0.0
    if c.outputs == "logsumexp":
        subtracted += float(weights[1].abs().max())
    # Gradients of fp32 parts are not rounded to the dtype, but terms from the output were, by at most this.
    limits = torch.finfo(DTYPES[c.dtype])
    most = exact[0].nan_to_num(0.0).abs() * (limits.eps / 2) + limits.smallest_normal * limits.eps / 2
    rounding = float((most * weights[0].abs()).sum())
    largest_q, largest_k = (float(t.abs().max()) if t.numel() else 0.0 for t in qkv[:2])
    sides = {"grad_q": abs(scale) * largest_k, "grad_k": abs(scale) * largest_q, "grad_v": 0.0, "grad_bias": 1.0}
    sides |= {"grad_relative": 1.0, "grad_alibi": float(max(c.Lq, c.Lk) + abs(c.offset)), "grad_sinks": 1.0}
    for number, name in enumerate(names, outputs):
        a, x = actual[number], exact[number]
        own_type = torch.float32 if name[5:] in special.leaves else DTYPES[c.dtype]
        assert a.dtype == own_type and a.shape == x.shape, name
        if a.numel() == 0:
            continue
        scores = c.B * c.H * c.Lq * c.Lk
        terms = {"grad_q": 1, "grad_bias": scores / a.numel()}.get(name, rows)
        if name[5:] in special.leaves:
            terms = scores
        cancelling = subtracted * sides[name] / max(float(x.abs().max()), 1e-30)
        gate(
            number,
            what=name,
            ulps=4.0 * terms**0.5 * max(1.0, cancelling),
            rounding=sides[name] * rounding * (name[5:] in special.leaves),
        )


def worse(some: list[Tensor], others: list[Tensor], exact: list[Tensor]) -> list[Tensor]:
    """Return, element by element, the value that is further from exact."""
    return [torch.where((b - x).abs() > (a - x).abs(), b, a) for a, b, x in zip(some, others, exact, strict=True)]


class NumpyProducts(TorchDispatchMode):
    """Matrix products of fp32 as numpy sums them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default) and args[0].dtype == torch.float32:
            first, second = (t.detach().numpy() for t in args)
            return torch.from_numpy(first @ second)
        return function(*args, **(kwargs or {}))
