"""torch.compile in one graph and without recompiling for a new length, torch.export, autocast, copies and types."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast.reference import layers as reference

VOCABULARY, D = 20, 16
Inputs = Callable[[int], tuple[Any, ...]]


class Padded(nn.Module):
    """Our model, called with lengths and a look-ahead mask."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.model = tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, dropout, d_ff=24)

    def forward(self, src: Tensor, trg: Tensor, lengths: Tensor) -> Tensor:
        return self.model(src, trg, tfast.AttentionMask.lengths(lengths), tfast.AttentionMask.causal())


class Stock(nn.Module):
    """An accelerated nn.Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(D, 2, 1, 1, 24, batch_first=True)
        assert len(tfast.accelerate(self).swapped) == 14

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
    "nn.Transformer": (
        Stock,
        lambda n: (torch.randn(3, n, D), blocked(n), nn.Transformer.generate_square_subsequent_mask(n)),
    ),
    "hand-written": (classic, lambda n: (torch.randn(3, n, D), ~blocked(n).unsqueeze(1))),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_all_lengths_trained_with_dropout(name: str) -> None:
    make, inputs = MODELS[name]
    torch._dynamo.reset()
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    frames = []
    for length in (5, 7, 9, 12):
        args = inputs(length)
        results = []
        for m in (compiled, model):
            torch.manual_seed(0)
            out = m(*args)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))])
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager)
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2], "the second length makes lengths dynamic; no later one compiles again"


def test_inductor() -> None:
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
