"""Calls of every public op with each option that changes its path, and ways to run them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_fast as tfast
from transformer_fast import AttentionMask, ops
from transformer_fast.ops import eager as eager_ops
from transformer_fast.ops import registry
from transformer_fast.testing import assert_as_exact_as_eager, fixed_dropout_seed

B, H, L, D = 2, 2, 19, 8
SEED = -987_654_321_987_654_321


class Call(NamedTuple):
    """A call of a public op.

    Attributes:
        op: its name in ``transformer_fast.ops``.
        function: returns the outputs.
        tensors: the arguments of ``function``, by name.
        constant: which of the float tensors have no gradient.
    """

    op: str
    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    constant: tuple[str, ...] = ()

    @property
    def leaves(self) -> list[str]:
        """Names of the tensors that have a gradient."""
        return [name for name, t in self.tensors.items() if t.is_floating_point() and name not in self.constant]

    def outputs(self, **given: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for these tensors, by default those of the call; dropout has one seed."""
        with fixed_dropout_seed(SEED):
            out = self.function(**(self.tensors | given))
        return out if isinstance(out, tuple) else (out,)

    def trained(self, frozen: tuple[str, ...] = (), grads: list[Tensor] | None = None, **given: Tensor) -> list[Tensor]:
        """Return the outputs, then the gradient of each leaf that is not frozen."""
        given = self.tensors | given
        leaves = {name: given[name].detach().requires_grad_() for name in self.leaves if name not in frozen}
        outputs = self.outputs(**(given | leaves))
        if grads is None:
            draw = Draw(3, device=outputs[0].device)
            grads = [draw.floats(*out.shape) for out in outputs]
        grads = [grad.to(out.dtype) for grad, out in zip(grads, outputs, strict=True)]
        return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves.values(), grads)]


