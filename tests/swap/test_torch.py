"""accelerate on the modules of torch.nn: equal outputs, masks and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerated import from_one_seed, pair, seems_on_gpu
from torch import Tensor, nn
from torch_attention import INF, MASKS, E, H, L, N, S, look_ahead, padding, some_blocked, typed

import transformer_fast as tfast
from transformer_fast import backends
from transformer_fast.layers.devices import ON_GPU, left_to_torch
from transformer_fast.testing import assert_as_exact_as_eager

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.nn's own, of mismatched mask types and nested tensors


def compare(module: nn.Module, call: Callable[[nn.Module, list[Tensor]], Any], *inputs: Tensor) -> None:
    """Compare outputs and gradients of a module and an accelerated copy, by the gate in fp64 and closely in fp32."""
    _, fast, report = pair(module)
    assert report.swapped and list(fast.state_dict()) == list(module.state_dict())
    results = []
    for m, dtype in ((fast, None), (module, None), (copy.deepcopy(module), torch.float64)):
        m = m if dtype is None else m.to(dtype)
        xs = [x.detach().clone().to(dtype or x.dtype).requires_grad_(x.is_floating_point()) for x in inputs]
        out = call(m, xs)
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        torch.manual_seed(1)
        loss = sum((t * torch.randn(t.shape).to(t.dtype)).sum() for t in outs)
        tensors = [x for x in xs if x.requires_grad] + list(m.parameters())
        results.append([*outs, *torch.autograd.grad(loss, tensors, allow_unused=True)])
    for ours, theirs, exact in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert_as_exact_as_eager(ours, theirs, exact, ulps=4.0 * (N * L) ** 0.5)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_takes_every_mask(name: str, batch_first: bool, need_weights: bool) -> None:
    masks, m = MASKS[name](), nn.MultiheadAttention(E, H, batch_first=batch_first)
    q, k, v = torch.randn(N, L, E), torch.randn(N, S, E), torch.randn(N, S, E)
    if not batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))

    compare(m, lambda m, xs: m(*xs, need_weights=need_weights, **typed(masks, xs[0].dtype)), q, k, v)


@pytest.mark.parametrize("options", [{"kdim": 6, "vdim": 10}, {"bias": False}, {"kdim": 6, "vdim": 6, "bias": False}])
def test_attention_of_other_sizes(options: dict[str, Any]) -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True, **options)
    k, v = torch.randn(N, S, options.get("kdim", E)), torch.randn(N, S, options.get("vdim", E))
    compare(m, lambda m, xs: m(*xs, average_attn_weights=False), torch.randn(N, L, E), k, v)


@pytest.mark.parametrize("same", ["self", "memory", "unbatched"])
def test_attention_to_itself_to_a_memory_and_unbatched(same: str) -> None:
    m = nn.MultiheadAttention(E, H)
    if same == "unbatched":
        mask = some_blocked(H, L, S)
        inputs = torch.randn(L, E), torch.randn(S, E), torch.randn(S, E)
        compare(m, lambda m, xs: m(*xs, attn_mask=mask, key_padding_mask=padding(S)[1]), *inputs)
    elif same == "self":
        compare(m, lambda m, xs: m(xs[0], xs[0], xs[0], attn_mask=look_ahead(L).to(xs[0].dtype)), torch.randn(L, N, E))
    else:
        compare(m, lambda m, xs: m(xs[0], xs[1], xs[1])[0], torch.randn(L, N, E), torch.randn(S, N, E))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [look_ahead(L), look_ahead(L) == INF], ids=["float", "bool"])
def test_look_ahead_by_hint_and_by_mask(mask: Tensor, causal: bool) -> None:
    def call(m: nn.Module, xs: list[Tensor]) -> Any:
        masks = typed({"attn_mask": mask, "key_padding_mask": padding(L)}, xs[0].dtype)
        return m(*xs, *xs, *xs, is_causal=causal, **masks)

    compare(nn.MultiheadAttention(E, H, batch_first=True), call, torch.randn(N, L, E))


def test_wrong_masks_are_refused() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    tfast.accelerate(m)
    x = torch.randn(N, L, E)
    with pytest.raises(TypeError, match="key_padding_mask: expected bool"):
        m(x, x, x, key_padding_mask=padding(L).int())
    for name, mask in (("attn_mask", some_blocked(1, L)), ("key_padding_mask", padding(S))):
        with pytest.raises(RuntimeError, match=f"{name}: expected shape"):
            m(x, x, x, **{name: mask})


LAYERS = [
    {},
    {"norm_first": True},
    {"batch_first": True, "activation": "gelu"},
    {"activation": nn.ReLU(), "bias": False, "layer_norm_eps": 1e-3},
    {"batch_first": True, "norm_first": True, "activation": torch.tanh},
]


@pytest.mark.parametrize("options", LAYERS, ids=["post-norm", "pre-norm", "gelu", "a module, no bias", "a function"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layers(kind: str, options: dict[str, Any]) -> None:
    made = nn.TransformerEncoderLayer if kind == "encoder" else nn.TransformerDecoderLayer
    m = made(E, H, dim_feedforward=24, dropout=0.0, **options)
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    if not options.get("batch_first"):
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    causal = look_ahead(L) == INF
    if kind == "encoder":
        compare(m, lambda m, xs: m(*xs, src_mask=causal, src_key_padding_mask=padding(L)), x)
        compare(m, lambda m, xs: m(*xs), x[0])
    else:

        def call(m: nn.Module, xs: list[Tensor]) -> Tensor:
            return m(*xs, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding(S))

        compare(m, call, x, memory)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_whole_transformer(batch_first: bool, training: bool) -> None:
    m = nn.Transformer(E, H, 2, 2, 24, dropout=0.0, batch_first=batch_first).train(training)
    src, tgt = torch.randn(N, S, E), torch.randn(N, L, E)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)

    def call(m: nn.Module, xs: list[Tensor]) -> Tensor:
        masks = {"src_key_padding_mask": padding(S), "tgt_key_padding_mask": padding(L)}
        return m(*xs, tgt_mask=look_ahead(L).to(xs[0].dtype), memory_key_padding_mask=padding(S), **masks)

    compare(m, call, src, tgt)


@pytest.mark.parametrize("options", [{}, {"norm": nn.LayerNorm(E)}, {"mask_check": False}], ids=str)
def test_where_torch_takes_the_padding_out_so_do_we(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation without gradients, padded positions are 0 in both before the last norm."""
    packed: list[bool] = []
    attention = tfast.ops.attention_packed
    monkeypatch.setattr(
        tfast.ops, "attention_packed", lambda *args, **kwargs: packed.append(True) or attention(*args, **kwargs)
    )
    layer = nn.TransformerEncoderLayer(E, H, 24, batch_first=True)
    x, ends, begins = torch.randn(N, L, E), padding(L), padding(L).flip(1)
    m, fast, report = pair(nn.TransformerEncoder(layer, 2, **options).eval())
    assert report.swapped
    with torch.no_grad():
        torch.testing.assert_close(fast(x, src_key_padding_mask=ends), m(x, src_key_padding_mask=ends))
        assert len(packed) == 2
        if options.get("mask_check", True):
            torch.testing.assert_close(fast(x, src_key_padding_mask=begins), m(x, src_key_padding_mask=begins))
        nothing = fast(x, src_key_padding_mask=torch.ones(N, L, dtype=torch.bool))
        assert torch.equal(nothing, (fast.norm or nn.Identity())(torch.zeros_like(x)))
        packed.clear()
        fast(x, src_key_padding_mask=torch.zeros(N, L, dtype=torch.bool)), fast(x)
        seen: list[Tensor] = []
        hook = fast.layers[1].linear1.register_forward_hook(lambda module, args, out: seen.append(out))
        fast(x, src_key_padding_mask=ends)
        hook.remove()
        assert seen[0].shape == (N, L, 24), "a hook sees the batch as it is"
    fast(x, src_key_padding_mask=ends).sum().backward()
    fast.train()(x, src_key_padding_mask=ends)
    assert not packed, "nothing to take out, or gradients to come"


