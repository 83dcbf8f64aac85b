"""accelerate(model, functional=True): code that calls torch's functions itself runs in a block, whose own rules
``tests/functional`` has."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable

import accelerated
import pytest
import sdpa_models as models
import torch
import torch.nn.functional as F
from accelerated import assert_copied_and_undone, copies, from_one_seed, state, step, whose
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.function_mode import counted_calls
from transformer_fast.layers import Linear
from transformer_fast.swap.rules import SWAPS
from transformer_fast.swap.swapped import IN_BLOCK, WAY

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(12) < torch.tensor([[12], [7]])
Style = tuple[Callable[..., nn.Module], tuple[Tensor, ...], list[str]]
STYLES: dict[str, Style] = {
    "gpt": (models.Gpt, (IDS,), ["Gpt", "GptBlock", "GptNorm", "GptAttention", "GptFeedForward"]),
    "vision": (models.Vision, (torch.randn(2, 3, 16, 16),), ["Vision", "VisionBlock", "VisionAttention"]),
    "encoder and decoder": (
        models.EncoderDecoder,
        (IDS, IDS[:, :9], KEEP),
        ["EncoderDecoder", "Attention", "GammaNorm", "Attend"],
    ),
}


pair = functools.partial(accelerated.pair, functional=True)


@pytest.mark.parametrize("name", STYLES)
def test_the_styles_people_write(name: str) -> None:
    """Numbers and gradients, the report, copies and undo."""
    make, inputs, classes = STYLES[name]
    model, fast, report = pair(make)
    assert list(dict.fromkeys(row.was for row in sorted(report.swapped, key=lambda r: r.path) if row.now == IN_BLOCK))
    assert {row.was for row in report.swapped if row.now == IN_BLOCK} == set(classes)
    assert sum(line.count(f"-> {IN_BLOCK}") for line in str(report).splitlines()) == 1, "one line"
    for mode in (False, True):
        torch.testing.assert_close(step(fast.train(mode), *inputs), step(model.train(mode), *inputs))
    assert whose(lambda: fast(*inputs)) == {"ours"} and whose(lambda: model(*inputs)) == {"torch"}
    assert fast.state_dict().keys() == model.state_dict().keys() and repr(fast) == repr(model)
    assert all(whose(lambda twin=twin: twin(*inputs)) == {"ours"} for twin in copies(fast))
    assert not tfast.accelerate(fast).swapped
    assert_copied_and_undone(fast, report, state(model), lambda m: m(*inputs), functional=True)
    assert whose(lambda: fast(*inputs)) == {"torch"}


@pytest.mark.parametrize("name", STYLES)
def test_without_it_they_are_left_and_their_children_are_swapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformer_fast.swap.accelerate.is_faster", lambda weight: True)  # on each processor
    make, inputs, classes = STYLES[name]
    model, fast, report = accelerated.pair(make)
    assert {row.was for row in report.left} >= set(classes)
    assert whose(lambda: fast(*inputs)) == {"torch"}
    torch.testing.assert_close(step(fast, *inputs), step(model, *inputs), atol=2e-5, rtol=2e-5)
    swaps = {nn.Linear: Linear} | {kind: swap.fast for kind, swap in SWAPS.items()}
    for before, after in zip(model.modules(), fast.modules(), strict=True):
        assert type(after) is swaps.get(type(before), type(before))
    first = " ".join(str(report).split())
    said = "where its code calls F.scaled_dot_product_attention: accelerate(model, functional=True)"
    assert first.startswith("attention: not fused in ") and said in first


@pytest.mark.parametrize("name", STYLES)
def test_dropout_is_ours_and_follows_the_seed(name: str) -> None:
    make, inputs, _ = STYLES[name]
    model, fast, _ = pair(lambda: make(dropout=0.3))
    assert whose(lambda: fast(*inputs)) == {"ours"}
    first, again = from_one_seed(*[lambda: step(fast, *inputs)] * 2)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], step(fast, *inputs)[0])
    torch.testing.assert_close(fast.eval()(*inputs), model.eval()(*inputs))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", STYLES)
def test_compiled_in_one_graph_and_exported(name: str) -> None:
    torch._dynamo.reset()
    make, inputs, _ = STYLES[name]
    model, fast, _ = pair(make)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, *inputs), step(model, *inputs))
    program = torch.export.export(fast.eval(), inputs, strict=False)
    assert "scaled_dot_product" not in str(program.graph) and "transformer_fast.attention" in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), model.eval()(*inputs))


def test_the_report_explains_a_batch() -> None:
    _, fast, report = pair(models.Gpt)
    text = str(report)
    assert text.startswith(f"attention: fused in 2 of 2 modules (GptAttention, {WAY})")
    line = report.explain(IDS).splitlines()[3]
    calls = "layer_norm in 5 of 5 calls, scaled_dot_product_attention in 2 of 2 calls"
    assert line == f"torch's functions that this package computes: {calls}"
    note = next(note for note in tfast.accelerate(fast, packed=True).notes if note.startswith("packed: "))
    assert note == "packed: padding stays in blocks (2 GptBlock): the attention of GptAttention is its own code"
    _, _, report = pair(lambda: nn.Sequential(Nothing()))
    assert "torch's functions that this package computes: none was called" in report.explain(torch.randn(2, 3))


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear, self.p = nn.Linear(16, 16), p

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=self.p)
        return x + F.dropout(self.linear(F.layer_norm(y, (16,))), self.p, self.training)


class Checkpointed(nn.Module):
    """Blocks that backward computes again, from outside of the model's forward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Block(0.4) for _ in range(2)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x

    def encode(self, x: Tensor) -> Tensor:
        """Call a block, not from forward."""
        return self.blocks[0](x)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    out = model(x)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_the_model_is_ours_both_times(reentrant: bool) -> None:
    x = torch.randn(2, 3, 5, 16)
    _, plain, _ = pair(lambda: Checkpointed(None))
    _, fast, _ = pair(lambda: Checkpointed(reentrant))
    with counted_calls() as calls:
        found = trained(fast, x)
    assert calls["scaled_dot_product_attention", True] == 4, "two in the forward pass, and two in backward"
    assert all(ours for _, ours in calls)
    assert all(map(torch.equal, found, trained(plain, x)))


