"""Modules that a fused parent may compute without calling them: those with an unchanged forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from transformer_fast.layers import LayerNorm, Norm
from transformer_fast.layers.dropout import apply_dropout
from transformer_fast.layers.hooks import TAKES_RESIDUAL, has_role, is_plain


def replace_forward(module: nn.Module) -> None:
    module.forward = lambda x: x


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a hook in front": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a hook behind": lambda m: m.register_forward_hook(lambda *_: None),
    "a hook of the gradient": lambda m: m.register_full_backward_hook(lambda *_: None),
    "another forward": replace_forward,
    "compiled in place": lambda m: m.compile(backend="eager"),
}


@pytest.mark.parametrize("kind", [nn.Dropout, Norm, LayerNorm])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_not_plain(change: str, kind: type[nn.Module]) -> None:
    module = kind() if kind is nn.Dropout else kind(4)
    assert is_plain(module) and is_plain(module, kind)
    CHANGES[change](module)
    assert not is_plain(module)


def test_none_is_plain_beside_a_hook_of_all_modules() -> None:
    with register_module_forward_hook(lambda *_: None):
        assert not is_plain(nn.Dropout()) and not has_role(Norm(4), TAKES_RESIDUAL)
    assert is_plain(nn.Dropout())


@pytest.mark.parametrize("kind", [Norm, LayerNorm])
def test_a_subclass_has_no_role(kind: type[nn.Module]) -> None:
    assert has_role(kind(4), TAKES_RESIDUAL)
    assert not has_role(type("Own", (kind,), {})(4), TAKES_RESIDUAL)


def test_a_residual_is_added_to_what_a_dropout_returns() -> None:
    drop = nn.Dropout(0.0)
    drop.register_forward_hook(lambda module, args, out: 2 * out)
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(apply_dropout(drop, x, residual=residual), residual + 2 * x)