def test_embeddings() -> None:
    ids = torch.randint(0, 11, (N, L))
    for made in (nn.Embedding(11, E), nn.Embedding.from_pretrained(torch.randn(11, E))):
        m, fast, report = pair(made)
        assert report.swapped
        for some in (ids, ids[0, 0]):
            torch.testing.assert_close(fast(some), m(some))
        with pytest.raises(IndexError):
            fast(torch.tensor([11]))
    padded = pair(nn.Embedding(3, 3, padding_idx=0))[1]
    with torch.no_grad():
        padded.weight[padded.padding_idx] = torch.ones(3)
    assert torch.equal(padded(torch.tensor([[0]]))[0, 0], torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_types_torch_gives(dtype: torch.dtype) -> None:
    x = torch.randn(N, L, E)
    for m in (nn.LayerNorm(E), nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=True)):
        _, fast, _ = pair(m)
        with torch.autocast("cpu", dtype=dtype):
            for inputs in (x, x.to(dtype)):
                expected, out = m(inputs), fast(inputs)
                assert out.dtype == expected.dtype
                torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


def test_dropout_acts_on_weights_and_sublayers_and_only_in_training() -> None:
    torch.manual_seed(0)
    m = nn.MultiheadAttention(E, H, dropout=0.25, batch_first=True)
    layer = nn.TransformerEncoderLayer(E, H, 24, dropout=0.25, batch_first=True)
    tfast.accelerate(m), tfast.accelerate(layer)
    x = torch.randn(1, 64, E).expand(64, 64, E)
    _, kept = m.eval()(x, x, x, average_attn_weights=False)
    _, weights = m.train()(x, x, x, average_attn_weights=False)
    dropped = weights == 0
    assert abs(dropped.float().mean().item() - 0.25) < 0.01
    torch.testing.assert_close(weights[~dropped], (kept / 0.75)[~dropped])
    first, again = from_one_seed(lambda: layer(x), lambda: layer(x))
    assert torch.equal(first, again) and not torch.equal(first, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_dropout_is_the_reference_s_own(norm_first: bool) -> None:
    """With equal masks results are exact, gradients included: attention, layers and the whole model."""
    m = nn.Transformer(E, H, 1, 1, 24, dropout=0.25, batch_first=True, norm_first=norm_first)
    tfast.accelerate(m)
    x, memory = torch.randn(N, S, E, requires_grad=True), torch.randn(N, L, E)

    def run(backend: str) -> tuple[Tensor, ...]:
        with tfast.backend(backend):
            out = m(x, memory, src_key_padding_mask=padding(S), tgt_mask=look_ahead(L))
            _, weights = m.decoder.layers[0].multihead_attn(memory, x, x)
        return out, weights, *torch.autograd.grad(out.square().sum(), [x, *m.parameters()])

    torch.testing.assert_close(*from_one_seed(lambda: run("auto"), lambda: run("reference")), atol=1e-4, rtol=1e-4)


def test_a_learned_mask_gets_its_gradient() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    bias = torch.randn(L, S)
    q, k = torch.randn(N, L, E), torch.randn(N, S, E)
    compare(m, lambda m, xs: m(xs[0], xs[1], xs[1], attn_mask=xs[2]), q, k, bias)
    compare(m, lambda m, xs: m(xs[0], xs[1], xs[1], attn_mask=xs[2]), q, k, bias.expand(N * H, L, S).contiguous())


def test_layers_unbatched() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 24, 0.0), 2)
    compare(decoder, lambda m, xs: m(*xs, tgt_mask=look_ahead(L) == INF), torch.randn(L, E), torch.randn(S, E))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True), 2)
    compare(encoder, lambda m, xs: m(*xs, src_key_padding_mask=padding(L)[1]), torch.randn(L, E))


