"""accelerate on the modules of torch.nn: same numbers, same masks, same gradients."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_as_exact_as_eager
from torch import Tensor, nn

import transformer_fast as tfast

N, L, S, E, H = 3, 7, 5, 16, 4
INF = float("-inf")


def look_ahead(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def padding(length: int) -> Tensor:
    """True = blocked; one row with none, one with one key left."""
    return torch.arange(length) >= torch.tensor([length, length - 2, 1]).unsqueeze(1)


def some_blocked(*shape: int) -> Tensor:
    blocked = torch.rand(shape) > 0.6
    blocked[..., 0] = False
    return blocked


def as_float(blocked: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(blocked.shape, dtype=dtype).masked_fill(blocked, INF)


def compare(module: nn.Module, call: Callable[[nn.Module, list[Tensor]], Any], *inputs: Tensor) -> None:
    """Outputs and every gradient of a module and of an accelerated copy, by the gate against fp64 and close in fp32."""
    fast = copy.deepcopy(module)
    assert tfast.accelerate(fast).swapped
    assert list(fast.state_dict()) == list(module.state_dict())
    results = []
    for m, dtype in ((fast, None), (module, None), (copy.deepcopy(module), torch.float64)):
        m = m if dtype is None else m.to(dtype)
        xs = [x.detach().clone().to(dtype or x.dtype).requires_grad_(x.is_floating_point()) for x in inputs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.nn's own, of mismatched mask types
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


MASKS = {
    "none": {},
    "padding": lambda: {"key_padding_mask": padding(S)},
    "float padding": lambda: {"key_padding_mask": torch.randn(N, S)},
    "padding of -inf": lambda: {"key_padding_mask": as_float(padding(S))},
    "bool": lambda: {"attn_mask": some_blocked(L, S)},
    "bool by head": lambda: {"attn_mask": some_blocked(N * H, L, S)},
    "float": lambda: {"attn_mask": torch.randn(L, S)},
    "float by head": lambda: {"attn_mask": torch.randn(N * H, L, S)},
    "bool and padding": lambda: {"attn_mask": some_blocked(L, S), "key_padding_mask": padding(S)},
    "float and padding": lambda: {"attn_mask": torch.randn(L, S), "key_padding_mask": padding(S)},
    "both float": lambda: {"attn_mask": as_float(some_blocked(L, S)), "key_padding_mask": torch.randn(N, S)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_takes_every_mask(name: str, batch_first: bool, need_weights: bool) -> None:
    masks = MASKS[name]() if callable(MASKS[name]) else {}
    m = nn.MultiheadAttention(E, H, batch_first=batch_first)
    q, k, v = torch.randn(N, L, E), torch.randn(N, S, E), torch.randn(N, S, E)
    if not batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))

    def call(m: nn.Module, xs: list[Tensor]) -> Any:
        dtype = xs[0].dtype
        cast = {key: t.to(dtype) if t.is_floating_point() else t for key, t in masks.items()}
        return m(*xs, need_weights=need_weights, **cast)

    compare(m, call, q, k, v)


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


def test_look_ahead_by_hint_and_by_mask() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    for mask in (look_ahead(L), look_ahead(L) == INF):
        for causal in (False, True):

            def call(m: nn.Module, xs: list[Tensor], mask: Tensor = mask, causal: bool = causal) -> Any:
                attn_mask = mask.to(xs[0].dtype) if mask.is_floating_point() else mask
                return m(*xs, *xs, *xs, attn_mask=attn_mask, is_causal=causal, key_padding_mask=padding(L))

            compare(m, call, x)


def test_a_fully_padded_row_is_never_nan() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(2, L, E)
    blocked = torch.tensor([[False] * L, [True] * L])
    expected, _ = m(x, x, x, key_padding_mask=blocked, need_weights=False)
    tfast.accelerate(m)
    for need_weights in (True, False):
        out, weights = m(x, x, x, key_padding_mask=blocked, need_weights=need_weights)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(out[1], m.out_proj.bias.expand(L, E))
        assert weights is None or weights[1].eq(0).all()
        (grad,) = torch.autograd.grad(out.sum(), m.in_proj_weight)
        assert grad.isfinite().all()


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = nn.Transformer(E, H, 2, 2, 24, dropout=0.0, batch_first=batch_first).train(training)
    src, tgt = torch.randn(N, S, E), torch.randn(N, L, E)
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)

    def call(m: nn.Module, xs: list[Tensor]) -> Tensor:
        return m(
            *xs,
            tgt_mask=look_ahead(L).to(xs[0].dtype),
            src_key_padding_mask=padding(S),
            tgt_key_padding_mask=padding(L),
            memory_key_padding_mask=padding(S),
        )

    compare(m, call, src, tgt)


@pytest.mark.parametrize("options", [{}, {"norm": nn.LayerNorm(E)}, {"mask_check": False}], ids=str)
def test_where_torch_takes_the_padding_out_so_do_we(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation, no gradients, padding at the end: padded positions are 0 in both, before the last norm."""
    packed: list[bool] = []
    attention = tfast.ops.attention_packed
    monkeypatch.setattr(
        tfast.ops, "attention_packed", lambda *args, **kwargs: packed.append(True) or attention(*args, **kwargs)
    )
    layer = nn.TransformerEncoderLayer(E, H, 24, batch_first=True)
    x, ends, begins = torch.randn(N, L, E), padding(L), padding(L).flip(1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        m = nn.TransformerEncoder(layer, 2, **options).eval()
        fast = copy.deepcopy(m)
        assert tfast.accelerate(fast).swapped
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


def test_nested_inputs_still_go_through_torch() -> None:
    m = nn.TransformerEncoderLayer(E, H, 24, batch_first=True).eval()
    tfast.accelerate(m)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        rows = [torch.randn(n, E) for n in (3, 5)]
        out = m(torch.nested.nested_tensor(rows)).unbind()
    for row, result in zip(rows, out):
        torch.testing.assert_close(m(row.unsqueeze(0))[0], result)


@pytest.mark.parametrize("module", [
    nn.LayerNorm(E), nn.LayerNorm(E, elementwise_affine=False), nn.LayerNorm(E, bias=False, eps=1e-2),
])  # fmt: skip
def test_norms(module: nn.LayerNorm) -> None:
    compare(module, lambda m, xs: m(*xs), torch.randn(N, L, E))


def test_embeddings() -> None:
    ids = torch.randint(0, 11, (N, L))
    compare(nn.Embedding(11, E, padding_idx=3), lambda m, xs: m(ids))
    m = nn.Embedding(11, E)
    expected = m(ids[0, 0])
    tfast.accelerate(m)
    torch.testing.assert_close(m(ids[0, 0]), expected)
    with pytest.raises(IndexError):
        m(torch.tensor([11]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_by_the_gate(dtype: torch.dtype) -> None:
    m = nn.TransformerDecoderLayer(E, H, 24, dropout=0.0, batch_first=True).to(dtype)
    x, memory = torch.randn(N, L, E, dtype=dtype), torch.randn(N, S, E, dtype=dtype)
    compare(m, lambda m, xs: m(*xs, tgt_mask=look_ahead(L) == INF, memory_key_padding_mask=padding(S)), x, memory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_types_torch_gives(dtype: torch.dtype) -> None:
    x = torch.randn(N, L, E)
    for m in (nn.LayerNorm(E), nn.TransformerEncoderLayer(E, H, 24, dropout=0.0, batch_first=True)):
        fast = copy.deepcopy(m)
        tfast.accelerate(fast)
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
    torch.manual_seed(5)
    a, b = layer(x), layer(x)
    torch.manual_seed(5)
    assert not torch.equal(a, b) and torch.equal(a, layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_dropout_is_the_reference_s_own(norm_first: bool) -> None:
    """Exact with the shared mask, gradients included: attention, layers and the whole model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = nn.Transformer(E, H, 1, 1, 24, dropout=0.25, batch_first=True, norm_first=norm_first)
    tfast.accelerate(m)
    x, memory = torch.randn(N, S, E, requires_grad=True), torch.randn(N, L, E)
    results = []
    for backend in ("auto", "reference"):
        torch.manual_seed(3)
        with tfast.backend(backend):
            out = m(x, memory, src_key_padding_mask=padding(S), tgt_mask=look_ahead(L))
            _, weights = m.decoder.layers[0].multihead_attn(memory, x, x)
        results.append((out, weights, *torch.autograd.grad(out.square().sum(), [x, *m.parameters()])))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


def test_the_examples_of_norm_and_embedding_in_torch_s_documentation() -> None:
    sentence, image = torch.randn(20, 5, 10), torch.randn(20, 5, 10, 10)
    ids = torch.LongTensor([[1, 2, 4, 5], [4, 3, 2, 9]])
    made = nn.Embedding.from_pretrained(torch.FloatTensor([[1, 2.3, 3], [4, 5.1, 6.3]]))
    for m, x, helped in (
        (nn.LayerNorm(10), sentence, True),
        (nn.LayerNorm([5, 10, 10]), image, False),
        (nn.Embedding(10, 3), ids, True),
        (nn.Embedding(10, 3, padding_idx=0), torch.LongTensor([[0, 2, 0, 5]]), True),
        (nn.Embedding(10, 3, max_norm=1.0), ids, False),
        (made, torch.LongTensor([1]), True),
    ):
        expected, report = m(x), tfast.accelerate(m)
        assert bool(report.swapped) == helped
        torch.testing.assert_close(m(x), expected)
    padded = nn.Embedding(3, 3, padding_idx=0)
    tfast.accelerate(padded)
    with torch.no_grad():
        padded.weight[padded.padding_idx] = torch.ones(3)
    assert torch.equal(padded(torch.tensor([[0]]))[0, 0], torch.ones(3))


def test_a_learned_mask_gets_its_gradient() -> None:
    m = nn.MultiheadAttention(E, H, batch_first=True)
    bias = torch.randn(L, S)
    q, k = torch.randn(N, L, E), torch.randn(N, S, E)
    compare(m, lambda m, xs: m(xs[0], xs[1], xs[1], attn_mask=xs[2]), q, k, bias)
    compare(m, lambda m, xs: m(xs[0], xs[1], xs[1], attn_mask=xs[2]), q, k, bias.expand(N * H, L, S).contiguous())


def test_layers_unbatched() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 24, 0.0), 2)
    compare(decoder, lambda m, xs: m(*xs, tgt_mask=look_ahead(L) == INF), torch.randn(L, E), torch.randn(S, E))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 24, 0.0, batch_first=True), 2)
    compare(encoder, lambda m, xs: m(*xs, src_key_padding_mask=padding(L)[1]), torch.randn(L, E))


def test_the_examples_of_torch_s_documentation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attention = nn.MultiheadAttention(64, 8)
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 128, 0.0), 2)
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 8, 128, 0.0), 2)
        transformer = nn.Transformer(64, 8, 2, 2, 128, 0.0)
    src, tgt = torch.rand(10, 32, 64), torch.rand(20, 32, 64)
    calls = [
        lambda m: m(tgt, src, src)[0],
        lambda m: m(src),
        lambda m: m(tgt, src),
        lambda m: m(src, tgt),
    ]
    for m, call in zip((attention, encoder, decoder, transformer), calls, strict=True):
        expected = call(m)
        tfast.accelerate(m)
        torch.testing.assert_close(call(m), expected)
