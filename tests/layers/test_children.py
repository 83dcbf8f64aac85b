"""A fused parent computes a child without calling it only if nobody can see the difference.

Every parent of the package, every child it has, every change that people make to a child: outputs and gradients are
those of the unfused module with the same change, in training and in evaluation. The combinations come from the code.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from changed_children import CHANGES, Change, Kept, NotApplicable
from form_arguments import fresh
from fused_parents import PARENTS, TORCH, fused, plain
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from transformer_fast import dialects, layers
from transformer_fast.layers.dropout import apply_dropout
from transformer_fast.layers.hooks import TAKES_RESIDUAL, has_role, is_plain
from transformer_fast.swap import rules as torch_swaps
from transformer_fast.swap.form import form_of
from transformer_fast.swap.forms import FORMS

MODES = ("training", "evaluation", "no gradients")


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for inner in values for t in tensors(inner)]


def run(module: nn.Module, arguments: tuple[Any, ...], mode: str) -> list[Tensor]:
    """Return outputs and, in a mode with gradients, the gradients of inputs and parameters."""
    module.train(mode == "training")
    for m in module.modules():
        if isinstance(getattr(m, "kept", None), Kept):
            m.kept.pairs.clear()
    given = tuple(map(fresh, arguments))
    inputs = [t for t in tensors(given) if t.requires_grad]
    before = [t.detach().clone() for t in tensors(given)]
    with torch.set_grad_enabled(mode != "no gradients"):
        result = module(*given)
    # T5 hands its positions from layer to layer: a dense bias, or a part of a mask.
    outs = tensors(result[0] if type(result) is tuple and hasattr(module, "is_decoder") else result)
    gradients: tuple[Tensor | None, ...] = ()
    if mode != "no gradients" and outs[0].requires_grad:
        wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
        weights = torch.linspace(-1, 1, outs[0].numel()).view_as(outs[0])
        gradients = torch.autograd.grad((outs[0] * weights).sum(), wanted, allow_unused=True)
    assert all(map(torch.equal, before, tensors(arguments))), "an argument was written to"
    for m in module.modules():
        if isinstance(getattr(m, "kept", None), Kept):
            m.kept.assert_untouched()
    return [*outs, *(torch.zeros(()) if grad is None else grad for grad in gradients)]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    if len(actual) != len(expected):
        return False
    for a, b in zip(actual, expected):
        if a.dim() == 0 or b.dim() == 0:  # no gradient on one side is a gradient of zeros on the other
            a, b = torch.broadcast_tensors(a, b)
        if a.shape != b.shape or not torch.allclose(a, b, atol=2e-4, rtol=2e-3):
            return False
    return True


def changed(module: nn.Module, path: str, change: Change) -> nn.Module:
    """Return a copy with a change."""
    module = copy.deepcopy(module)
    change(module, path)
    return module


def eager(module: nn.Module, arguments: tuple[Any, ...], mode: str) -> list[Tensor]:
    """Run a plain module so that it calls every child; PyTorch's fast path for encoder layers calls none."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return run(module, arguments, mode)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


STACKS = {
    "hand-written rms encoder", "hand-written annotated decoder", "hand-written classic decoder", "layers Encoder",
    "hand-written d2l decoder, the chapter's", "hand-written d2l decoder that counts on", "hand-written d2l encoder",
    "hand-written tensorflow encoder", "hand-written tensorflow decoder", "dialects tensorflow.Transformer",
    "dialects tensorflow.Decoder", "dialects tensorflow.Encoder", "dialects d2l.TransformerEncoder",
    "layers Transformer", "hand-written classic encoder", "layers Decoder", "torch TransformerEncoder, two layers",
}  # fmt: skip
"""Parents that run with --all only, besides the four of the short list: each takes as long as ten layers."""
SINGLE = {"torch LayerNorm", "torch RMSNorm", "torch Embedding", "torch Dropout"}
SINGLE |= {n for n, parent in PARENTS.items() if n.startswith("hand-written") and not any(parent.make().children())}
"""Parents without a child."""

WITH_CHILDREN = [
    pytest.param(name, marks=pytest.mark.slow("a whole stack") if name in STACKS else ())
    for name in PARENTS
    if name not in SINGLE
]


@pytest.mark.cover("values")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", WITH_CHILDREN)
def test_a_changed_child_is_not_passed_over(name: str, change: Change) -> None:
    parent = PARENTS[name]
    base = plain(parent)
    arguments = parent.arguments()
    swapped = fused(parent, base)
    wrong, children = [], [path for path, _ in base.named_modules() if path]
    assert children
    for path in children:
        try:
            reference = changed(base, path, change)
        except NotApplicable:
            continue
        sides = {"after": changed(swapped, path, change)}
        if parent.fuse is None:
            sides["before"] = fused(parent, reference)
        for mode in MODES:
            try:
                expected = eager(reference, arguments, mode)
            except Exception:  # such a child does not fit here, whoever computes the parent
                continue
            for when, module in sides.items():
                try:
                    right = same(run(module, arguments, mode), expected)
                except Exception as error:
                    right = False
                    when += f" ({type(error).__name__}: {error})"
                wrong += [] if right else [f"{path}, {when}, {mode}"]
    assert not wrong, "\n".join(wrong)


CHILDLESS = {
    "LayerNorm", "Linear", "Norm", "RMSNorm", "Attention", "PositionalEmbedding", "TokenEmbedding", "EncoderDecoder",
}  # fmt: skip
"""Classes without a child, and a parent that only calls its children."""


def test_every_fused_parent_is_among_the_parents() -> None:
    """Every swapped class of torch, form, layer and dialect must have an example."""
    torch_kinds = {name.partition(",")[0] for name in TORCH}
    assert torch_kinds == {kind.__name__ for kind in torch_swaps.SWAPS}
    modules = {"layers": layers, **{f"dialects {name}": getattr(dialects, name) for name in dialects.__all__}}
    for prefix, module in modules.items():
        for name in module.__all__:
            kind = getattr(module, name)
            if inspect.isclass(kind) and issubclass(kind, nn.Module):
                full = f"{prefix} {kind.__name__}" if prefix == "layers" else f"{prefix}.{kind.__name__}"
                assert full in PARENTS or kind.__name__ in CHILDLESS, f"{full} needs an example in fused_parents.py"
    known = {form.name for form in FORMS.values() if form.children}
    found = set()
    for parent in PARENTS.values():
        if parent.fuse is None:
            module = fused(parent, plain(parent))
            found |= {form.name for m in module.modules() if (form := form_of(m)) is not None}
    assert known <= found, f"forms without an example in fused_parents.py: {known - found}"


def test_none_is_plain_beside_a_hook_of_all_modules() -> None:
    with register_module_forward_hook(lambda *_: None):
        assert not is_plain(nn.Dropout()) and not has_role(layers.Norm(4), TAKES_RESIDUAL)
    assert is_plain(nn.Dropout()) and has_role(layers.Norm(4), TAKES_RESIDUAL)


def test_a_residual_is_added_to_what_a_dropout_returns() -> None:
    drop = nn.Dropout(0.0)
    drop.register_forward_hook(lambda module, args, out: 2 * out)
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(apply_dropout(drop, x, residual=residual), residual + 2 * x)
