"""``accelerate(model, quantize="int8")``: the numbers of the reference bit for bit, and clear errors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerated import copies
from linear_models import MODELS, D, Network, call, given, made
from op_calls import on_threads
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import extension
from transformer_fast.accelerate import Int8
from transformer_fast.inference.int8 import pack, packed_of, rows_of
from transformer_fast.ops.weight_layout import FREED, has_int8
from transformer_fast.reference.quantized_linear import gelu, int8_linear, quantize_rows

pytestmark = pytest.mark.skipif(not extension.load(), reason="needs the C++ extension")
X = given()


class Int8Reference(nn.Module):
    """A linear layer by the definition."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.bias)


def bert(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=99, intermediate_size=96, **sizes, **options)
    return transformers.BertModel(config, add_pooling_layer=False)


def difference(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_near_fp32_and_undone(name: str, free: bool) -> None:
    model, before = made(name), call(made(name))
    report = tfast.accelerate(model, quantize=Int8(free=free))
    assert report.int8 and all(has_int8(model.get_submodule(path)) for path in report.int8)
    after = call(model)
    assert 0 < difference(after, before) < 0.03
    assert torch.equal(call(model), after)
    if free:
        with pytest.raises(RuntimeError, match="undo is not possible: the fp32 weights were freed"):
            report.undo()
        assert torch.equal(call(model), after)
    else:
        report.undo()
        assert torch.equal(call(model), before) and not any(map(has_int8, model.modules()))
        assert not any("int8" in str(getattr(p, "_tensor_cache", "")) for p in model.parameters())


@torch.no_grad()
def test_bit_for_bit_the_reference_in_authors_code() -> None:
    model = made("author's code")
    exact = int8_linear(F.gelu(int8_linear(X, model.first.weight, model.first.bias)), model.second.weight)
    expected = F.linear(exact, model.head.weight, model.head.bias)
    assert tfast.accelerate(model, quantize="int8").int8 == ("first", "second")
    assert torch.equal(call(model), expected)
    for threads in (1, 2, 3):
        with on_threads(threads):
            rows = torch.cat([call(model, row[None]) for row in X.flatten(0, 1)])
            torch.testing.assert_close(rows.view(3, 7, 3), expected, rtol=0, atol=1e-6)  # the head is fp32


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Tanh()], ids=str)
@torch.no_grad()
def test_bit_for_bit_the_reference_with_an_activation(activation: nn.Module) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(hidden_size=D, intermediate_size=96)
    model = transformers.models.bert.modeling_bert.BertIntermediate(config).eval()
    model.intermediate_act_fn = activation
    product = int8_linear(X, model.dense.weight, model.dense.bias)
    exact = gelu(product, activation.approximate) if isinstance(activation, nn.GELU) else activation(product)
    report = tfast.accelerate(model, quantize="int8")
    assert torch.equal(model(X), exact) and "huggingface.ActivatedLinear" in str(report)


@torch.no_grad()
def test_bit_for_bit_the_reference_in_a_fused_parent() -> None:
    model = made("our layer")
    plain = copy.deepcopy(model)
    for name in ("q_linear", "k_linear", "v_linear", "out"):
        setattr(plain.attn, name, Int8Reference(getattr(plain.attn, name)))
    plain.ff.linear_1, plain.ff.linear_2 = Int8Reference(plain.ff.linear_1), Int8Reference(plain.ff.linear_2)
    tfast.accelerate(model, quantize="int8")
    assert torch.equal(call(model), call(plain))


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_bit_for_bit_the_reference_in_a_packed_model(packed: bool) -> None:
    torch.manual_seed(0)
    model = bert(hidden_act="relu").eval()
    plain, fp32 = copy.deepcopy(model), copy.deepcopy(model)
    report = tfast.accelerate(model, packed=packed, quantize="int8")
    assert len(report.int8) == 12
    tfast.accelerate(plain, packed=packed)
    ids, mask = torch.randint(99, (4, 12)), torch.arange(12) < torch.tensor([[12], [5], [9], [1]])
    given = {"input_ids": ids, "attention_mask": mask.long()}
    after, before = (m(**given).last_hidden_state[mask] for m in (model, fp32))
    for module in list(plain.modules()):
        for child in module.children():
            if isinstance(child, nn.Linear):
                child.__dict__["forward"] = Int8Reference(child).forward
    assert difference(after, before) < 0.03
    assert not report.padded_calls.reasons
    expected = plain(**given).last_hidden_state[mask]  # its attention computes padding too, in another order of sums
    assert torch.equal(after, expected) if not packed else difference(after, expected) < 0.01