def test_a_method_other_than_forward() -> None:
    model, fast, _ = pair(lambda: Checkpointed(None))
    x = torch.randn(2, 3, 5, 16)
    assert whose(lambda: fast.encode(x)) == {"ours"}
    torch.testing.assert_close(*(m.eval().encode(x) for m in pair(lambda: without_dropout(model))[:2]))


def without_dropout(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.p = 0.0
    return model


def test_attributes_methods_and_hooks_are_live() -> None:
    model, fast, report = pair(lambda: Block(0.0))
    x, seen = torch.randn(2, 3, 5, 16), []
    fast.p = 0.9
    assert not torch.equal(*(fast(x) for _ in range(2)))
    fast.p = 0.0
    handle = fast.register_forward_hook(lambda *args: seen.append(args[0]))
    fast.linear = nn.Identity()
    model.linear = nn.Identity()
    torch.testing.assert_close(fast(x), model(x))
    assert seen == [fast]
    handle.remove()
    held = fast.forward
    fast.forward = lambda x: x
    assert fast(x) is x
    del fast.forward
    report.undo()
    assert whose(lambda: held(x)) == {"torch"}, "a caller may hold the method"


def test_a_patched_class_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, _ = pair(lambda: Block(0.0))
    monkeypatch.setattr(Block, "forward", lambda self, x: F.scaled_dot_product_attention(x, x, x))
    x = torch.randn(2, 3, 5, 16)
    torch.testing.assert_close(fast(x), F.scaled_dot_product_attention(x, x, x))
    assert whose(lambda: fast(x)) == {"ours"}


def test_what_has_no_forward_of_its_own_is_left() -> None:
    class Layers(nn.ModuleList):
        """A list."""

    model = nn.Sequential(Block(0.0), Block(0.0))
    model[1].forward = model[1].forward
    model.add_module("list", Layers([Nothing()]))
    model.add_module("registers", registering()())
    report = tfast.accelerate(model, functional=True)
    assert [row.path for row in report.swapped] == ["0", "list.0"]
    assert {row.path: row.why for row in report.left} == {
        "1": "its forward was replaced",
        "list": "it has no forward of an author",
        "registers": "its class registers subclasses",
    }


def registering() -> type[nn.Module]:
    class Registers(Nothing):
        """Class that counts its subclasses."""

        def __init_subclass__(cls) -> None:
            raise AssertionError("a subclass was made")

    return Registers


def test_with_the_fused_loss() -> None:
    """Logits that are not made keep their loss inside a block."""
    model, fast = (models.Gpt(vocabulary=2**17) for _ in range(2))
    fast.load_state_dict(model.state_dict())
    tfast.accelerate(fast, functional=True, fused_loss=True)
    losses = [F.cross_entropy(m(IDS).flatten(0, 1), IDS.flatten()) for m in (fast, model)]
    with tfast.functional():
        losses.append(F.cross_entropy(fast(IDS).flatten(0, 1), IDS.flatten()))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[2], losses[1])
    grads = [
        torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (fast, model, fast), strict=True)
    ]
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[1])


class Abstract(abc.ABC, nn.Module):
    """A base like those of sentence-transformers, which an object can leave only for a class of its layout."""


class OfAbstract(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2) for _ in range(3)))


def test_a_module_of_an_abstract_class() -> None:
    (model, fast, report), x = pair(OfAbstract), torch.randn(2, 5, 8)
    assert whose(lambda: fast(x)) == {"ours"}
    torch.testing.assert_close(fast(x), model(x))
    assert_copied_and_undone(fast, report, state(model), lambda m: m(x), functional=True)


def test_a_model_without_parameters_is_explained() -> None:
    class Own(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    report = tfast.accelerate(Own(), functional=True)
    assert "scaled_dot_product_attention in 1 of 1 calls" in report.explain(torch.randn(1, 2, 3, 8))
