"""accelerate: what it leaves as it was, what it says, and how it is undone."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import handwritten as hw
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune  # noqa: F401 - nn.utils.prune
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast.layers import torch_modules
from transformer_fast.reference import layers as reference


class OtherAttention(nn.MultiheadAttention):
    def forward(self, query: Tensor, *args: object, **kwargs: object) -> Tensor:
        return query


class Named(nn.Module):
    """The names of the classic norm, and another formula."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x / (x.norm(dim=-1, keepdim=True) + self.eps) + self.bias


class Broken(Named):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not today")


def stock() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.path: row.why for row in tfast.accelerate(model).left}


def test_parameters_optimizer_and_mode_stay() -> None:
    m = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    m.self_attn.in_proj_weight.requires_grad_(False)
    before = dict(m.named_parameters())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    tfast.accelerate(m)
    after = dict(m.named_parameters())
    assert list(before) == list(after) and all(after[name] is before[name] for name in before)
    assert not m.training and not m.self_attn.in_proj_weight.requires_grad
    assert isinstance(m, nn.TransformerEncoderLayer)
    m.train()(torch.randn(2, 3, 8)).sum().backward()
    moved = m.linear1.bias.clone()
    optimizer.step()
    assert not torch.equal(moved, m.linear1.bias)


def test_undo_and_a_second_time() -> None:
    m = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    types = [type(child) for child in m.modules()]
    report = tfast.accelerate(m)
    assert len(report.swapped) == 8
    again = tfast.accelerate(m)
    assert not again.swapped and {row.why for row in again.left} == {"it runs on the fused ops already"}
    report.undo()
    assert [type(child) for child in m.modules()] == types
    report.undo()  # nothing left to take back
    assert tfast.accelerate(m).swapped


@pytest.mark.parametrize("make", [
    lambda: reference.Transformer(11, 11, 8, 1, 2, 0.1), lambda: hw.make_model(11, 11, 2, 8, 12, 2), stock,
], ids=["classic", "annotated", "torch"])  # fmt: skip
def test_a_second_time_says_what_was_swapped_before(make: Callable[[], nn.Module]) -> None:
    m = make()
    first = tfast.accelerate(m)
    assert not first.already
    fast = [type(child) for child in m.modules()]
    again = tfast.accelerate(m)
    assert [type(child) for child in m.modules()] == fast, "swapped once more"
    assert {row.path for row in again.already} == {row.path for row in first.swapped}
    last = str(again).splitlines()[-1]
    assert f"nothing was changed: {len(first.swapped)} modules of this model run on the fused ops already" in last
    assert f"already, {len(first.left)} left" in last and "no module of this model" not in last
    again.undo()  # takes back what it did: nothing
    assert [type(child) for child in m.modules()] == fast


def test_a_second_time_swaps_what_came_since() -> None:
    m = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    tfast.accelerate(m)
    m.append(nn.LayerNorm(8))
    again = tfast.accelerate(m)
    assert [row.path for row in again.swapped] == ["2"]
    assert "1 modules swapped, 1 on the fused ops already, 0 left" in str(again)


def test_a_model_of_ours_runs_on_the_fused_ops_already() -> None:
    report = tfast.accelerate(tfast.Transformer(11, 11, 8, 1, 2, 0.1))
    assert {row.was for row in report.swapped} == {"nn.Embedding", "nn.Dropout"} and report.already == report.left
    assert f"{len(report.swapped)} modules swapped, {len(report.left)} on the fused ops already, 0 left" in str(report)


def test_what_holds_swapped_modules_says_how_many() -> None:
    """Its own code may do anything, so it is named; that it holds nothing fast would not be true."""
    found = reasons(nn.ModuleDict({"annotated": hw.make_model(11, 11, 2, 8, 12, 2)}))
    assert set(found) == {"annotated", "annotated.generator"}
    assert re.fullmatch(r"unknown structure; \d\d of the modules inside it run on the fused ops", found["annotated"])
    assert found["annotated.generator"] == "unknown structure; 0 of the modules inside it run on the fused ops"


def test_a_model_it_cannot_help_is_left_and_the_report_says_so() -> None:
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), OtherAttention(4, 2))
    types = [type(child) for child in m.modules()]
    report = tfast.accelerate(m)
    assert not report.swapped and [type(child) for child in m.modules()] == types
    text = str(report)
    assert "nothing was changed" in text and "1 Linear" in text
    assert "OtherAttention" in text and "a subclass of nn.MultiheadAttention" in text


def test_the_report_is_a_table() -> None:
    m = nn.TransformerEncoderLayer(8, 2, 16)
    lines = str(tfast.accelerate(m)).splitlines()
    assert lines[0].split() == ["module", "was", "is", "why", "not"]
    assert lines[2].split() == ["(model)", "nn.TransformerEncoderLayer", "layers.TransformerEncoderLayer"]
    assert lines[3].split() == ["self_attn", "nn.MultiheadAttention", "layers.MultiheadAttention"]
    assert lines[4].split() == ["dropout", "and", "2", "more", "nn.Dropout", "layers.Dropout"]
    assert lines[-1] == "7 modules swapped, 0 left; nothing to gain in 2 Linear, 1 NonDynamicallyQuantizableLinear"


