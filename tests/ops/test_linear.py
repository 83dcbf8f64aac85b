"""Linear layer against ``F.linear``: values, gradients of first and second order, and calls that go to torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import OLD_TORCH
from op_calls import on_threads
from torch import Tensor, nn

import transformer_fast as tfast
from transformer_fast import ops
from transformer_fast.dialects import d2l, tensorflow
from transformer_fast.layers.linear import Linear, apply_in_order, apply_linear
from transformer_fast.ops.linear import products_by

SHAPES = [  # leading dimensions, in, out: below and above what goes to oneDNN; gradients that transpose either side
    ((3,), 4, 2),
    ((64,), 64, 96),
    ((2, 512), 64, 96),
    ((300,), 700, 500),
    ((7, 101), 333, 517),
    ((2048,), 40, 1000),
    ((2048,), 1000, 40),
    ((4100,), 1, 2050),
    ((4100,), 2050, 1),
]
NODE = "transformer_fast::linear_backward"


@pytest.fixture
def by_onednn() -> Iterator[None]:
    with products_by("onednn"):
        yield


def inputs(leading: tuple[int, ...], width: int, outputs: int, bias: bool = True) -> list[Tensor]:
    torch.manual_seed(width)
    shapes = [(*leading, width), (outputs, width), *([(outputs,)] if bias else [])]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def bound(terms: int, size: Tensor) -> Tensor:
    """Bound of the rounding error of a sum of `terms` products whose absolute values sum to `size`, in any order.

    One sum in 1e8 exceeds this statistical bound of Higham and Mary, "A New Approach to Probabilistic Rounding Error
    Analysis", 2019.
    """
    return 6 * math.sqrt(terms) * 2.0**-24 * size + 1e-37


@pytest.mark.cover("values")
@pytest.mark.parametrize("library", ["onednn", "aten"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("leading", "width", "outputs"), SHAPES)
def test_values_and_gradients(leading: tuple[int, ...], width: int, outputs: int, bias: bool, library: str) -> None:
    given = inputs(leading, width, outputs, bias)
    with products_by(library):
        out = ops.linear(*given)
        grad = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, given, grad)]
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = F.linear(*exact)
    expected = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    x, weight = (t.detach().abs().double().flatten(0, -2) for t in exact[:2])
    g = grad.abs().double().flatten(0, -2)
    rows = x.shape[0]
    added = exact[2].abs().detach() if bias else 0.0
    bounds = [(width + 1, (x @ weight.T + added).view_as(out)), (outputs, (g @ weight).view(exact[0].shape)),
              (rows, g.T @ x), (rows, g.sum(0))]  # fmt: skip
    for actual, wanted, (terms, size) in zip(found, expected, bounds, strict=False):
        assert actual.dtype == torch.float32 and actual.shape == wanted.shape and actual.is_contiguous()
        assert ((actual.double() - wanted).abs() <= bound(terms, size)).all()


def test_large_products_go_to_onednn_and_small_ones_do_not(by_onednn: None) -> None:
    large, small = inputs((512,), 256, 256), inputs((4,), 16, 16)
    assert ops.linear(*large).grad_fn.name() == NODE and ops.linear(*small).grad_fn.name() != NODE
    with torch.backends.mkldnn.flags(enabled=False):
        assert ops.linear(*large).grad_fn.name() != NODE
    with tfast.backend("reference"):
        assert ops.linear(*large).grad_fn.name() != NODE


def assert_like_torch(compute: Callable[[Callable[..., Tensor]], tuple[Tensor, ...]], rtol: float = 1e-5) -> None:
    """Assert that our function and torch's give equal results."""
    for found, expected in zip(compute(ops.linear), compute(F.linear), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.detach().abs().max()))


