"""Attention whose parts have usual names: what is read from the numbers, and what is left to the module's own code."""

from __future__ import annotations

import copy
from typing import Any

import handwritten as hw
import handwritten_heads as heads
import handwritten_vision as vision
import pytest
import torch
import torch.nn.functional as F
from accelerated import pair, whose
from form_arguments import B, D, L, S, keep, x
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast.accelerate.patterns.base import pattern_of


def reading(m: nn.Module) -> Any:
    """Return the formula that was read from a module."""
    tfast.accelerate(m)
    return pattern_of(m).reading  # type: ignore[union-attr]


def kinds(m: nn.Module) -> dict[Any, tuple[str, ...]]:
    return {kind: tuple(rest) for kind, *rest in reading(m).masks}


def test_masks_mean_what_the_module_makes_of_them() -> None:
    keeps = ("keep", "heads", "zero")
    assert kinds(heads.SpeechAttention(2, D)) == {("bool", 3): keeps, ("int", 3): keeps, ("float", 3): keeps}
    assert kinds(heads.TranslationAttention(2, D)) == {("bool", 3): ("keep", "heads", "nan")}
    assert kinds(heads.BertSelf(D, 2))["float", 4] == ("added", "", "nan")
    assert kinds(heads.LengthFirst(D, 2))["bool", 2] == ("blocked", "keys", "uniform")
    assert kinds(vision.WindowAttention(D, (2, 3), 2)) == {("float", 3): ("added", "windows", "nan")}
    assert kinds(hw.InvertedAttention(2, D))["bool", 3] == ("blocked", "heads", "uniform")


def test_layouts_heads_and_results() -> None:
    found = [reading(m) for m in (vision.QkvByHead(D, 4), vision.QkvGrid(D, 2), heads.LengthFirst(D, 2))]
    assert [(r.heads, r.order, r.layout) for r in found] == [
        (4, "h3d", "(B, L, d)"), (2, "3hd", "(B, Y, X, d)"), (2, "3hd", "(L, B, d)"),
    ]  # fmt: skip
    assert found[2].returned == "none" and found[2].probability == "dropout"
    assert reading(heads.BertSelf(D, 2)).residual and not reading(vision.ToQkv(D, 2, 4)).residual
    assert reading(vision.ToKv(D, D, 2, 4, norms=True)).norms_memory
    assert reading(heads.SpeechAttention(2, D)).stored == "attn"


@pytest.mark.parametrize("asked", ["weights", "a mask of another kind"])
def test_what_was_not_compared_runs_as_it_was_written(asked: str) -> None:
    make, others = {
        "weights": (lambda: heads.TranslationAttention(2, D), (keep(B, 1, S), True)),
        "a mask of another kind": (lambda: heads.SpeechAttention(2, D), (keep(1, S),)),
    }[asked]
    plain, m, _ = pair(make().eval())
    args = (x(S), x(S), x(), *others) if asked == "weights" else (x(), x(S), x(S), *others)
    assert whose(lambda: m(*args)) == set() and whose(lambda: m(*args[:3], keep(B, 1, S))) == {"ours"}
    torch.testing.assert_close(m(*args), plain(*args), rtol=0, atol=0)
    seen: list[int] = []
    next(part for part in m.modules() if isinstance(part, nn.Linear)).register_forward_hook(lambda *_: seen.append(1))
    m(*args)
    assert seen == [1]  # no child was called before
    with pytest.raises(TypeError):
        m(args[0])


def test_a_query_without_a_key_is_not_nan() -> None:
    plain, m, _ = pair(heads.TranslationAttention(2, D).eval())
    args, mask = (x(S), x(S), x()), torch.zeros(B, 1, S, dtype=torch.bool)
    assert plain(*args, mask)[0].isnan().all() and torch.equal(m(*args, mask)[0], m.output_layer.bias.expand(B, L, D))


class AlwaysWeights(vision.QkvProj):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.new_zeros(2, 2)


class Cosine(vision.QkvProj):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1))


class CallsTorch(vision.QkvProj):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


class Counts(vision.QkvProj):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Tempered(vision.QkvProj):
    def __init__(self) -> None:
        super().__init__(D, 2)
        self.temperature = nn.Parameter(torch.ones(2, 1, 1))


@pytest.mark.parametrize("kind", [AlwaysWeights, Cosine, CallsTorch, Counts])
def test_other_code_is_left(kind: type[nn.Module]) -> None:
    """Weights that are always returned, another formula, torch's own function, and a module that changes itself."""
    m = kind(D, 2)
    tfast.accelerate(m)
    assert pattern_of(m) is None
    assert (type(m).__mro__[1].__name__ == "Redirected") == (kind is CallsTorch)


def test_a_parameter_of_its_own_is_another_structure() -> None:
    assert tfast.accelerate(Tempered()).rows[0].now is None


def test_what_the_code_reads_may_change_afterwards() -> None:
    plain, m, _ = pair(vision.QkvProj(D, 2).eval())
    for model in (plain, m):
        model.num_heads, model.scale = 4, 0.7
    torch.testing.assert_close(m(inputs := x()), plain(inputs), rtol=0, atol=0)
    m.num_heads, m.scale = 2, (D // 2) ** -0.5
    assert whose(lambda: m(inputs)) == {"ours"}


def test_the_probability_of_dropout_may_change() -> None:
    m = heads.LengthFirst(D, 2).train()
    tfast.accelerate(m)
    m.dropout = 0.0
    inputs = x().transpose(0, 1)
    torch.testing.assert_close(m(*[inputs] * 3)[0], copy.deepcopy(m).eval()(*[inputs] * 3)[0])
    m.dropout = 1.0
    assert torch.equal(m(*[inputs] * 3)[0], m.out_proj.bias.expand(L, B, D))


@pytest.mark.parametrize("child", ["attend", "dropout", "norm", "to_qkv", "to_out"])
def test_hooks_on_the_parts(child: str) -> None:
    plain, m, _ = pair(vision.ToQkv(D, 2, 4).eval())
    seen: list[str] = []
    for model in (plain, m):
        model.get_submodule(child).register_forward_hook(lambda *_: seen.append(child))
    torch.testing.assert_close(m(inputs := x()), plain(inputs), atol=2e-5, rtol=2e-5)
    assert seen == [child] * 2