@pytest.mark.parametrize("before", [True, False])
def test_a_table_with_a_greatest_norm(before: bool) -> None:
    """A call writes to the table, in eval and without gradients, too."""
    torch.manual_seed(0)
    ids, norm = torch.tensor([0, 2]), 1.0
    plain = nn.Sequential(nn.Embedding(5, 16, max_norm=norm), nn.LayerNorm(16)).eval()
    model = copy.deepcopy(plain)
    model[0].max_norm = norm if before else None
    assert tfast.accelerate(model).swapped
    model[0].max_norm = norm
    old = plain[0].weight.detach().clone()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))
    assert torch.equal(model[0].weight, plain[0].weight) and not torch.equal(plain[0].weight, old)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_norms_keep_the_dtype_of_the_plain_ones(autocast: bool, dtype: torch.dtype, kind: type[nn.Module]) -> None:
    """Under autocast on a CPU a norm gives 16 bits; with weights in float32 it takes 16 bits outside of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), kind(16))
    if not autocast:
        plain[0].to(dtype)
    _, model, report = pair(plain)
    assert report.swapped
    x = torch.randn(2, 5, 16, dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        out, expected = model(x), plain(x)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected)


def test_every_op_says_if_it_stays_with_torch_on_a_gpu() -> None:
    assert ON_GPU.keys() == backends.ON_CUDA.keys()
    assert [op for op, reason in ON_GPU.items() if reason] == ["dropout"]
    assert left_to_torch("norm", torch.device("mps")) == "no kernel here: there are no kernels for mps devices"


def test_an_attention_with_large_heads_stays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for heads, swapped in ((2, True), (1, False)):
        model = seems_on_gpu(nn.MultiheadAttention(512, heads), monkeypatch)
        report = tfast.accelerate(model)
        assert bool(report.swapped) is swapped
        assert swapped or report.left[0].why == "its head_dim is 512, and the kernels take up to 256 on a GPU"