@pytest.mark.parametrize(
    "view",
    [
        lambda x, w: (x, w.t()),
        lambda x, w: (x.t()[:256].t(), w[:256].t()),
        lambda x, w: (x[::2], w.t()[::3]),
        lambda x, w: (x[:, :300], w.t()[:, :300]),
    ],
    ids=["transposed", "columns", "rows", "wider"],
)
def test_strides(by_onednn: None, view: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    x, weight = torch.randn(300, 512, requires_grad=True), torch.randn(512, 400, requires_grad=True)
    rows, matrix = view(x, weight)
    bias = torch.randn(2 * len(matrix))[::2]
    grad = torch.randn(len(matrix), len(rows)).t()

    def computed(linear: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = linear(rows, matrix, bias)
        summed = torch.autograd.grad(
            linear(rows, matrix).sum(), x, retain_graph=True
        )  # the gradient is one expanded number
        return out, *torch.autograd.grad(out, (x, weight), grad, retain_graph=True), *summed

    assert_like_torch(computed)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_what_is_needed(by_onednn: None, frozen: int) -> None:
    given = inputs((512,), 256, 128)
    given[frozen].requires_grad_(False)
    trained = [t for t in given if t.requires_grad]
    assert_like_torch(lambda linear: torch.autograd.grad(linear(*given).square().sum(), trained))


def test_second_derivative(by_onednn: None) -> None:
    given = inputs((1024,), 128, 64)

    def penalty(linear: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(linear(*given).tanh().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    assert ops.linear(*given).grad_fn.name() == NODE
    assert_like_torch(penalty, rtol=1e-4)


def test_batched_gradients(by_onednn: None) -> None:
    given, grads = inputs((512,), 128, 128), torch.randn(3, 512, 128)
    assert_like_torch(lambda linear: torch.autograd.grad(linear(*given), given, grads, is_grads_batched=True))


def test_a_weight_changed_before_backward_is_noticed(by_onednn: None) -> None:
    x, weight, bias = inputs((512,), 128, 128)
    out = ops.linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensor_hooks_and_checkpointing(by_onednn: None) -> None:
    given = inputs((512,), 128, 128)
    seen: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        ops.linear(*given)
    assert sorted(seen) == [(128, 128), (512, 128)]
    again = torch.utils.checkpoint.checkpoint(ops.linear, *given, use_reentrant=False)
    torch.testing.assert_close(
        torch.autograd.grad(again.sum(), given), torch.autograd.grad(ops.linear(*given).sum(), given), rtol=0, atol=0
    )


def test_calls_that_stay_with_torch() -> None:
    x, weight, bias = (t.detach() for t in inputs((512,), 128, 128))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.linear(x, weight, bias).dtype == torch.bfloat16
    assert torch.equal(torch.vmap(ops.linear, (0, None, None))(x, weight, bias), F.linear(x, weight, bias))
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        given = [t.to(dtype) for t in (x, weight, bias)]
        assert torch.equal(ops.linear(*given), F.linear(*given))
    assert torch.equal(ops.linear(x[0], weight, bias), F.linear(x[0], weight, bias))
    assert ops.linear(x[:0], weight, bias).shape == (0, 128)
    assert ops.linear(x.to("meta"), weight.to("meta")).shape == (512, 128)
    _, tangent = torch.func.jvp(lambda x: ops.linear(x, weight), (x,), (x,))
    torch.testing.assert_close(tangent, F.linear(x, weight))
    with torch.inference_mode():
        torch.testing.assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w, b: ops.linear(x[:, :100], w, b),
        lambda x, w, b: ops.linear(x, w, b[:7]),
        lambda x, w, b: ops.linear(x, w.double(), b),
        lambda x, w, b: ops.linear(x, w[None], b),
        lambda x, w, b: ops.linear(x.tolist(), w, b),
    ],
)
def test_errors_are_those_of_torch(wrong: object) -> None:
    x, weight, bias = inputs((512,), 128, 128)
    with pytest.raises((RuntimeError, TypeError)):
        wrong(x, weight, bias)  # type: ignore[operator]


def test_module(by_onednn: None) -> None:
    module, ours = nn.Linear(256, 128), Linear(256, 128)
    ours.load_state_dict(module.state_dict())
    x = torch.randn(512, 256)
    torch.testing.assert_close(ours(x), module(x), rtol=1e-5, atol=1e-4)
    assert ours(x).grad_fn.name() == NODE and copy.deepcopy(ours)(x).grad_fn.name() == NODE
    assert apply_linear(module, x).grad_fn.name() == NODE


def test_modules_that_are_called() -> None:
    module, x, seen = nn.Linear(256, 128), torch.randn(512, 256), []
    module.register_forward_hook(lambda *_: seen.append(1))
    apply_linear(module, x)
    assert seen == [1]

    class Other(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    other = Other(256, 128)
    assert torch.equal(apply_linear(other, x), F.linear(x, other.weight, other.bias) + 1)


def nodes(out: Tensor) -> list[str]:
    """Return the names of all nodes of a graph, once per evaluation."""
    found, open_ones = {}, [out.grad_fn]
    while open_ones:
        node = open_ones.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            open_ones += [following for following, _ in node.next_functions]
    return list(found.values())


D = 256
MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and its number of large linear layers
    "TensorFlow's layer": (lambda: tensorflow.EncoderLayer(D, 4, 2 * D), 6),
    "TensorFlow's additive attention": (lambda: tensorflow.AdditiveAttention(D, D, D), 2),
    "TensorFlow's bilinear attention": (lambda: tensorflow.BilinearAttention(D, D, D), 2),
    "d2l's additive attention": (lambda: d2l.AdditiveAttention(D, 0.1, query_size=D, key_size=D), 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_the_dialects(by_onednn: None, name: str) -> None:
    make, linears = MODULES[name]
    module, x = make(), torch.randn(2, 48, D)
    out = module(x, None) if isinstance(module, tensorflow.EncoderLayer) else module(x, x, x)
    assert nodes(out[0] if isinstance(out, tuple) else out).count(NODE) == linears


def test_a_sequential_is_called_where_somebody_would_miss_it(by_onednn: None) -> None:
    network, x = tensorflow.point_wise_feed_forward_network(D, 2 * D), torch.randn(96, D)
    out, seen = apply_in_order(network, x), []
    assert nodes(out).count(NODE) == 2
    torch.testing.assert_close(out, network(x), rtol=1e-5, atol=1e-5)
    handle = network.register_forward_hook(lambda *_: seen.append("network"))
    assert torch.equal(apply_in_order(network, x), network(x))
    handle.remove()
    network[2].register_forward_hook(lambda *_: seen.append("layer"))
    apply_in_order(network, x)
    assert seen == ["network", "network", "layer"]


def test_the_same_on_any_number_of_threads_and_for_any_number_of_rows(by_onednn: None) -> None:
    given = inputs((600,), 256, 384)
    results = []
    for count in (1, 2) if OLD_TORCH else (1, 2, 3):  # oneDNN of PyTorch 2.11 splits a sum for three
        with on_threads(count):
            out = ops.linear(*given)
            results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for result in results[1:]:
        assert all(map(torch.equal, results[0], result))
    assert torch.equal(ops.linear(given[0][:300], *given[1:]), results[0][0][:300])
