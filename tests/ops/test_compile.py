"""torch.compile in one graph and without recompiling for a new length, torch.export, autocast, copies and types."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import handwritten
import handwritten_rms
import pytest
import torch
from helpers import assert_trained_alike
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import transformer_fast as tfast
from transformer_fast import layers
from transformer_fast.dialects import bert, d2l, tensorflow
from transformer_fast.reference import layers as reference
from transformer_fast.reference.dialects import d2l as d2l_oracle

VOCABULARY, D = 20, 16
Inputs = Callable[[int], tuple[Any, ...]]


class Padded(nn.Module):
    """Our model, called with lengths and a look-ahead mask."""

    def __init__(self, dropout: float = 0.1, **options: Any) -> None:
        super().__init__()
        self.model = tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, dropout, d_ff=24, **options)

    def forward(self, src: Tensor, trg: Tensor, lengths: Tensor) -> Tensor:
        return self.model(src, trg, tfast.AttentionMask.lengths(lengths), tfast.AttentionMask.causal())


class Windowed(Padded):
    """The same with a sliding window on either side."""

    def forward(self, src: Tensor, trg: Tensor, lengths: Tensor) -> Tensor:
        masks = tfast.AttentionMask.lengths(lengths) & tfast.AttentionMask.window(2, 1), tfast.AttentionMask.window(1)
        hidden = self.model.decoder(
            trg, self.model.encoder(src, masks[0]), tfast.AttentionMask.lengths(lengths), masks[1]
        )
        return self.model.out(hidden)


class Stock(nn.Module):
    """An accelerated nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(D, 2, 1, 1, 24, batch_first=True)
        assert len(tfast.accelerate(self).swapped) == 21

    def forward(self, x: Tensor, blocked: Tensor, look_ahead: Tensor) -> Tensor:
        options = {"src_key_padding_mask": blocked, "memory_key_padding_mask": blocked, "src_is_causal": False}
        return self.model(x, x, tgt_mask=look_ahead, tgt_is_causal=True, **options)


def classic() -> nn.Module:
    """An accelerated hand-written model."""
    model = reference.EncoderLayer(D, 2, d_ff=24)
    assert tfast.accelerate(model).rows[0].now
    return model


def ids(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (3, length))


def blocked(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor([length, length - 2, 1]).unsqueeze(1)


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "ours": (Padded, lambda n: (ids(n), ids(n - 1), torch.tensor([n, n - 2, 1]))),
    "RMSNorm": (
        lambda: Padded(norm="rms"),
        lambda n: (ids(n), ids(n - 1), torch.tensor([n, n - 2, 1])),
    ),
    "windows": (Windowed, lambda n: (ids(n), ids(n - 1), torch.tensor([n, n - 2, 1]))),
    "nn.Transformer": (
        Stock,
        lambda n: (torch.randn(3, n, D), blocked(n), nn.Transformer.generate_square_subsequent_mask(n)),
    ),
    "hand-written": (classic, lambda n: (torch.randn(3, n, D), ~blocked(n).unsqueeze(1))),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_lengths_trained_with_dropout(name: str) -> None:
    make, inputs = MODELS[name]
    torch._dynamo.reset()
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    frames = []
    for length in (5, 7, 9, 12):
        assert_trained_alike(compiled, model, inputs(length))
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2], "the second length makes lengths dynamic; no later one compiles again"


def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of its own: the usual one may hold code for vectors that this run is told not to use.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    model, inputs = classic().eval(), MODELS["hand-written"][1]
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (5, 8):
        args = inputs(length)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.parametrize("name", MODELS)
