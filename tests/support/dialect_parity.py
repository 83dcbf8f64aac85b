"""Comparison of a fast dialect module with its oracle: equal weights and equal inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_fast.reference.dropout import attention_keep, elementwise_keep, rescale
from transformer_fast.testing import assert_as_exact_as_eager, fixed_dropout_seed

SEED = 20261121


class Case(NamedTuple):
    """Call of a module: constructor arguments, inputs (floats get gradients; a list is a state), and further
    arguments."""

    name: str
    arguments: tuple
    inputs: tuple
    masks: tuple = ()
    options: Mapping[str, Any] = MappingProxyType({})


def pair(fast: ModuleType, oracle: ModuleType, case: Case) -> tuple[nn.Module, nn.Module]:
    """Return the fast module and its oracle; the state dict was loaded in both directions."""
    slow = getattr(oracle, case.name)(*case.arguments, **case.options)
    for parameter in slow.parameters():  # no parameter at a value that hides a mistake
        nn.init.normal_(parameter, std=0.3)
    quick = getattr(fast, case.name)(*case.arguments, **case.options)
    assert quick.load_state_dict(slow.state_dict()) == ([], [])
    assert slow.load_state_dict(quick.state_dict()) == ([], [])
    return quick, slow


def outcome(
    module: nn.Module,
    case: Case,
    dtype: torch.dtype | None = None,
    rounded: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return outputs and every gradient, by name. rounded: a dtype to which weights and inputs are rounded first."""
    module = copy.deepcopy(module)
    if rounded is not None:
        module.to(rounded)
    module.to(device, dtype)
    leaves: dict[int, Tensor] = {}

    def given(x: Any) -> Any:
        if isinstance(x, list):
            return [given(part) for part in x]
        if isinstance(x, Tensor) and x.is_floating_point():
            if id(x) not in leaves:
                leaf = x.detach().to(rounded).to(device, dtype or x.dtype, copy=True)
                leaves[id(x)] = leaf.requires_grad_()
            return leaves[id(x)]
        return x if x is None else x.to(device)

    masks = [mask if mask is None else mask.to(device) for mask in case.masks]
    outs = _tensors(module(*map(given, case.inputs), *masks))
    generator = torch.Generator().manual_seed(1)
    used = {name: out for name, out in outs.items() if out.requires_grad}
    if used:
        cotangents = [torch.randn(out.shape, generator=generator).to(out) for out in used.values()]
        torch.autograd.backward(list(used.values()), cotangents)
    grads = {name: p.grad for name, p in [*module.named_parameters(), *enumerate(leaves.values())]}
    found = {name: out.detach() for name, out in outs.items()}
    return found | {f"grad of {name}": grad for name, grad in grads.items() if grad is not None}


def check_evaluation(fast: ModuleType, oracle: ModuleType, case: Case, device: torch.device) -> None:
    """Check that outputs and gradients pass the gate in fp32 and in bf16."""
    quick, slow = pair(fast, oracle, case)
    quick.eval(), slow.eval()
    for dtype in (None, torch.bfloat16):
        exact = outcome(slow, case, torch.float64, rounded=dtype, device=device)
        eager, actual = (outcome(module, case, dtype, device=device) for module in (slow, quick))
        hold(actual, eager, exact, f"{case.name}, {dtype}")


def hold(actual: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], what: str = "") -> None:
    """Check every part of an outcome by the gate.

    A bias before a softmax has gradient zero but for rounding: it is measured against the largest gradient.
    """
    assert actual.keys() == eager.keys() == exact.keys()
    largest = max(float(x.abs().max()) for x in exact.values())
    for part, x in exact.items():
        ulps = 8 * max(1.0, largest / max(float(x.abs().max()), 1e-30))
        assert_as_exact_as_eager(actual[part], eager[part], x, what=f"{what}: {part}", ulps=ulps)


def check_training(fast: ModuleType, oracle: ModuleType, case: Case) -> None:
    """Check results with dropout against the oracle with the same masks."""
    quick, slow = pair(fast, oracle, case)
    quick.train(), slow.train()
    with fixed_dropout_seed(SEED):
        actual = outcome(quick, case, torch.float64)
    assert replace_dropout(slow) > 0 or not any(isinstance(m, nn.Dropout) for m in quick.modules())
    expected = outcome(slow, case, torch.float64)
    assert actual.keys() == expected.keys()
    for part, x in expected.items():
        assert torch.allclose(actual[part], x, atol=1e-9, rtol=1e-7), part


def replace_dropout(module: nn.Module, heads: int = 1) -> int:
    """Replace every ``nn.Dropout`` below by one with the documented mask; return their number."""
    heads = getattr(module, "num_heads", getattr(module, "h", heads))
    on_weights = "Attention" in type(module).__name__
    count = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Dropout):
            setattr(module, name, SharedDropout(child.p, heads if on_weights else None))
            count += 1
        else:
            count += replace_dropout(child, heads)
    return count


class SharedDropout(nn.Module):
    """Dropout with the mask of seed ``SEED``, for attention weights (if ``heads`` is given) or for elements."""

    def __init__(self, p: float, heads: int | None) -> None:
        super().__init__()
        self.p, self.heads = p, heads

    def forward(self, x: Tensor) -> Tensor:
        seed = torch.tensor([SEED])
        if self.heads is None:
            keep = elementwise_keep(seed, self.p, x.numel() // x.shape[-1], x.shape[-1])
        else:
            B, H = x.shape[:2] if x.dim() == 4 else (x.shape[0] // self.heads, self.heads)
            keep = attention_keep(seed, self.p, B, H, *x.shape[-2:])
        return (x * rescale(self.p)).masked_fill(~keep.view(x.shape), 0.0)


def _tensors(result: Any, name: str = "out") -> dict[str, Tensor]:
    """Float tensors of a result, by name; lengths in a state are not compared."""
    if result is None or isinstance(result, Tensor):
        return {name: result} if result is not None and result.is_floating_point() else {}
    if isinstance(result, dict):
        return {key: value for key, value in result.items() if value is not None}
    parts: dict[str, Tensor] = {}
    for n, part in enumerate(result):
        parts |= _tensors(part, f"{name} {n}")
    return parts