def error_of(model: nn.Module, x: Tensor = X) -> str:
    with pytest.raises(RuntimeError) as raised:
        call(model, x)
    return str(raised.value)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_errors_say_what_to_do(name: str, free: bool) -> None:
    model = made(name)
    tfast.accelerate(model, quantize=Int8(free=free))
    if not free or any(p.requires_grad and p.dim() > 1 for p in model.parameters()):
        assert "inside torch.inference_mode()" in error_of(model)
    assert "inside torch.inference_mode()" in error_of(model, X.clone().requires_grad_())
    with torch.no_grad():
        with torch.autocast("cpu"):
            assert "leave the autocast block" in error_of(model)
        model.train()
        assert "call model.eval() first" in error_of(model)
        model.eval()
        assert "got torch.float64 on cpu" in error_of(model, X.double())
        model.to(torch.bfloat16)
        assert "got torch.bfloat16 on cpu" in error_of(model, X.bfloat16())
    frozen = made(name).requires_grad_(False)
    tfast.accelerate(frozen, quantize=Int8(free=free))
    assert not call(frozen).requires_grad


@torch.no_grad()
def test_recorded_calls() -> None:
    """A compiled call reads what was written since; nothing else records int8 weights."""
    model = made("author's code")
    tfast.accelerate(model, quantize="int8")
    compiled = torch.compile(model, backend="eager")
    for write in (lambda p: None, lambda p: p.data.mul_(1.5), lambda p: p.mul_(0.5)):
        for parameter in model.parameters():
            write(parameter)
        assert torch.equal(compiled(X), call(model))
    for record in (lambda: torch.jit.trace(model, X), lambda: torch.export.export(model, (X,))):
        with pytest.raises(Exception, match="cannot be exported or traced"):
            record()


def test_refused_models() -> None:
    with pytest.raises(ValueError, match=r"needs fp32 weights on a CPU, got torch\.bfloat16 on cpu"):
        tfast.accelerate(made("author's code").bfloat16(), quantize="int8")
    with pytest.raises(ValueError, match=r'quantize must be "int8" or an Int8\('):
        tfast.accelerate(made("author's code"), quantize="int4")
    with pytest.raises(ValueError, match="keep names no module of the model: '9'"):
        tfast.accelerate(made("author's code"), quantize=Int8(keep=["first", "9"]))
    with pytest.raises(TypeError, match="keep must be a sequence of paths"):
        Int8(keep="first")
    model = made("author's code")
    with torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is on"):
        tfast.accelerate(model, quantize="int8")
    assert type(model.first) is nn.Linear


@torch.no_grad()
def test_layers_that_stay_in_fp32() -> None:
    model = bert().eval()
    report = tfast.accelerate(model, quantize=Int8(keep=["*.1", "*.query"]))
    assert len(report.int8) == 5 and "in fp32: keep names it" in {row.why for row in report.rows}
    assert not any(".1." in path or path.endswith("query") for path in report.int8)
    head = transformers.BertForMaskedLM(model.config).eval()
    report = tfast.accelerate(head, quantize="int8")
    assert {row.path: row.why for row in report.left}["cls.predictions.decoder"] == "in fp32: it is the output layer"
    report = tfast.accelerate(made("author's code"), quantize="int8")
    assert "in fp32: it has fewer than 24 outputs" in str(report)


