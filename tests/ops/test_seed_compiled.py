"""The compiled backward uses the dropout mask of its forward, whatever the partitioner recomputes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import transformer_fast as tfast
from transformer_fast import layers, ops

B, H, L, D = 2, 2, 6, 8
WEIGHT = torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(12).view(B, L) % 5


def attention(x: Tensor) -> Tensor:
    q = x.view(B, L, H, D // H).transpose(1, 2)
    return tfast.attention(q, q.cos(), q.sin(), dropout_p=0.5).transpose(1, 2).flatten(2)


def attention_packed(x: Tensor) -> Tensor:
    q, starts = x.view(B * L, H, D // H), torch.tensor([0, 5, 12], dtype=torch.int32)
    return tfast.attention_packed(
        q, q.cos(), q.sin(), starts, starts, max_seqlen_q=7, max_seqlen_k=7, dropout_p=0.5
    ).view(B, L, D)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": attention,
    "attention_packed": attention_packed,
    "dropout": lambda x: ops.dropout(x, 0.5, residual=x.cos()),
    "layer_norm": lambda x: tfast.layer_norm(x, None, None, residual=x.cos(), dropout_p=0.5)[0],
    "embed": lambda x: tfast.embed(IDS, x[0, :5], dropout_p=0.5),
    "add_positional": lambda x: ops.add_positional(x, x[0], dropout_p=0.5),
}


def network(name: str) -> Callable[[Tensor], Tensor]:
    """Compute a sum that goes through an op with dropout twice, between products."""
    weights = torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    if name == "Transformer layer":
        torch.manual_seed(3)
        layer = layers.EncoderLayer(D, 2, d_ff=16, dropout=0.5).double().train()
        return lambda x: ((layer((x @ WEIGHT).sin(), None) @ WEIGHT).cos() * weights).sum()

    def run(x: Tensor) -> Tensor:
        for _ in range(2):
            x = (CALLS[name]((x @ WEIGHT).sin()) @ WEIGHT).cos()
        return (x * weights).sum()

    return run


def assert_gradient_is_the_slope(function: Callable[[Tensor], Tensor], eager: Callable[[Tensor], Tensor]) -> None:
    """Assert that the directional gradient is the slope of the function with one seed, and that values are those of
    eager."""
    generator = torch.Generator().manual_seed(4)
    x, direction = torch.randn(2, B, L, D, dtype=torch.float64, generator=generator)

    def at(x: Tensor, function: Callable[[Tensor], Tensor] = function) -> Tensor:
        torch.manual_seed(0)
        return function(x.clone().requires_grad_() if not x.requires_grad else x)

    x.requires_grad_()
    out = at(x)
    torch.manual_seed(5)  # a backward that draws for itself gets other numbers
    out.backward()
    assert x.grad is not None
    step = 1e-6 * direction
    slope = (at(x.detach() + step) - at(x.detach() - step)) / 2e-6
    torch.testing.assert_close((x.grad * direction).sum(), slope.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, at(x, eager))


CASES = [(name, "aot_eager_decomp_partition") for name in (*CALLS, "Transformer layer")]


@pytest.mark.cover(4)
@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("name", "backend"), [*CASES, ("attention", "inductor"), ("Transformer layer", "inductor")])
def test_any_memory_budget(name: str, backend: str, budget: float) -> None:
    torch._dynamo.reset()
    function = network(name)
    with config.patch(activation_memory_budget=budget):
        assert_gradient_is_the_slope(torch.compile(function, fullgraph=True, backend=backend), function)


def test_the_budget_of_a_region() -> None:
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        assert torch.__version__ < "2.13"
        return
    function = network("dropout")

    def in_region(x: Tensor) -> Tensor:
        with region(0.0):
            return function(x)

    torch._dynamo.reset()
    assert_gradient_is_the_slope(torch.compile(in_region, fullgraph=True), function)


def test_two_masks_of_one_graph_differ() -> None:
    torch._dynamo.reset()
    x = torch.ones(4, 32)
    compiled = torch.compile(lambda x: (ops.dropout(x, 0.5), ops.dropout(x, 0.5)), fullgraph=True)
    first, second = compiled(x)
    again, _ = compiled(x)
    assert not torch.equal(first, second) and not torch.equal(first, again)


def test_a_graph_of_make_fx_draws_at_every_run() -> None:
    x = torch.ones(4, 32)
    graph = make_fx(lambda x: ops.dropout(x, 0.5))(x)
    assert not torch.equal(graph(x), graph(x))


def save_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.transformer_fast.attention.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(*_: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


CHECKPOINTS: dict[str, dict] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, save_products)},
    "selective, all saved": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_all),
    },
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("name", ["attention", "layer_norm", "Transformer layer"])
def test_checkpoints(name: str, kind: str, compiled: bool) -> None:
    torch._dynamo.reset()
    function = network(name)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(function, x, **CHECKPOINTS[kind])

    backend = "aot_eager_decomp_partition"
    call = torch.compile(checkpointed, fullgraph=True, backend=backend) if compiled else checkpointed
    assert_gradient_is_the_slope(call, function)