def test_export_with_dynamic_lengths(name: str) -> None:
    make, inputs = MODELS[name]
    model, auto = make().eval(), torch.export.Dim.AUTO
    shapes = {
        "ours": ({1: auto}, {1: auto}, {}),
        "RMSNorm": ({1: auto}, {1: auto}, {}),
        "windows": ({1: auto}, {1: auto}, {}),
        "nn.Transformer": ({1: auto}, {1: auto}, {0: auto, 1: auto}),
        "hand-written": ({1: auto}, {2: auto}),
    }[name]
    program = torch.export.export(model, inputs(7), dynamic_shapes=shapes)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for length in (7, 11):
        args = inputs(length)
        torch.testing.assert_close(loaded(*args), model(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    make, inputs = MODELS[name]
    model, args = make().eval(), inputs(7)
    with torch.autocast("cpu", dtype=dtype):
        out = model(*args)
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(out.float(), model(*args), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_copies_files_and_types(name: str) -> None:
    make, inputs = MODELS[name]
    model, args = make().eval(), inputs(7)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(*args), model(*args))
    for change, dtype in (
        (nn.Module.half, torch.float16),
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.double, torch.float64),
    ):
        twin = change(copy.deepcopy(model))
        cast = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
        out = twin(*cast)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), model(*args), atol=0.1, rtol=0.05)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_transforms_of_torch_func_are_refused_clearly(transform: Callable) -> None:
    x, ids = torch.randn(2, 3, 5, 4), torch.zeros(3, dtype=torch.int64)
    calls = (
        lambda t: tfast.attention(t[None, None], t[None, None], t[None, None]).sum(),
        lambda t: tfast.layer_norm(t, None, None).sum(),
        lambda t: tfast.embed(ids, t).sum(),
        lambda t: tfast.ops.dropout(t, 0.1).sum(),
    )
    for call in calls:
        with pytest.raises(tfast.BackendError, match="vmap"):
            transform(call)(x[0] if transform is torch.vmap else x[0, 0])
    with tfast.backend("reference"):
        plain = calls[1]
        expected = torch.stack([plain(row) for row in x[0]])
        torch.testing.assert_close(torch.vmap(plain)(x[0]), expected)


def test_forward_mode_is_refused_where_it_would_lose_tangents() -> None:
    x, ids = torch.randn(2, 3, 5, 4), torch.zeros(3, dtype=torch.int64)
    with forward_ad.dual_level():
        t = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (
            lambda: tfast.attention(t, t, t),
            lambda: tfast.attention_decode(t, t, t, ids[:2]),
            lambda: tfast.layer_norm(t, None, None),
            lambda: tfast.embed(ids, t[0, 0]),
            lambda: tfast.ops.dropout(t, 0.1),
            lambda: tfast.linear_cross_entropy(t[0, 0], torch.ones(7, 4), None, ids[[0] * 5]),
        ):
            with pytest.raises(tfast.BackendError, match="tangents would be lost"):
                call()
        with tfast.backend("reference"):
            assert forward_ad.unpack_dual(tfast.layer_norm(t, None, None)).tangent is not None
        tfast.layer_norm(x, None, None)  # no tangent, no refusal


def x(length: int) -> Tensor:
    return torch.randn(3, length, D)


def swapped(model: nn.Module) -> nn.Module:
    assert tfast.accelerate(model).rows[0].now
    return model


def keep(length: int) -> Tensor:
    return ~blocked(length).unsqueeze(1)