def test_what_was_left_for_one_reason_is_one_line() -> None:
    """The rows stay in the data."""
    m = nn.ModuleDict({f"part{i}": nn.Sequential(Broken(4), nn.LayerNorm(4)) for i in range(3)})
    m["model"], m["other"] = hw.make_model(11, 11, 1, 8, 12, 2), OtherAttention(4, 2)
    report = tfast.accelerate(m)
    unknown = [row for row in report.left if row.why.startswith("unknown structure")]
    lines = [line for line in str(report).splitlines() if "unknown structure" in line]
    assert len(unknown) > 1 and len(lines) == 1
    assert lines[0].startswith(f"{unknown[0].path}, {unknown[1].path}") and f" {len(report.left)} left" in str(report)
    assert sum("part" in line and "not today" in line for line in str(report).splitlines()) == 1
    assert "part0.0, part1.0 and 1 more" in str(report) and "a subclass of nn.MultiheadAttention" in str(report)


def test_what_has_no_kernel_is_named_with_the_reason() -> None:
    m = nn.ModuleDict({
        "image": nn.LayerNorm((4, 4)),
        "clipped": nn.Embedding(5, 4, max_norm=1.0),
        "sparse": nn.Embedding(5, 4, sparse=True),
        "zero": nn.MultiheadAttention(4, 2, add_zero_attn=True),
        "biased": nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "formula": Named(4),
        "broken": Broken(4),
        "meta": nn.LayerNorm(4, device="meta"),
    })  # fmt: skip
    found = reasons(m)
    for name, reason in {
        "image": "2 dimensions", "clipped": "max_norm", "sparse": "sparse", "zero": "add_zero_attn",
        "biased": "add_bias_kv", "formula": "computes something else", "broken": "not today", "meta": "meta device",
    }.items():  # fmt: skip
        assert reason in found[name], found


def test_layers_around_another_attention_call_it() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    layer.self_attn = OtherAttention(8, 2)
    m = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, 5, 8)
    expected = m(x)
    report = tfast.accelerate(m)
    assert {"", "layers.0", "layers.1"} < {row.path for row in report.swapped}
    assert "subclass of nn.MultiheadAttention" in reasons(m)["layers.0.self_attn"]
    torch.testing.assert_close(m(x), expected)


def test_a_forward_set_on_the_module_is_respected() -> None:
    m = nn.LayerNorm(4)
    m.forward = lambda x: x + 1
    assert "replaced" in reasons(m)[""]


def test_only_modules() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        tfast.accelerate([nn.Linear(2, 2)])


@pytest.mark.parametrize("norm_first", [False, True])
def test_every_hook_fires_as_before(norm_first: bool) -> None:
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    for name in ("", "self_attn", "multihead_attn", "norm1", "norm2", "norm3", "dropout", "dropout2", "linear1"):
        m = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: tuple, out: object, seen: list = seen) -> None:
            seen.append(out[0] if isinstance(out, tuple) else out)

        m.get_submodule(name).register_forward_hook(hook)
        expected = m(x, memory)
        tfast.accelerate(m)
        torch.testing.assert_close(m(x, memory), expected)
        assert len(seen) == 2
        torch.testing.assert_close(*seen)


def test_backward_hooks_fire() -> None:
    m = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    counts: list[str] = []
    tfast.accelerate(m)
    for name in ("norm1", "dropout1", "self_attn"):
        m.get_submodule(name).register_full_backward_hook(lambda *_, name=name: counts.append(name))
    m(torch.randn(2, 3, 8, requires_grad=True)).sum().backward()
    assert sorted(counts) == ["dropout1", "norm1", "self_attn"]


def test_shared_modules_and_tied_weights() -> None:
    norm = nn.LayerNorm(8)
    m = nn.Sequential(norm, nn.Linear(8, 8), norm)
    m.table = nn.Embedding(8, 8)
    m[1].weight = m.table.weight
    report = tfast.accelerate(m)
    assert [row.path for row in report.swapped] == ["0", "table"]
    assert m[0] is m[2] and m[1].weight is m.table.weight


