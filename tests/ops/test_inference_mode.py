"""Tensors made under torch.inference_mode, such as a mask that a validation pass kept, in training.

Autograd saves no such tensor. PyTorch raises where it is a value of the computation, and trains where it is a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask, ops
from transformer_fast.ops import _eager

B, H, L, D = 2, 2, 19, 8
IDS = torch.tensor([[1, 4, 0, 2], [3, 3, 6, 5]])


class Call(NamedTuple):
    """A call of an op: its function of named tensors, and those."""

    function: Callable[..., Tensor]
    tensors: dict[str, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def heads() -> dict[str, Tensor]:
    return {name: random(B, H, L, D, seed=n) for n, name in enumerate("qkv")}


def tokens() -> dict[str, Tensor]:
    return {name: random(9, H, D, seed=n) for n, name in enumerate("qkv")}


def attend(make: Callable[[Tensor], AttentionMask], part: Tensor, **options: float | bool) -> Call:
    return Call(
        lambda q, k, v, part: summed(tfast.attention(q, k, v, make(part), **options)), {**heads(), "part": part}
    )


def summed(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    results = results if isinstance(results, tuple) else (results,)
    return torch.stack([result.square().mean() for result in results]).sum()


KEEP = random(B, 1, L, L) > -1
IN_DOCUMENTS = torch.tensor([[1] * 7 + [2] * 12, [4] * L])
CU_SEQLENS = integers(0, 5, 9)
CALLS = {
    "attention: keep": attend(AttentionMask.keep, KEEP),
    "attention: keep with dropout": attend(AttentionMask.keep, KEEP, dropout_p=0.5),
    "attention: keep and the logsumexp": attend(AttentionMask.keep, KEEP, return_logsumexp=True),
    "attention: keep and weights": attend(AttentionMask.keep, KEEP, return_weights=True),
    "attention: blocked": attend(AttentionMask.blocked, ~KEEP),
    "attention: key padding": attend(AttentionMask.keep, KEEP[:, :, :1]),
    "attention: expanded": attend(AttentionMask.keep, KEEP[:, :, :1].expand(B, H, L, L)),
    "attention: lengths": attend(AttentionMask.lengths, integers(3, 17)),
    "attention: int64 lengths": attend(AttentionMask.lengths, integers(3, 17).long(), softcap=3.0),
    "attention: lengths of queries": attend(AttentionMask.lengths, integers(*range(1, L + 1)).expand(B, L)),
    "attention: documents": attend(AttentionMask.documents, IN_DOCUMENTS.int()),
    "attention: int64 documents": attend(AttentionMask.documents, IN_DOCUMENTS),
    "attention: bias": attend(AttentionMask.bias, random(B, 1, L, L)),
    "attention: alibi": attend(AttentionMask.alibi, random(H).abs()),
    "attention: relative": attend(lambda t: AttentionMask.relative(t, 16), random(8, H)),
    "attention: sinks": Call(
        lambda q, k, v, part: summed(tfast.attention(q, k, v, sinks=part)), {**heads(), "part": random(H)}
    ),
    "scaled_dot_product_attention: bool": Call(
        lambda q, k, v, mask: summed(tfast.scaled_dot_product_attention(q, k, v, mask)), {**heads(), "mask": KEEP}
    ),
    "scaled_dot_product_attention: float": Call(
        lambda q, k, v, mask: summed(tfast.scaled_dot_product_attention(q, k, v, mask)),
        {**heads(), "mask": random(L, L)},
    ),
    "attention_packed": Call(
        lambda q, k, v, cu_seqlens: summed(tfast.attention_packed(q, k, v, cu_seqlens, cu_seqlens, causal=True)),
        {**tokens(), "cu_seqlens": CU_SEQLENS},
    ),
    "attention_packed: documents, sinks": Call(
        lambda q, k, v, cu_seqlens, ids, sinks: summed(
            tfast.attention_packed(q, k, v, cu_seqlens, cu_seqlens, mask=AttentionMask.documents(ids), sinks=sinks)
        ),
        {**tokens(), "cu_seqlens": CU_SEQLENS, "ids": IN_DOCUMENTS[:1, :9].int(), "sinks": random(H)},
    ),
    "embed": Call(
        lambda ids, weight, table, offset: summed(
            tfast.embed(ids, weight, table, offset=offset, padding_idx=0, dropout_p=0.5)
        ),
        {"ids": IDS, "weight": random(7, D), "table": random(11, D), "offset": integers(0, 3)},
    ),
    "add_positional": Call(
        lambda x, table, offset: summed(ops.add_positional(x, table, offset, 0.5)),
        {"x": random(B, 4, D), "table": random(11, D), "offset": integers(0, 3)},
    ),
    "layer_norm": Call(
        lambda x, weight, bias, residual: summed(tfast.layer_norm(x, weight, bias, residual=residual, dropout_p=0.5)),
        {"x": random(B, L, D), "weight": random(D), "bias": random(D), "residual": random(B, L, D, seed=1)},
    ),
    "layer_norm: alone": Call(
        lambda x, weight: summed(tfast.layer_norm(x, weight, None, kind="rms")),
        {"x": random(B, D), "weight": random(D)},
    ),
    "dropout": Call(
        lambda x, bias, residual: summed(ops.dropout(x, 0.5, bias=bias, residual=residual)),
        {"x": random(B, D), "bias": random(D), "residual": random(B, D, seed=1)},
    ),
    "dropout: ReLU": Call(
        lambda x, bias: summed(ops.dropout(x, 0.5, bias=bias, relu=True)), {"x": random(B, D), "bias": random(D)}
    ),
    "linear": Call(
        lambda x, weight, bias: summed(ops.linear(x, weight, bias)),
        {"x": random(B, D), "weight": random(5, D), "bias": random(5)},
    ),
    "linear_cross_entropy": Call(
        lambda x, weight, bias, target: tfast.linear_cross_entropy(x, weight, bias, target, ignore_index=4),
        {"x": random(B, 4, D), "weight": random(7, D), "bias": random(7), "target": IDS},
    ),
}


def by_hand(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> Tensor:
    return summed((q @ k.transpose(-2, -1)).softmax(-1) @ v)


def norm(x: Tensor, weight: Tensor, **_: Tensor) -> Tensor:
    return summed(nn.functional.layer_norm(x, (D,), weight))


def linear(x: Tensor, weight: Tensor, **_: Tensor) -> Tensor:
    return summed(nn.functional.linear(x, weight))


VALUES = {
    **{(name, part): by_hand for name in CALLS if "attention" in name for part in "qkv"},
    ("layer_norm", "weight"): norm,
    ("layer_norm: alone", "x"): norm,
    ("layer_norm: alone", "weight"): norm,
    ("linear", "x"): linear,
    ("linear", "weight"): linear,
}
"""The arguments whose values PyTorch saves too, and what it raises for."""
ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call.tensors]


def test_every_op_with_a_gradient_is_here() -> None:
    without_gradient = {"attention_decode", "decompositions", "positional_table"}
    assert {name.split(":")[0] for name in CALLS} == set(ops.__all__) - without_gradient


@contextlib.contextmanager
def way_in(name: str) -> Iterator[None]:
    """Calls go by the eager fast path or by the dispatcher."""
    with contextlib.ExitStack() as stack:
        if name == "dispatcher":
            stack.enter_context(mock.patch.object(_eager, "fast_path", lambda *_: (None, False)))
            stack.enter_context(mock.patch.object(_eager, "native", lambda: None))
        stack.enter_context(tfast.backend("native"))
        yield


def trained(call: Call, inference: str | None, function: Callable[..., Tensor]) -> list[Tensor]:
    """The result and the gradients of all float tensors but the one that is made in inference mode."""
    given, leaves = {}, []
    for name, t in call.tensors.items():
        if name == inference:
            with torch.inference_mode():
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in t.stride())
                given[name] = t[once].clone().expand(t.shape)
            continue
        given[name] = t.detach().clone()
        if t.is_floating_point():
            leaves.append(given[name].requires_grad_())
    torch.manual_seed(0)
    result = function(**given)
    return [result.detach(), *torch.autograd.grad(result, leaves)]


@pytest.mark.parametrize("way", ["fast path", "dispatcher"])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_it_trains_or_raises_as_pytorch_does(name: str, argument: str, way: str) -> None:
    call = CALLS[name]
    with way_in(way):
        if (torch_function := VALUES.get((name, argument))) is not None:
            for function in (call.function, torch_function):
                with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                    trained(call, argument, function)
            return
        ours = trained(call, argument, call.function)
        # What is differentiated is the same: the tensor of inference mode takes no part in it.
        everything = trained(call, None, call.function)
    floats = [other for other, t in call.tensors.items() if t.is_floating_point()]
    plain = everything[:1] + [g for other, g in zip(floats, everything[1:], strict=True) if other != argument]
    for result, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(result, expected)


def test_a_change_of_the_mask_before_backward_changes_no_gradient() -> None:
    call = CALLS["attention: keep"]
    gradients = []
    for changed in (False, True):
        q, k, v = (t.clone().requires_grad_() for t in heads().values())
        with torch.inference_mode():
            mask = KEEP.clone()
        loss = call.function(q, k, v, mask)
        if changed:
            with torch.inference_mode():
                mask.fill_(True)
        gradients.append(torch.autograd.grad(loss, (q, k, v)))
    for before, after in zip(*gradients, strict=True):
        assert torch.equal(before, after)


class Attends(nn.Module):
    """A model that calls torch's attention with a mask, as accelerate finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.inner(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, mask)