class Outlier(Network):
    """One weight per output is far greater than the others, so these are rounded to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.data[:, 0] *= 1000
        self.first.weight.data[0], self.first.bias.data[0] = 0, -9  # gelu makes it 0


@pytest.mark.parametrize("batch", [X, (X,), {"x": X}], ids=["tensor", "tuple", "dictionary"])
@torch.no_grad()
def test_calibration_leaves_layers_that_lose_too_much(batch: Any) -> None:
    torch.manual_seed(0)
    model = Outlier()
    report = tfast.accelerate(model, quantize=Int8(calibration=batch))
    assert report.int8 == ("first",) and model.training
    why = next(row.why for row in report.left if row.path == "second")
    error = float(why.removeprefix("in fp32: its int8 result differs by ").partition("%")[0]) / 100
    inner = F.gelu(model.first(X)) if not has_int8(model.first) else None
    assert inner is None and 0.05 < error < 2
    report.undo()
    assert len(tfast.accelerate(model, quantize=Int8(calibration=batch, largest_error=3.0)).int8) == 2


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_copies_and_pickles(name: str, free: bool) -> None:
    model = made(name)
    tfast.accelerate(model, quantize=Int8(free=free))
    expected, others = call(model), copies(model)
    del model
    assert all(torch.equal(call(other), expected) for other in others)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_state_dict_of_freed_weights(name: str) -> None:
    model, plain = made(name), made(name)
    tfast.accelerate(model, quantize=Int8(free=True))
    expected, state = call(model), model.state_dict()
    for key, value in plain.state_dict().items():
        assert state[key].shape == value.shape
        torch.testing.assert_close(state[key], value, rtol=0, atol=value.abs().max().item() / 200)
    plain.load_state_dict(state)
    assert difference(call(plain), expected) < 0.02
    with torch.random.fork_rng():
        torch.manual_seed(5)
        other = MODELS[name]().eval()
    model.load_state_dict(other.state_dict())
    tfast.accelerate(other, quantize="int8")
    assert torch.equal(call(model), call(other)) and not torch.equal(call(model), expected)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({key: value[:1] for key, value in other.state_dict().items()})


def bytes_of(model: nn.Module) -> int:
    freed = [m.__dict__[FREED] for m in model.modules() if FREED in m.__dict__]
    return sum(p.nbytes for p in model.parameters() if not p.is_meta) + sum(
        packed.nbytes for one in freed for packed in one.packed.values()
    )


def test_memory() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 2).eval()
    before = bytes_of(model)
    report = tfast.accelerate(model, quantize=Int8(free=True))
    assert bytes_of(model) < 0.27 * before
    assert "int8: 6 layers; their weights take 6.1 MiB instead of 24.0 MiB in fp32, which are freed" in str(report)


@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (64, 128), (70, 130)], ids=str)
def test_a_layout_is_taken_apart_and_made_again(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    packed = pack(weight)
    q, scale = rows_of(packed, shape[1])
    exact, exact_scale = quantize_rows(weight)
    assert torch.equal(q[: shape[0]], exact) and torch.equal(scale[: shape[0]], exact_scale)
    assert torch.equal(packed_of(q, scale), packed)


def wide(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 256)).eval()


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("width", [1, 57, 60, 61, 63, 65, 128])
@torch.no_grad()
def test_an_input_of_another_width_is_an_error(width: int, free: bool) -> None:
    model = wide()
    tfast.accelerate(model, quantize=Int8(free=free))
    with pytest.raises(RuntimeError, match=rf"x must be of shape \(\.\.\., 64\), got \(8, {width}\)"):
        model(torch.randn(8, width))


@torch.no_grad()
def test_a_weight_assigned_to_a_freed_layer_is_used() -> None:
    model, other, x = wide(), wide(1), torch.randn(5, D)
    tfast.accelerate(model, quantize=Int8(free=True))
    model(x)
    model[0].weight, model[0].bias = nn.Parameter(other[0].weight.clone()), other[0].bias
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one.state_dict()["0.weight"], other[0].weight)
    expected = copy.deepcopy(other)
    tfast.accelerate(expected, quantize="int8")
    assert torch.equal(model(x), expected(x))
    model.load_state_dict(wide(2).state_dict())
    assert torch.equal(model[0].weight, wide(2)[0].weight)
    tfast.accelerate(expected := wide(2), quantize="int8")
    assert torch.equal(model(x), expected(x))


@torch.no_grad()
def test_signs_of_columns_are_seen() -> None:
    model, x = wide(), torch.ones(4, D)
    tfast.accelerate(model, quantize="int8")
    for columns in (slice(1, 2), slice(1, None, 2), slice(None)):
        before = model(x)
        model[0].weight.data[:, columns].neg_()
        assert (model(x) - before).norm() > 0.1 * before.norm()


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"keep_weights": True}], ids=str)
@torch.no_grad()
def test_parameters_may_be_swapped(options: dict[str, Any]) -> None:
    model, other, x = wide(), wide(1), torch.randn(5, D)
    tfast.accelerate(model, **options)
    before = model(x)
    model.double()
    assert torch.equal(model.float()(x), before)
    tfast.accelerate(other, **options)
    expected = other(x)
    for mine, theirs in zip(model.parameters(), list(other.parameters()), strict=True):
        torch.utils.swap_tensors(mine, theirs)
    assert torch.equal(model(x), expected) and torch.equal(other(x), before)


class Block(nn.Module):
    """Attention and a linear layer that are called by names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(query=x, key=x, value=x, need_weights=False)[0]
        return self.linear(input=attended)