def test_copies_and_pickles_stay_fast() -> None:
    m = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tfast.accelerate(m)
    x = torch.randn(2, 3, 8)
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), torch.load(buffer, weights_only=False))
    for twin in copies:
        assert type(twin) is torch_modules.TransformerEncoderLayer
        assert torch.equal(twin(x), m(x))
    plain = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    plain.load_state_dict(m.state_dict())
    torch.testing.assert_close(plain(x), m(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types_can_be_changed_after(dtype: torch.dtype) -> None:
    m = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    fast = copy.deepcopy(m)
    tfast.accelerate(fast)
    x = torch.randn(2, 3, 8, dtype=dtype)
    out = fast.to(dtype)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, m.to(dtype)(x), atol=20 * torch.finfo(dtype).eps, rtol=20 * torch.finfo(dtype).eps)


def test_weights_come_beside_the_fused_kernel() -> None:
    m = nn.MultiheadAttention(8, 2, batch_first=True)
    tfast.accelerate(m)
    q, k = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    out, weights = m(q, k, k, average_attn_weights=False)
    heads = [F.linear(t, w, b).unflatten(-1, (2, 4)).transpose(1, 2) for t, w, b in zip(
        (q, k), m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3))]  # fmt: skip
    torch.testing.assert_close(weights, (heads[0] @ heads[1].mT / 2).softmax(-1))
    torch.testing.assert_close(out, m(q, k, k, need_weights=False)[0])


class Adapted(nn.Linear):
    """A low-rank adapter as a subclass of Linear."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features)
        self.down, self.up = nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Wrapped(nn.Module):
    """The same around the layer that was there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def replaced(name: str, by: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def change(m: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        setattr(m.get_submodule(parent), last, by(m.get_submodule(name)))

    return change


def classic() -> nn.Module:
    return reference.EncoderLayer(8, 2, 0.0)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], dict[str, str]]] = {
    "weight_norm": (stock, lambda m: nn.utils.parametrizations.weight_norm(m.linear1), {}),
    "weight_norm by a hook": (stock, lambda m: nn.utils.weight_norm(m.linear2), {}),
    "weight_norm, classic": (classic, lambda m: nn.utils.parametrizations.weight_norm(m.attn.q_linear), {}),
    "parametrized attention": (
        stock,
        lambda m: nn.utils.parametrizations.orthogonal(m.self_attn, "in_proj_weight"),
        {"self_attn": "parametrizations"},
    ),
    "parametrized norm": (
        stock,
        lambda m: nn.utils.parametrizations.weight_norm(m.norm1),
        {"norm1": "parametrizations"},
    ),
    "pruned": (stock, lambda m: nn.utils.prune.l1_unstructured(m.norm2, "weight", 0.5), {}),
    "adapter": (stock, replaced("linear1", Adapted), {"linear1": "unknown structure"}),
    "adapter, classic": (classic, replaced("attn.q_linear", Adapted), {"attn.q_linear": "unknown structure"}),
    "wrapper, classic": (
        classic,
        replaced("attn.q_linear", Wrapped),
        {"": "unknown", "attn": "unknown", "attn.q_linear": "unknown"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_people_do_to_their_modules(name: str, after: bool) -> None:
    """Done before, it is seen and named; done after, it is honoured all the same."""
    make, change, left = CHANGES[name]
    torch.manual_seed(1)
    m = make()
    x, fast = torch.randn(2, 3, 8), None
    if after:
        fast = copy.deepcopy(m)
        tfast.accelerate(fast)
        torch.manual_seed(2), change(fast)
    torch.manual_seed(2), change(m)
    if not after:
        found = reasons(m)
        assert found.keys() >= left.keys() and all(reason in found[path] for path, reason in left.items()), found
        fast, m = m, make()
        torch.manual_seed(2), change(m)
        m.load_state_dict(fast.state_dict())
    args = (x, None) if make is classic else (x,)
    for mode in (True, False):
        torch.testing.assert_close(fast.train(mode)(*args), m.train(mode)(*args))


@pytest.mark.parametrize("part", ["dropout_1", "attn.dropout", "norm_2", "ff"])
def test_a_part_replaced_later_is_called(part: str) -> None:
    m = classic()
    fast = copy.deepcopy(m)
    tfast.accelerate(fast)
    x = torch.randn(2, 3, 8)
    for model in (m, fast):
        replaced(part, Wrapped)(model)
    torch.testing.assert_close(fast(x, None), m(x, None))


def test_an_embedding_replaced_later_is_called() -> None:
    m = reference.Encoder(5, 8, 1, 2, 0.0)
    fast, ids = copy.deepcopy(m), torch.tensor([[1, 4, 0]])
    tfast.accelerate(fast)
    for model in (m, fast):
        replaced("embed.lut", Wrapped)(model)
    torch.testing.assert_close(fast(ids, None), m(ids, None))


def test_other_ways_to_call_a_model() -> None:
    m = nn.TransformerEncoder(stock(), 2, enable_nested_tensor=False)
    fast, x = copy.deepcopy(m), torch.randn(2, 3, 8, requires_grad=True)
    tfast.accelerate(fast)
    other = {name: p.detach() * 1.1 for name, p in m.named_parameters()}
    torch.testing.assert_close(
        torch.func.functional_call(fast, other, (x,)), torch.func.functional_call(m, other, (x,))
    )
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), m(x))
    for layer in fast.layers:
        layer.dropout.p = layer.dropout1.p = 0.5
    results = []
    for call in (fast, lambda x: checkpoint(fast, x, use_reentrant=False)):
        torch.manual_seed(3)
        out = call(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), [x, *fast.parameters()])))
    torch.testing.assert_close(*results, rtol=0, atol=0)
