"""``torch.compile(dynamic=True)`` of attention with masks, biases, slopes and lengths that a module holds.

The sizes of a module's tensors are constants of the graph, and those of its inputs are symbols. The forms below are
made from the shapes that each part of a mask may have; a test compares them with the signatures of the ops.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.ops.attention_checks import mask_by_position

GROWING = {"B": (3, 6, 9), "Q": (5, 7, 10), "K": (11, 13, 17), "T": (7, 9, 12), "S": (2, 3, 5)}
"""Batch, queries, keys, tokens of a packed batch and its sequences, call by call."""
FIXED = {"H": 4, "1": 1, "n": 8, "D": 8, "F": 2}
"""Heads, an axis that broadcasts, buckets, head_dim, and the tokens of each sequence of a packed batch but the last."""
Sizes = dict[str, int]
Kinds = dict[str, Callable[[Sizes, tuple[int, ...]], Tensor]]

KINDS: Kinds = {
    "bool": lambda sizes, shape: torch.rand(shape) > 0.3,
    "float": lambda sizes, shape: torch.rand(shape),
    "length": lambda sizes, shape: torch.randint(sizes["Q"], sizes["K"] + 1, shape),
    "id": lambda sizes, shape: torch.randint(0, 2, shape),
    "used": lambda sizes, shape: torch.ones(shape, dtype=torch.int32),
    "starts": lambda sizes, shape: starts(sizes),
}


class Form(NamedTuple):
    """A call with tensors that the module holds.

    Attributes:
        op: name of the function.
        fills: argument, or field of AttentionMask, that the tensors are for.
        shapes: shape of each tensor, a letter per axis: of GROWING or FIXED; or of a packed batch "s", the number of
            starts, "L", the tokens of the last sequence, and "P", the pairs of queries and keys.
        kind: kind of the tensors, a key of KINDS.
        given: makes keyword arguments of the tensors.
    """

    op: str
    fills: str
    shapes: tuple[str, ...]
    kind: str
    given: Callable[..., dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.op}: {self.fills} {self.kind} {', '.join(self.shapes)}"


def product(*axes: str) -> list[str]:
    return ["".join(letters) for letters in itertools.product(*axes)]


DENSE = product("B1", "H1", "Q1", "K1")


def mask_of(constructor: Callable[..., AttentionMask]) -> Callable[..., dict[str, Any]]:
    return lambda *tensors: {"mask": constructor(*tensors)}


def bound(name: str, t: Tensor) -> AttentionMask:
    return AttentionMask.intervals(t // 2, None) if name == "first_keys" else AttentionMask.intervals(None, t)


def distances(op: str, slopes: Iterable[str]) -> list[Form]:
    alibi, relative = mask_of(AttentionMask.alibi), mask_of(AttentionMask.relative)
    forms = [Form(op, "distance_biases", (shape,), "float", alibi) for shape in slopes]
    return [*forms, Form(op, "distance_biases", ("nH",), "float", relative)]


def sinks(op: str) -> Form:
    return Form(op, "sinks", ("H",), "float", lambda t: {"sinks": t})


def documents(op: str, queries: str, keys: str, batches: str = "B1") -> list[Form]:
    pairs = itertools.product(product(batches, queries), product(batches, keys))
    return [Form(op, "document_ids", pair, "id", mask_of(AttentionMask.documents)) for pair in pairs]


SLOPES = ["H", "1", *product("B1", "H1")]
FORMS = [
    *(Form("attention", "key_keep_mask" if s[2] == "1" else "keep_mask", (s,), "bool", mask_of(AttentionMask.keep))
      for s in DENSE),
    *(Form("attention", "additive_bias", (s,), "float", mask_of(AttentionMask.bias)) for s in DENSE[::3]),
    *(Form("attention", "bias", (s,), "float", lambda t: {"bias": t}) for s in DENSE),
    *(Form("attention", "key_lengths", (s,), "length", mask_of(AttentionMask.lengths))
      for s in ("B", "1", *product("B1", "Q1"))),
    *(Form("attention", "unions", (s,), "length", mask_of(AttentionMask.prefix)) for s in ("B", "1")),
    Form("attention", "unions", ("B1QK",), "bool", mask_of(lambda t: AttentionMask.keep(t) | AttentionMask.causal())),
    *(Form("attention", name, (s,), "length", mask_of(partial(bound, name)))
      for name in ("first_keys", "end_keys") for s in ("Q", "1", "BQ", "1Q", "B1", "BHQ", "1H1")),
    *documents("attention", "Q", "K"),
    *distances("attention", SLOPES),
    sinks("attention"),
    Form("attention_packed", "key_keep_mask", ("T",), "bool", mask_of(AttentionMask.keep)),
    *documents("attention_packed", "T", "T", "1"),
    *distances("attention_packed", ["H", "1", "1H"]),
    Form("attention_packed", "bias", ("HFF", "HLL"), "float", lambda *parts: {"bias": parts}),
    Form("attention_packed", "bias", ("1FF", "1LL"), "float", lambda *parts: {"bias": parts}),
    *(Form("attention_packed", "bias", (s,), "float", lambda t: {"bias": t}) for s in ("HP", "1P")),
    *(Form("attention_packed", name, ("s",), "starts", lambda t, name=name: {name: t})
      for name in ("cu_seqlens_q", "cu_seqlens_k")),
    Form("attention_packed", "seqused_k", ("S",), "used", lambda t: {"seqused_k": t}),
    sinks("attention_packed"),
    Form("attention_decode", "lengths", ("B",), "length", lambda t: {"lengths": t}),
    Form("attention_decode", "page_table", ("BK",), "used", lambda t: {"page_table": t}),
    *documents("attention_decode", "Q", "K"),
    *distances("attention_decode", SLOPES),
    sinks("attention_decode"),
    *(Form("scaled_dot_product_attention", "attn_mask", (s,), kind, lambda t: {"attn_mask": t})
      for s in (*product("Q1", "K1"), *DENSE) for kind in ("bool", "float")),
]  # fmt: skip
"""Every tensor that a module may hold for a call, in every shape that the call takes."""
BY_NAME = {form.name: form for form in FORMS}


def sizes_of(form: Form, call: int, held: bool = True) -> Sizes:
    """Sizes of a call; those of held tensors do not grow."""
    axes = set("".join(form.shapes))
    fixed = (axes | set("TS") if axes & set("TsFLP") else axes) if held else axes & set("F") and set("S")
    sizes = FIXED | {axis: grown[0 if axis in fixed else call] for axis, grown in GROWING.items()}
    S, F = sizes["S"], sizes["F"]
    last = sizes["T"] - F * (S - 1)
    return sizes | {"s": S + 1, "L": last, "P": F * F * (S - 1) + last * last}


def starts(sizes: Sizes) -> Tensor:
    """Starts of sequences of two tokens, the last of which has those that are left."""
    return torch.tensor([*range(0, 2 * sizes["S"], 2), sizes["T"]], dtype=torch.int32)


def held_by(form: Form, sizes: Sizes) -> list[Tensor]:
    return [KINDS[form.kind](sizes, tuple(sizes[axis] for axis in shape)) for shape in form.shapes]


def inputs_of(form: Form, sizes: Sizes) -> dict[str, Tensor]:
    """Tensors of a call that the module does not hold; the queries are the first."""
    B, Q, K, H, D = (sizes[axis] for axis in "BQKHD")
    shapes = {"q": (B, H, Q, D), "k": (B, 2, K, D), "v": (B, 2, K, D)}
    more: dict[str, Tensor] = {}
    if form.op == "scaled_dot_product_attention":
        shapes = {"query": (B, H, Q, D), "key": (B, H, K, D), "value": (B, H, K, D)}
    elif form.op == "attention_packed":
        shapes = {name: (sizes["T"], heads, D) for name, heads in (("q", H), ("k", 2), ("v", 2))}
        more = {"cu_seqlens_q": starts(sizes), "cu_seqlens_k": starts(sizes)}
    elif form.op == "attention_decode":
        keys = (B, 2, K, D) if form.fills != "page_table" else (B, 1, 2, D)
        shapes = {"q": (B, H, Q, D), "k_cache": keys, "v_cache": keys}
        more = {"lengths": KINDS["length"](sizes, (B,))}
    more.pop(form.fills, None)
    return {**{name: torch.randn(shape) for name, shape in shapes.items()}, **more}


class Holder(nn.Module):
    """A call of an op with tensors of the module: floats are parameters, others are buffers."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        for number, t in enumerate(held_by(form, sizes_of(form, 0))):
            if t.is_floating_point():
                self.register_parameter(f"held{number}", nn.Parameter(t, requires_grad=form.op != "attention_decode"))
            else:
                self.register_buffer(f"held{number}", t)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return result(self.form, given, [getattr(self, f"held{number}") for number in range(len(self.form.shapes))])


