"""A call of attention by a configuration, checked by the gate of tests/fuzz/fuzz_gate.py."""

from __future__ import annotations

import torch
from torch import Tensor

import transformer_fast as tfast
from transformer_fast.masks.distance import distance_table
from transformer_fast.reference import attention as reference
from transformer_fast.reference.dropout import attention_keep, rescale
from transformer_fast.testing import assert_as_exact_as_eager, poisoned_memory

from .fuzz_config import DEVICE, GIVEN, LAYOUTS, Config, combinations, config, configs
from .fuzz_gate import hold
from .fuzz_inputs import bounds_of, draw_bias, draw_mask, draw_special, given, normal, used_before, window_of

__all__ = ["DEVICE", "Config", "check", "combinations", "config", "configs"]


def check_padded(c: Config) -> None:
    generator = c.generator
    shapes = [(c.B, c.H, c.Lq, c.D), (c.B, c.Hkv, c.Lk, c.D), (c.B, c.Hkv, c.Lk, c.Dv)]
    qkv = [as_given(normal(shape, c, generator), c) for shape in shapes]
    mask, parts = draw_mask(c, generator)
    bias = draw_bias(c, generator)
    special = draw_special(c, generator, c.B, c.Lq, c.Lk)
    scale = c.D**-0.5 if c.scale is None else c.scale
    asked = {"weights": {"return_weights": True}, "dropped": {"return_weights": "dropped"}}
    asked |= {"logsumexp": {"return_logsumexp": True}, "out": {}}

    def ours(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, leaves: dict[str, Tensor], seed: Tensor
    ) -> tuple[Tensor, ...]:
        options = {"scale": c.scale, "softcap": c.softcap, "dropout_p": c.dropout_p, "empty_rows": c.empty_rows}
        options |= {"sinks": leaves.get("sinks"), **asked[c.outputs]}
        found = tfast.attention(q, k, v, mask & special.mask(leaves), bias=bias, **options)
        return found if isinstance(found, tuple) else (found,)

    def oracle(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, leaves: dict[str, Tensor], seed: Tensor
    ) -> tuple[Tensor, ...]:
        options = {"scale": scale, "softcap": c.softcap, "dropout_p": c.dropout_p, "empty_rows": c.empty_rows}
        options |= {"seed": seed, "sinks": leaves.get("sinks")}
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        added = special.dense_bias(leaves, c.Lq, c.Lk, wide)
        bias = added if bias is None else bias if added is None else bias + added
        out, weights, logsumexp = reference.attention(q, k, v, **parts, **special.oracle_ids(), bias=bias, **options)
        if c.outputs == "dropped" and c.dropout_p > 0:
            kept = attention_keep(seed, c.dropout_p, *weights.shape)
            weights = torch.where(kept, weights * rescale(c.dropout_p), 0.0)
        more = {"weights": (weights,), "dropped": (weights,), "logsumexp": (logsumexp,), "out": ()}
        return out, *more[c.outputs]

    masks = [*mask.tensors().values(), *(special.given_ids or ())]
    used_before(masks, lambda: ours(*qkv, bias, special.leaves, None), c)
    hold(c, ours, oracle, qkv, bias, special, rows=c.H // c.Hkv * c.Lq, scale=scale)


def check_packed(c: Config) -> None:
    generator = c.generator
    lengths = [torch.randint(0, n + 1, (c.B,), generator=generator) for n in (c.Lq, c.Lk)]
    if c.layout == LAYOUTS[1]:
        lengths[1] = lengths[0]
    starts = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32).to(DEVICE) for n in lengths]
    Tq, Tk = (int(n.sum()) for n in lengths)
    shapes = [(Tq, c.H, c.D), (Tk, c.Hkv, c.D), (Tk, c.Hkv, c.Dv)]
    qkv, sequences = [as_given(normal(shape, c, generator), c) for shape in shapes], [given(t, c) for t in starts]
    special = draw_special(c, generator, 1, Tq, Tk)
    scale = c.D**-0.5 if c.scale is None else c.scale

    def ours(
        q: Tensor, k: Tensor, v: Tensor, bias: None, leaves: dict[str, Tensor], seed: Tensor
    ) -> tuple[Tensor, ...]:
        options = {"mask": window_of(c) & special.mask(leaves), "causal": bool(c.causal), "scale": c.scale}
        options |= {"dropout_p": c.dropout_p, "empty_rows": c.empty_rows, "softcap": c.softcap}
        options |= {"sinks": leaves.get("sinks")}
        return (tfast.attention_packed(q, k, v, *sequences, **options),)

    def oracle(
        q: Tensor, k: Tensor, v: Tensor, bias: None, leaves: dict[str, Tensor], seed: Tensor
    ) -> tuple[Tensor, ...]:
        longest = [max(n.tolist()) for n in lengths]
        packing = dict(
            zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*starts, *longest), strict=True)
        )
        options = {**bounds_of(c), "scale": scale, "dropout_p": c.dropout_p, "seed": seed, "softcap": c.softcap}
        options |= {"zero_empty_rows": c.empty_rows == "zero", "sinks": leaves.get("sinks")}
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        options |= {"distance_bias": special.mask(leaves).table(*longest, wide), **special.oracle_ids(packed=True)}
        return reference.attention_packed(q, k, v, **packing, **options)[:1]

    used_before([*sequences, *(special.given_ids or ())], lambda: ours(*qkv, None, special.leaves, None), c)
    hold(c, ours, oracle, qkv, None, special, rows=c.H // c.Hkv * c.Lq, scale=scale)


def check_decode(c: Config) -> None:
    generator = c.generator
    q, k, v = (normal(s, c, generator) for s in [(c.B, c.H, c.Lq, c.D), *[(c.B, c.Hkv, c.Lk, c.D)] * 2])
    lengths = torch.randint(0, c.Lk + 1, (c.B,), generator=generator).to(DEVICE)
    scale = c.D**-0.5 if c.scale is None else c.scale
    stored, table, S = (k, v), None, c.Lk
    if c.number % 2:
        size = 16
        pages = -(-c.Lk // size)
        room = [torch.nn.functional.pad(t, (0, 0, 0, pages * size - c.Lk)) for t in (k, v)]
        order = torch.randperm(c.B * pages, generator=generator).to(DEVICE)
        stored = [t.transpose(1, 2).reshape(c.B * pages, size, c.Hkv, c.D)[order] for t in room]
        table, S = torch.argsort(order).view(c.B, pages).to(torch.int32), pages * size
    special = draw_special(c, generator, c.B, c.Lq, S)
    options = {"softcap": c.softcap, "sinks": special.leaves.get("sinks"), "scale": c.scale, "causal": bool(c.causal)}
    cached = given(lengths, c), None if table is None else given(table, c)

    def ours() -> Tensor:
        mask = window_of(c) & special.mask(special.leaves)
        return tfast.attention_decode(q, *stored, cached[0], page_table=cached[1], mask=mask, **options)

    used_before([t for t in (*cached, *(special.given_ids or ())) if t is not None], ours, c)
    with poisoned_memory():
        actual = ours()
    # Memory past the keys of a page is not read.
    ids = {name: t[:, : c.Lk] if name == "key_ids" else t for name, t in special.oracle_ids().items()}
    options |= {"lengths": lengths, **bounds_of(c), "scale": scale, **ids}

    def oracle(dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        table = distance_table(special.mask(special.leaves).distance_biases, c.Lq, c.Lk, c.Lk - 1, wide)
        return reference.attention_decode(*(t.to(dtype) for t in (q, k, v)), distance_bias=table, **options)[0]

    eager, exact = oracle(q.dtype), oracle(torch.float64)
    assert_as_exact_as_eager(actual, eager, exact, what="out")


def as_given(t: Tensor, c: Config) -> Tensor:
    """Return a query, key or value, as a tensor subclass if the configuration has subclasses."""
    return given(t, c) if c.given == GIVEN[3] else t


CHECKS = {"padded": check_padded, "packed": check_packed, "decode": check_decode}


def check(c: Config, backend: str) -> None:
    """Raise AssertionError unless the call of a configuration is as exact as eager on this backend."""
    torch.manual_seed(c.number)
    with tfast.backend(backend):
        CHECKS[c.kind](c)