def models() -> dict[str, tuple[nn.Module, Callable[[], tuple[object, ...]]]]:
    source = torch.randint(1, 11, (B, L), generator=torch.Generator().manual_seed(0))
    accelerated = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    caller = Attends()
    for module in (accelerated, caller):
        assert any(row.now for row in tfast.accelerate(module).rows)
    ours = tfast.Transformer(11, 11, D, 1, 2, 0.1, d_ff=16)
    return {
        "a caller of torch's attention": (caller, lambda: (random(B, L, D), KEEP.clone())),
        "nn.TransformerEncoder": (accelerated, lambda: (random(B, L, D), None, ~KEEP[:, 0, 0])),
        "tfast.Transformer": (ours, lambda: (source, source, KEEP[:, :, 0], KEEP[:, 0])),
        "tfast.Transformer on lengths": (
            ours,
            lambda: (source, source, AttentionMask.lengths(torch.tensor([3, L])), AttentionMask.causal()),
        ),
    }


@pytest.mark.parametrize("name", models())
def test_models_train_with_masks_of_a_validation_pass(name: str) -> None:
    torch.manual_seed(1)
    model, inputs = models()[name]
    results = []
    for mode in (torch.inference_mode, contextlib.nullcontext):
        with mode():
            args = inputs()
        args = (args[0].clone(), *args[1:])
        torch.manual_seed(0)
        out = model(*args)
        results.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()), allow_unused=True)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)


def test_compiled() -> None:
    """A graph saves what it was given, as plain PyTorch compiled does; what it makes of that trains."""
    with torch.inference_mode():
        keep, lengths = KEEP.clone(), torch.tensor([3, 17])
    masks = {
        "lengths": lambda: AttentionMask.lengths(lengths),
        "blocked": lambda: AttentionMask.blocked(~keep),
        "keep": lambda: AttentionMask.keep(keep),
    }
    for name, make in masks.items():
        torch._dynamo.reset()
        call = lambda q, make=make: summed(tfast.attention(q, q, q, make()))  # noqa: E731
        q = heads()["q"].requires_grad_()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        if name == "keep":
            plain = torch.compile(lambda q: torch.where(keep, q @ q.mT, -1e9).sum(), backend="aot_eager")
            for function in (compiled, plain):
                with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                    function(q)
            continue
        torch.testing.assert_close(*(torch.autograd.grad(f(q), q)[0] for f in (compiled, call)))