def result(form: Form, given: dict[str, Tensor], held: list[Tensor]) -> Tensor:
    """Output of a call."""
    function = getattr(tfast, form.op, None) or getattr(tfast.ops, form.op)
    longest: dict[str, Any] = {}
    if form.op == "attention_packed":
        longest = {"max_seqlen_q": given["q"].shape[0], "max_seqlen_k": given["k"].shape[0]}
    return function(**given, **longest, **form.given(*held))


def results(model: nn.Module, given: dict[str, Tensor], trained: list[Tensor]) -> list[Tensor]:
    """Output, and gradients of the queries and of what the module holds."""
    out = model(given)
    return [out, *torch.autograd.grad(out.square().sum(), trained)] if trained else [out]


def check(form: Form, **options: Any) -> None:
    torch._dynamo.reset()
    model = Holder(form)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, **options)
    for call in range(len(GROWING["B"])):
        given = inputs_of(form, sizes_of(form, call))
        queries = next(iter(given.values())).requires_grad_(form.op != "attention_decode")
        trained = [t for t in (queries, *model.parameters()) if t.requires_grad]
        for ours, eager in zip(results(compiled, given, trained), results(model, given, trained), strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.cover(16)
@pytest.mark.parametrize("name", BY_NAME)
def test_one_graph_for_growing_sizes(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    check(BY_NAME[name], backend=counter)
    assert counter.frame_count <= 2


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [
    "attention: bias float 1HQ1", "attention: distance_biases float H", "attention_packed: sinks float H",
    "attention: key_lengths length B", "scaled_dot_product_attention: attn_mask bool B11K",
])  # fmt: skip
def test_inductor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check(BY_NAME[name])


@pytest.mark.parametrize("op", dict.fromkeys(form.op for form in FORMS))
def test_every_tensor_of_a_call_has_a_form(op: str) -> None:
    """Arguments that may be tensors, by signature, and parts of a mask that the function does not refuse."""
    function = getattr(tfast, op, None) or getattr(tfast.ops, op)
    arguments = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
    expected = {name for name, kind in arguments.items() if "Tensor" in kind}
    expected -= {"q", "k", "v", "mask", "query", "key", "value", "k_cache", "v_cache"}
    if "mask" in arguments:
        expected |= {field.name for field in dataclasses.fields(AttentionMask) if takes(op, field)}
    assert expected == {form.fills for form in FORMS if form.op == op}


def takes(op: str, field: dataclasses.Field) -> bool:
    if field.type in ("int | None", "bool | None"):
        return False
    if op == "attention":
        return True
    try:
        mask_by_position(op, AttentionMask(**{field.name: (torch.ones(1),)}), False, op == "attention_packed")
    except ValueError:
        return False
    return True