PRODUCTS = [
    *[("attention", "attention.in_proj_weight", slice(n * D, (n + 1) * D)) for n in range(3)],
    ("attention", "attention.out_proj.weight", slice(None)), ("linear", "linear.weight", slice(None)),
]  # fmt: skip
"""Layer, its weight, and rows of the weight."""


@pytest.mark.parametrize(("layer", "weight", "rows"), PRODUCTS, ids=str)
@torch.no_grad()
def test_every_product_is_calibrated(layer: str, weight: str, rows: slice) -> None:
    """In a product of these rows, one weight per output is so great that the others are rounded to zero."""
    torch.manual_seed(0)
    model, x = Block().eval(), given()
    assert tfast.accelerate(copy.deepcopy(model), quantize=Int8(calibration=x)).int8 == ("attention", "linear")
    model.get_parameter(weight)[rows, 0] *= 3000
    if weight.startswith("attention.in"):
        x[..., 0] = 0
    elif weight.startswith("attention.out"):
        model.attention.in_proj_weight[2 * D] = 0
    else:
        model.attention.out_proj.weight[0] = 0
    report = tfast.accelerate(model, quantize=Int8(calibration=x))
    assert {*report.int8} == {"attention", "linear"} - {layer}


@torch.no_grad()
def test_a_result_that_is_not_finite_stays_in_fp32() -> None:
    model, x = wide(), torch.randn(2, D)
    x[0, 0] = float("inf")
    report = tfast.accelerate(model, quantize=Int8(calibration=x))
    assert not report.int8 and "its int8 result is not finite on the calibration batch" in str(report)


@torch.no_grad()
def test_layers_of_other_classes_are_named() -> None:
    config = transformers.GPT2Config(n_embd=D, n_layer=1, n_head=4, vocab_size=99)
    report = tfast.accelerate(transformers.GPT2Model(config).eval(), quantize="int8")
    paths = {row.path for row in report.rows if row.why == "in fp32: it is no plain nn.Linear"}
    assert paths == {f"h.0.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
