"""Inference tensors, such as a mask that a validation pass kept, in training.

Autograd saves no such tensor. PyTorch raises where it is a value of the computation, and trains where it is a mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from op_calls import (
    COPIED_MASKS,
    MASKS,
    B,
    Call,
    D,
    Draw,
    L,
    attention_calls,
    by_dispatcher,
    calls,
    masked_call,
    token_calls,
)
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import AttentionMask

KEEP = Draw(1).whole(B, 1, L, L, below=8) > 0
OF_KEYS = masked_call("keep of keys")
CALLS = {
    **calls(),
    **attention_calls(),
    **{name: call for name, call in token_calls().items() if call.op != "attention_decode"},
    **{f"attention, {mask}": masked_call(mask) for mask in MASKS | COPIED_MASKS},
    "attention, keep, dropout": masked_call("keep", dropout_p=0.5),
    "attention, keep, logsumexp": masked_call("keep", return_logsumexp=True),
    "attention, keep, weights": masked_call("keep", return_weights=True),
    "attention, lengths, softcap": masked_call("lengths int64", softcap=3.0),
    "attention, expanded": OF_KEYS._replace(tensors=OF_KEYS.tensors | {"part": KEEP[:, :, :1].expand(B, 2, L, L)}),
}
ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call.tensors if call.leaves != [argument]]


def torch_function(call: Call, argument: str) -> Callable[..., Tensor] | None:
    """Return PyTorch's function that saves the values of this argument too; None if there is none."""
    if "attention" in call.op and argument in ("q", "k", "v", "query", "key", "value"):
        return lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    if call.op == "linear" and argument != "bias":
        return F.linear
    if call.op == "layer_norm" and (argument == "weight" or (argument == "x" and "residual" not in call.tensors)):
        return lambda x, weight, *_: F.layer_norm(x, weight.shape, weight)
    return None


@pytest.mark.parametrize("way", ["fast path", "dispatcher"])
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_it_trains_or_raises_as_pytorch_does(name: str, argument: str, way: str) -> None:
    call = CALLS[name]
    plain = call.tensors[argument]
    with torch.inference_mode():
        once = tuple(slice(1) if stride == 0 else slice(None) for stride in plain.stride())
        made = plain[once].clone().expand(plain.shape)
    with by_dispatcher() if way == "dispatcher" else contextlib.nullcontext(), tfast.backend("native"):
        if (function := torch_function(call, argument)) is not None:
            first = list(call.tensors.items())[:3]
            given = [made if n == argument else t.clone().requires_grad_() for n, t in first]
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                function(*given)
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                call.trained((argument,), **{argument: made})
            return
        # Differentiation is the same, because the inference tensor takes no part in it.
        ours, expected = call.trained((argument,), **{argument: made}), call.trained((argument,))
    for result, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_a_change_of_the_mask_before_backward_changes_no_gradient() -> None:
    gradients = []
    for changed in (False, True):
        q, k, v = (CALLS["attention, keep"].tensors[name].clone().requires_grad_() for name in "qkv")
        with torch.inference_mode():
            mask = KEEP.clone()
        loss = tfast.attention(q, k, v, mask).square().sum()
        if changed:
            with torch.inference_mode():
                mask.fill_(True)
        gradients.append(torch.autograd.grad(loss, (q, k, v)))
    for before, after in zip(*gradients, strict=True):
        assert torch.equal(before, after)


class Attends(nn.Module):
    """Model that calls torch's attention with a mask, for accelerate."""

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
        assert any(row.now for row in tfast.accelerate(module, functional=module is caller).rows)
    ours = tfast.Transformer(11, 11, D, 1, 2, 0.1, d_ff=16)
    return {
        "a caller of torch's attention": (caller, lambda: (Draw(0).floats(B, L, D), KEEP.clone())),
        "nn.TransformerEncoder": (accelerated, lambda: (Draw(0).floats(B, L, D), None, ~KEEP[:, 0, 0])),
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
    """A graph saves its inputs, as in plain compiled PyTorch; a mask that the graph makes can be used in training."""
    with torch.inference_mode():
        keep, lengths = KEEP.clone(), torch.tensor([3, 17])
    masks = {
        "lengths": lambda: AttentionMask.lengths(lengths),
        "blocked": lambda: AttentionMask.blocked(~keep),
        "keep": lambda: AttentionMask.keep(keep),
    }
    for name, make in masks.items():
        torch._dynamo.reset()
        call = lambda q, make=make: tfast.attention(q, q, q, make()).square().sum()  # noqa: E731
        q = Draw(0).floats(B, 2, L, D).requires_grad_()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        if name != "blocked":
            plain = torch.compile(lambda q: torch.where(keep, q @ q.mT, -1e9).sum(), backend="aot_eager")
            for function in (compiled, plain):
                with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                    function(q)
            continue
        torch.testing.assert_close(*(torch.autograd.grad(f(q), q)[0] for f in (compiled, call)))