def hold(
    call: Call, oracle: Callable[..., Any], *, ulps: float = 8, rows: int = 1, sums: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Check outputs and gradients by the gate, and return them by name.

    Args:
        call: what is tested.
        oracle: the same function in PyTorch, which takes the seed of the dropout too.
        ulps: allowance of an output, and of a gradient that is no sum over rows.
        rows: over how many rows a gradient is summed at most.
        sums: the names of the tensors whose gradients are sums over rows.
    """
    device = next(iter(call.tensors.values())).device
    seed = torch.tensor([SEED], device=device)
    plain = call._replace(function=lambda **given: oracle(**given, seed=seed))
    wide = plain._replace(tensors={n: t.double() if t.is_floating_point() else t for n, t in call.tensors.items()})
    grads = [torch.randn(out.shape, device=device).to(out.dtype) for out in call.outputs()]
    names = [*(f"output {n}" for n in range(len(grads))), *(f"grad_{leaf}" for leaf in call.leaves)]
    found = [dict(zip(names, each.trained(grads=grads), strict=True)) for each in (call, plain, wide)]
    for name, (actual, eager, exact) in zip(names, zip(*(f.values() for f in found), strict=True), strict=True):
        allowed = 4 * max(1, rows) ** 0.5 if name.removeprefix("grad_") in sums else ulps
        assert_as_exact_as_eager(actual, eager, exact, ulps=allowed, what=name)
        assert actual.dtype == eager.dtype, name
    return found[0]


def assert_equal(ours: list[Tensor], others: list[Tensor], what: str = "") -> None:
    """Assert that two results agree bit for bit."""
    for n, (a, b) in enumerate(zip(ours, others, strict=True)):
        assert torch.equal(a, b), f"{what} {n}: {(a - b).abs().max() if a.shape == b.shape else (a.shape, b.shape)}"


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Operators(TorchDispatchMode):
    """Mode that records the operators that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        """Return the recorded calls of this package's operators."""
        return [call for call in self.called if getattr(call[0], "namespace", "") == "transformer_fast"]


def by_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """Turn the eager fast path off."""
    return mock.patch.object(eager_ops, "extension", SimpleNamespace(module=lambda: None))


class Draw:
    """Random tensors of one seed."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> None:
        self.generator, self.dtype, self.device = torch.Generator().manual_seed(seed), dtype, device

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, dtype or self.dtype)

    def whole(self, *shape: int, low: int = 0, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, below, shape, generator=self.generator).to(self.device, dtype)


def calls(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    leading: tuple[int, ...] = (3, 5),
    d: int = 24,
    device: str | torch.device = "cpu",
) -> dict[str, Call]:
    """Return calls of every op except attention, on rows of a shape, by name."""
    draw = Draw(seed, dtype, device)
    x, residual, weight, bias = draw.floats(*leading, d), draw.floats(*leading, d), draw.floats(d), draw.floats(d)
    vocabulary, added = draw.floats(11, d), draw.floats(11)
    ids, table = draw.whole(*leading, below=11), draw.floats(leading[-1] + 7, d, dtype=torch.float32)
    offset = draw.whole(*leading[:-1], below=7)
    words = {"ids": ids, "weight": vocabulary}
    loss = {"x": x, "weight": vocabulary * max(1, d) ** -0.5, "bias": added}
    likely = draw.floats(*leading, 11).float().softmax(-1).to(dtype)
    by_class = draw.floats(11).abs()
    norm, drop, embed, place = ops.layer_norm, ops.dropout, ops.embed, ops.add_positional
    entropy = ops.linear_cross_entropy

    def call(name: str, function: Callable[..., Any], constant: tuple[str, ...] = (), **tensors: Tensor) -> None:
        found[name] = Call(name.partition(",")[0], function, tensors, constant)

    found: dict[str, Call] = {}
    call("layer_norm", norm, x=x, weight=weight, bias=bias)
    call("layer_norm, std", lambda x, weight: norm(x, weight, None, 1e-6, kind="std"), x=x, weight=weight)
    call("layer_norm, rms", lambda x, weight: norm(x, weight, None, kind="rms"), x=x, weight=weight)
    call("layer_norm, nothing else", lambda x: norm(x, None, None), x=x)
    call("layer_norm, a sum", norm, x=x, weight=weight, bias=bias, residual=residual)
    call("layer_norm, a sum, std", lambda **t: norm(**t, kind="std"), x=x, weight=weight, bias=bias, residual=residual)
    call(
        "layer_norm, a sum, dropout",
        lambda **t: norm(**t, dropout_p=0.3),
        x=x, weight=weight.float(), bias=bias.float(), residual=residual,
    )  # fmt: skip
    call(
        "layer_norm, a sum, rms, dropout",
        lambda x, weight, residual: norm(x, weight, None, kind="rms", residual=residual, dropout_p=0.3),
        x=x, weight=weight, residual=residual,
    )  # fmt: skip
    call("dropout, dropout", lambda x: drop(x, 0.3), x=x)
    call("dropout, ReLU, dropout", lambda x: drop(x, 0.3, relu=True), x=x)
    call("dropout, bias, ReLU, dropout", lambda x, bias: drop(x, 0.3, bias=bias, relu=True), x=x, bias=bias)
    call("dropout, a sum, dropout", lambda **t: drop(p=0.3, **t), x=x, residual=residual)
    call("dropout, bias, a sum, dropout", lambda **t: drop(p=0.3, **t), x=x, bias=bias.float(), residual=residual)
    call("dropout, bias, a sum, ReLU", lambda **t: drop(p=0.0, relu=True, **t), x=x, bias=bias, residual=residual)
    call("embed", lambda **t: embed(**t, scale=3.0, offset=2, padding_idx=-1), **words, table=table)
    call("embed, offsets", embed, **words, table=table, offset=offset)
    call(
        "embed, offsets, dropout",
        lambda **t: embed(**t, padding_idx=0, dropout_p=0.3),
        **words, table=table, offset=offset.int(),
    )  # fmt: skip
    call("embed, alone, dropout", lambda ids, weight: embed(ids, weight, dropout_p=0.3), **words | {"ids": ids.int()})
    call("add_positional", lambda x, table: place(x, table, 2), x=x, table=table)
    call("add_positional, offsets", place, x=x, table=table, offset=offset)
    call("add_positional, offsets, dropout", lambda **t: place(**t, dropout_p=0.3), x=x, table=table, offset=offset)
    call("add_positional, dropout", lambda x, table: place(x, table, 0, 0.3), x=x, table=table)
    call(
        "linear_cross_entropy",
        lambda **t: entropy(**t, label_smoothing=0.1, ignore_index=3),
        **loss, target=ids,
    )  # fmt: skip
    call(
        "linear_cross_entropy, sum",
        lambda x, weight, target: entropy(x, weight, None, target, reduction="sum"),
        x=x, weight=loss["weight"], target=ids,
    )  # fmt: skip
    call(
        "linear_cross_entropy, class weights",
        lambda **t: entropy(**t, reduction="none", ignore_index=3),
        ("class_weight",), **loss, target=ids, class_weight=by_class,
    )  # fmt: skip
    call(
        "linear_cross_entropy, probabilities",
        lambda **t: entropy(**t, label_smoothing=0.1),
        ("class_weight",), **loss, target=likely, class_weight=by_class,
    )  # fmt: skip
    call("linear", ops.linear, **loss)
    for op in registry.OPS.values():  # an op without calls of its own here has those of its record
        if op.kernels != "attention" and op.name not in {known.op for known in found.values()}:
            for case in op.cases(registry.Draw(torch.device(device))):
                call(f"{op.name}, {case.name}", case.run, **{name: t.to(dtype) for name, t in case.inputs.items()})
    return found


def attention_calls(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Call]:
    """Return calls of attention that differ in something other than the mask, by name."""
    draw = Draw(seed, dtype)
    qkv = {name: draw.floats(B, 4, length, D) for name, length in (("q", 6), ("k", 7), ("v", 7))}
    keep, padding = draw.whole(B, 1, 6, 7, below=3) > 0, draw.whole(B, 1, 1, 7, below=3) > 0
    lengths, added = draw.whole(B, low=1, below=8), draw.floats(1, 4, 6, 7, dtype=torch.float32)

    def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, padding: Tensor) -> Tensor:
        mask = AttentionMask.lengths(lengths) & AttentionMask.keep(padding)
        return tfast.attention(q, k, v, mask, causal=1, dropout_p=0.3)

    def call(name: str, function: Callable[..., Any], constant: tuple[str, ...] = (), **tensors: Tensor) -> None:
        found[f"attention, {name}"] = Call("attention", function, tensors, constant)

    found: dict[str, Call] = {}
    call("plain", tfast.attention, **qkv)
    call("padding, dropout", padded, **qkv, lengths=lengths, padding=padding)
    call(
        "keep, bias",
        lambda **t: tfast.attention(**t, scale=0.2, empty_rows="zero"),
        ("bias",), **qkv, mask=keep, bias=added,
    )  # fmt: skip
    call("learned bias", tfast.attention, **qkv, bias=draw.floats(1, 4, 6, 7))
    call(
        "learned bias of keys",
        lambda **t: tfast.attention(**t, dropout_p=0.2),
        **qkv,
        bias=draw.floats(2, 1, 1, 7, dtype=torch.float32),
    )
    call(
        "learned bias, few queries",
        tfast.attention,
        **qkv | {"q": qkv["q"][:, :, :2].contiguous(), "bias": draw.floats(2, 4, 2, 7, dtype=torch.float32)},
    )  # fmt: skip
    call("sinks", tfast.attention, **qkv, sinks=draw.floats(4, dtype=torch.float32))
    return found


def token_calls(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Call]:
    """Return calls of packed attention, of decoding and of torch's function, by name."""
    draw, tokens = Draw(seed, dtype), 12
    packed = {name: draw.floats(tokens, H, D) for name in "qkv"}
    packed["starts"] = torch.tensor([0, int(draw.whole(low=1, below=tokens)), tokens], dtype=torch.int32)
    cached = {"q": draw.floats(B, 4, 3, D), "k_cache": draw.floats(B, H, L, D), "v_cache": draw.floats(B, H, L, D)}
    cached["lengths"] = draw.whole(B, low=3, below=L + 1)
    paged = {"q": cached["q"], "k_cache": draw.floats(6, 4, H, D), "v_cache": draw.floats(6, 4, H, D)}
    paged |= {"lengths": draw.whole(B, low=3, below=9).int(), "page_table": draw.whole(B, 2, below=6).int()}
    distances = {"slopes": draw.floats(4, dtype=torch.float32).abs()}
    sinks = draw.floats(H, dtype=torch.float32)
    decode, documents, alibi = ops.attention_decode, AttentionMask.documents, AttentionMask.alibi

    def call(name: str, function: Callable[..., Any], tensors: dict[str, Tensor]) -> None:
        found[name] = Call(name.partition(",")[0], function, tensors)

    def pack(starts: Tensor, **given: Any) -> Any:
        return ops.attention_packed(**given, cu_seqlens_q=starts, cu_seqlens_k=starts)

    found: dict[str, Call] = {}
    call("attention_packed", lambda **t: pack(**t, causal=True), packed)
    call("attention_packed, logsumexp", lambda **t: pack(**t, return_logsumexp=True), packed)
    call(
        "attention_packed, documents, dropout",
        lambda ids, **t: pack(**t, mask=documents(ids), dropout_p=0.2),
        packed | {"ids": draw.whole(1, tokens, below=3)},
    )
    call(
        "attention_packed, distances, sinks",
        lambda slopes, **t: pack(**t, mask=alibi(slopes), softcap=3.0),
        packed | {"slopes": distances["slopes"][:H], "sinks": sinks},
    )
    qkv, two = {name: packed[name] for name in "qkv"}, torch.tensor([0, 5, tokens], dtype=torch.int32)
    call(
        "attention_packed, bias, from the end",
        lambda bias, used, **t: pack(two, **t, bias=bias, seqused_k=used, causal=True, bottom_right=True),
        qkv | {"bias": draw.floats(H, 5**2 + (tokens - 5) ** 2), "used": draw.whole(2, below=6).int()},
    )
    call(
        "attention_packed, keep, weights",
        lambda keep, **t: pack(**t, mask=AttentionMask.keep(keep), return_weights=True)[0],
        packed | {"keep": draw.whole(tokens, below=2) > 0},
    )
    call("attention_decode", decode, cached)
    call(
        "attention_decode, all keys",
        lambda **t: decode(**t, causal=False, scale=0.3),
        cached | {"lengths": cached["lengths"].int()},
    )
    call("attention_decode, pages", decode, paged)
    call("attention_decode, capped", lambda **t: decode(**t, softcap=3.0), cached)
    call(
        "attention_decode, documents",
        lambda queries, keys, **t: decode(**t, mask=documents(queries, keys)),
        cached | {"queries": draw.whole(B, 3, below=2), "keys": draw.whole(B, L, below=2)},
    )
    call("attention_decode, distances", lambda slopes, **t: decode(**t, mask=alibi(slopes)), cached | distances)
    qkv = {name: draw.floats(B, H, L, D) for name in ("query", "key", "value")}
    sdpa = ops.scaled_dot_product_attention
    call("scaled_dot_product_attention, bool", sdpa, qkv | {"attn_mask": draw.whole(B, 1, L, L, below=2).bool()})
    call(
        "scaled_dot_product_attention, float",
        lambda **t: sdpa(**t, dropout_p=0.2),
        qkv | {"attn_mask": draw.floats(H, L, L)},
    )
    return found


def _documents(draw: Draw) -> Tensor:
    return draw.whole(B, L, below=3).sort(1).values


MASKS: dict[str, tuple[Callable[[Tensor], AttentionMask], Callable[[Draw], Tensor]]] = {
    "lengths int64": (AttentionMask.lengths, lambda draw: draw.whole(B, low=1, below=L + 1)),
    "lengths int32": (AttentionMask.lengths, lambda draw: draw.whole(B, low=1, below=L + 1, dtype=torch.int32)),
    "lengths int16": (AttentionMask.lengths, lambda draw: draw.whole(B, low=1, below=L + 1, dtype=torch.int16)),
    "lengths per query": (AttentionMask.lengths, lambda draw: draw.whole(B, L, low=2, below=L + 1)),
    "lengths for all queries": (AttentionMask.lengths, lambda draw: draw.whole(B, 1, low=1, below=L + 1)),
    # With offset 0 the look-ahead of another option would cut off all that a prefix adds.
    "prefix": (lambda t: AttentionMask.prefix(t, -L // 2), lambda draw: draw.whole(B, low=1, below=L + 1)),
    "documents int64": (AttentionMask.documents, _documents),
    "documents int32": (AttentionMask.documents, lambda draw: _documents(draw).int()),
    "documents past int32": (AttentionMask.documents, lambda draw: _documents(draw) * 2**40),
    "keys of documents": (lambda t: AttentionMask.documents(torch.arange(L).view(1, L) // 7, t), _documents),
    "keep": (AttentionMask.keep, lambda draw: draw.whole(B, 1, L, L, below=2).bool()),
    "keep of keys": (AttentionMask.keep, lambda draw: draw.whole(B, 1, 1, L, below=2).bool()),
    "bias": (AttentionMask.bias, lambda draw: draw.floats(H, L, L)),
    "alibi": (AttentionMask.alibi, lambda draw: draw.floats(H).abs()),
    "relative": (AttentionMask.relative, lambda draw: draw.floats(8, H)),
}
"""A mask and the tensor that it is made of, by name."""
COPIED_MASKS: dict[str, tuple[Callable[[Tensor], AttentionMask], Callable[[Draw], Tensor]]] = {
    "keep of integers": (AttentionMask.keep, lambda draw: draw.whole(B, 1, L, L, below=2)),
    "blocked": (AttentionMask.blocked, lambda draw: draw.whole(B, 1, 1, L, below=2).float()),
}
"""Masks that hold a copy of the tensor, so a later write does not change them."""


def masked_call(mask: str, seed: int = 0, **options: Any) -> Call:
    """Return a call of attention with a mask of :data:`MASKS` or :data:`COPIED_MASKS`."""
    make, drawn = (MASKS | COPIED_MASKS)[mask]
    draw = Draw(seed)
    qkv = {name: draw.floats(B, H, L, D) for name in "qkv"}
    constant = ("part",) if mask == "blocked" else ()
    return Call(
        "attention",
        lambda q, k, v, part: tfast.attention(q, k, v, make(part), **options),
        {**qkv, "part": drawn(draw)},
        constant,
    )


def masked_calls() -> dict[str, Call]:
    """Return a call of attention with each mask of :data:`MASKS`, by name."""
    return {f"attention, {mask}": masked_call(mask) for mask in MASKS}
