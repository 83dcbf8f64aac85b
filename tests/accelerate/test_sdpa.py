"""accelerate on models that call torch's scaled_dot_product_attention: the calls are redirected."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import sdpa_models as models
import torch
from accelerated import Seen, from_one_seed, pair, seems_on_gpu, step, whose
from sdpa_forms import Attribute, Closure, Held, HeldFunction
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.utils.checkpoint import checkpoint

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.accelerate.sdpa import NAME
from transformer_fast.accelerate.sdpa import scaled_dot_product_attention as theirs_or_ours
from transformer_fast.layers.devices import ON_GPU, left_to_torch

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
KEEP = torch.arange(12) < torch.tensor([[12], [7]])
NORM, ATTENTION = "fused LayerNorm of", f"{NAME} in"
PARTS = [f"{part}.{i}" for part in ("encoder", "decoder", "cross") for i in (0, 1)]
STYLES: dict[str, tuple[Callable[..., nn.Module], tuple[Tensor, ...], dict[str, str]]] = {
    "gpt": (models.Gpt, (IDS,), {
        "tokens": "layers.Embedding", "positions": "layers.Embedding",
        "norm": f"{NORM} weight, bias and 1e-05",
        **{f"blocks.{i}.norm_{j}": f"{NORM} weight, bias and 1e-05" for i in (0, 1) for j in (1, 2)},
        **{f"blocks.{i}.attention": f"tfast.dropout in forward; {ATTENTION} forward" for i in (0, 1)},
    }),
    "vision": (models.Vision, (torch.randn(2, 3, 16, 16),), {
        "norm": "layers.LayerNorm",
        **{f"blocks.{i}.norm_{j}": "layers.LayerNorm" for i in (0, 1) for j in (1, 2)},
        **{f"blocks.{i}.attention": f"{ATTENTION} forward" for i in (0, 1)},
    }),
    "encoder and decoder": (models.EncoderDecoder, (IDS, IDS[:, :9], KEEP), {
        "tokens": "layers.Embedding",
        **{f"{part}.norm": f"{NORM} gamma, beta and 1e-05" for part in PARTS},
        **{f"{part}.attend": f"{ATTENTION} flash" for part in PARTS},
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_the_styles_people_write(name: str) -> None:
    make, inputs, expected = STYLES[name]
    model, fast, report = pair(make)
    assert {row.path: row.now for row in report.swapped if row.was not in ("nn.Dropout", "nn.Linear")} == expected
    assert report.attention and all(row.now == "through F.scaled_dot_product_attention" for row in report.attention)
    for mode in (False, True):
        torch.testing.assert_close(step(fast.train(mode), *inputs), step(model.train(mode), *inputs))
    assert whose(lambda: fast(*inputs)) == {"ours"} and whose(lambda: model(*inputs)) == {"torch"}


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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["module", "method"])
def test_backward_computes_it_again(part: str, reentrant: bool) -> None:
    """Activation checkpointing with dropout: the recomputed forward equals the first one bit for bit."""
    _, fast, _ = pair(Attribute)
    fast.dropout_p = 0.4
    x, results = torch.randn(2, 5, 16, requires_grad=True), []
    again: dict[str, Callable[[Tensor], Tensor]] = {
        "module": lambda x: checkpoint(fast, x, use_reentrant=reentrant),
        "method": lambda x: checkpoint(lambda q: fast.attend(q, q, q), x, use_reentrant=reentrant),
    }
    for call in (fast if part == "module" else lambda x: fast.attend(x, x, x), again[part]):
        given = x if part == "module" else x.unsqueeze(1)
        x.grad = None
        with Seen() as seen:
            from_one_seed(lambda call=call, given=given: call(given).square().sum().backward())
        results.append(x.grad)
        assert set(seen.calls) == {"ours"}
    assert torch.equal(*results)


def test_a_function_inside_that_backward_calls_again() -> None:
    _, fast, _ = pair(Closure)
    once = Attribute()
    once.load_state_dict(fast.state_dict())
    tfast.accelerate(once)
    once.dropout_p = fast.dropout_p = 0.4
    x, gradients = torch.randn(2, 5, 16, requires_grad=True), []
    for module in (fast, fast, once):
        with Seen() as seen:
            gradients += from_one_seed(lambda module=module: torch.autograd.grad(module(x).square().sum(), x)[0])
        assert seen.calls == ["ours"] * (1 if module is once else 2)  # forward, and once more in backward
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_threads() -> None:
    """Accelerated and other models run at the same time."""
    model, fast, _ = pair(Attribute)
    x, found = torch.randn(2, 5, 16), {}

    def run(name: str, module: nn.Module) -> None:
        found[name] = [whose(lambda: step(module, x)) for _ in range(20)]

    threads = [threading.Thread(target=run, args=pair) for pair in (("fast", fast), ("plain", model)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"fast": [{"ours"}] * 20, "plain": [{"torch"}] * 20}


def test_an_attribute_that_holds_it_can_be_set() -> None:
    model, fast, report = pair(Held)
    assert fast.chosen is theirs_or_ours and model.chosen is torchs
    fast.chosen = other = lambda q, k, v, **options: q
    assert fast.chosen is other
    fast.chosen = torchs
    assert fast.chosen is theirs_or_ours
    report.undo()
    assert fast.chosen is torchs
    fast.chosen = other
    report.undo()
    assert fast.chosen is other and not tfast.accelerate(fast).swapped
    fast.chosen = torchs
    assert tfast.accelerate(fast).swapped and fast.chosen is theirs_or_ours
    fast.chosen = module = nn.Identity()
    assert fast.chosen is module
    del fast.chosen
    fast.chosen = torchs
    assert fast.chosen is theirs_or_ours


@pytest.mark.parametrize("form", [Held, HeldFunction])
def test_a_compiled_module_calls_what_its_attribute_holds_now(form: type[nn.Module]) -> None:
    torch._dynamo.reset()
    _, fast, _ = pair(form)
    compiled, x = torch.compile(fast, fullgraph=True, backend="eager"), torch.randn(2, 5, 16)
    torch.testing.assert_close(compiled(x), fast(x))
    fast.chosen = lambda q, k, v, **options: 2 * v
    expected = 2 * fast.qkv(x).chunk(3, -1)[2]
    for call in (fast, compiled):
        torch.testing.assert_close(call(x), fast.out(expected))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ours"),
    [(torch.bfloat16, 64, True), (torch.float32, 256, True), (torch.float32, 264, False), (torch.float64, 64, False)],
)
def test_on_a_gpu_it_is_ours_where_there_are_kernels(dtype: torch.dtype, head_dim: int, ours: bool) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, head_dim, device="cuda", dtype=dtype)
        keep = torch.ones(2, 1, 5, 5, device="cuda", dtype=torch.bool)
        assert ("ours" in whose(lambda: theirs_or_ours(q, q, q, keep))) is ours
        assert ("ours" in whose(lambda: theirs_or_ours(q, q, q, is_causal=True))) is ours


def test_every_op_says_if_it_stays_with_torch_on_a_gpu() -> None:
    assert ON_GPU.keys() == backends.ON_CUDA.keys()
    assert [op for op, reason in ON_GPU.items() if reason] == ["dropout"]
    assert left_to_torch("norm", torch.device("mps")) == "no kernel here: there are no kernels for mps devices"


def test_an_attention_of_torch_with_large_heads_stays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads, swapped in ((2, True), (1, False)):
        model = seems_on_gpu(nn.MultiheadAttention(512, heads), monkeypatch)
        report = tfast.accelerate(model)
        assert bool(report.swapped) is swapped
        assert swapped or report.left[0].why == "its head_dim is 512, and the kernels take up to 256 on a GPU"


def test_other_devices_stay_with_torch() -> None:
    q = torch.empty(2, 4, 5, 8, device="meta")
    assert whose(lambda: theirs_or_ours(q, q, q, dropout_p=0.1, is_causal=True, scale=2.0)) <= {"torch"}
    assert "meta device" in tfast.accelerate(Attribute().to("meta")).left[0].why


def test_a_wrong_call_gets_the_error_it_got() -> None:
    _, fast, _ = pair(Attribute)
    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(RuntimeError, match="same dtype"):
        fast.attend(q, q.double(), q)