SIZES = (VOCABULARY, D, 24, 4, 1, 0.1)
PARTS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "attention": (lambda: layers.MultiHeadAttention(2, D), lambda n: (x(n), x(n), x(n), keep(n))),
    "encoder layer": (lambda: layers.EncoderLayer(D, 2, norm_first=False, norm="layer"), lambda n: (x(n), keep(n))),
    "encoder layer with RMSNorm": (lambda: layers.EncoderLayer(D, 2, norm="rms"), lambda n: (x(n), keep(n))),
    "decoder layer": (
        lambda: layers.DecoderLayer(D, 2),
        lambda n: (x(n), x(n), keep(n), layers.subsequentmask(n)),
    ),
    "RMSNorm": (lambda: layers.RMSNorm(D), lambda n: (x(n),)),
    "swapped Llama norm": (lambda: swapped(handwritten_rms.LlamaRMSNorm(D)), lambda n: (x(n),)),
    "bert attention": (lambda: bert.MultiHeadedAttention(2, D), lambda n: (x(n), x(n), x(n), keep(n).unsqueeze(1))),
    "bert embedding": (lambda: bert.BERTEmbedding(VOCABULARY, D), lambda n: (ids(n),)),
    "tensorflow attention": (
        lambda: tensorflow.MultiHeadAttention(D, 2),
        lambda n: (x(n), x(n), x(n), blocked(n)[:, None, None].float()),
    ),
    "tensorflow additive": (
        lambda: tensorflow.AdditiveAttention(8, D, D),
        lambda n: (x(n), x(n), x(n), blocked(n)[:, None].float()),
    ),
    "d2l attention": (
        lambda: d2l.MultiHeadAttention(D, 2, 0.1, **dict.fromkeys(("query_size", "key_size", "value_size"), D)),
        lambda n: (x(n), x(n), x(n), torch.tensor([n, n - 2, 1])),
    ),
    "d2l model": (
        lambda: d2l.EncoderDecoder(d2l.TransformerEncoder(*SIZES), d2l.TransformerDecoder(*SIZES)),
        lambda n: (ids(n), ids(n), torch.tensor([n, n - 2, 1])),
    ),
    "nn.TransformerEncoder": (
        lambda: swapped(nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 24, batch_first=True), 1)),
        lambda n: (x(n), None, blocked(n)),
    ),
    "swapped bert block": (lambda: swapped(handwritten.BertBlock(D, 2, 24)), lambda n: (x(n), keep(n).unsqueeze(1))),
    "swapped d2l decoder": (
        lambda: swapped(d2l_oracle.TransformerDecoder(*SIZES)),
        lambda n: (ids(n), [x(n), torch.tensor([n, n - 2, 1]), [None]]),
    ),
}


def called(model: Callable, args: tuple[Any, ...]) -> Tensor:
    torch.manual_seed(0)
    out = model(*tree_map(lambda a: a, args))  # lists of its own: a decoder changes its state
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", PARTS)
def test_every_part_compiles_exports_and_is_copied(name: str) -> None:
    make, inputs = PARTS[name]
    torch._dynamo.reset()
    model, counter = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9):
        args = inputs(length)
        torch.testing.assert_close(called(compiled, args), called(model, args))
    assert counter.frame_count == 1
    model.eval()
    expected = called(model, args)
    torch.testing.assert_close(called(torch.export.export(model, args).module(), args), expected)
    buffers = io.BytesIO(), io.BytesIO()
    torch.save(model, buffers[0]), torch.save(model.state_dict(), buffers[1])
    for buffer in buffers:
        buffer.seek(0)
    loaded = make().eval()
    loaded.load_state_dict(torch.load(buffers[1], weights_only=True))
    whole = torch.load(buffers[0], weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), whole, loaded):
        assert torch.equal(called(twin, args), expected)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_changes_types_and_takes_autocast(name: str) -> None:
    make, inputs = PARTS[name]
    model, args = make().eval(), inputs(7)
    expected = called(model, args)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            torch.testing.assert_close(called(model, args).float(), expected, atol=0.1, rtol=0.05)
    for change in (nn.Module.half, nn.Module.bfloat16, nn.Module.double):
        twin = change(copy.deepcopy(model))
        dtype = next(twin.parameters()).dtype

        def cast(a: Any, dtype: torch.dtype = dtype) -> Any:
            if isinstance(a, list):
                return [cast(inner) for inner in a]
            return a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a

        out = called(twin, tuple(map(cast, args)))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", [name for name in PARTS if "swapped" not in name and "nn." not in name])
@pytest.mark.parametrize("grad", [True, False])
def test_every_part_of_ours_refuses_vmap_by_name(name: str, grad: bool) -> None:
    make, inputs = PARTS[name]
    model, args = make().eval(), inputs(7)
    tensors, spec = tree_flatten(list(args))
    places = [0 if isinstance(t, Tensor) else None for t in tensors]
    twice = [torch.stack((t, t)) if isinstance(t, Tensor) else t for t in tensors]
    with torch.set_grad_enabled(grad), pytest.raises(tfast.BackendError, match="vmap"):
        torch.vmap(lambda *flat: called(model, tuple(tree_unflatten(list(flat), spec))), in_dims=tuple(places))(*twice)
