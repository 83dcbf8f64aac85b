"""Packed batches under torch.compile and torch.export: the number of tokens stays open; no length compiles again."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trained_alike
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_fast as tfast
from transformer_fast import AttentionMask
from transformer_fast.packing import PackedMask

VOCABULARY, D = 20, 16


class Packed(nn.Module):
    """``Transformer(packed=True)`` on lengths; its logits or its loss."""

    def __init__(self, loss: bool = False, dropout: float = 0.1) -> None:
        super().__init__()
        self.model = tfast.Transformer(VOCABULARY, VOCABULARY, D, 1, 2, dropout, d_ff=24, packed=True)
        self.loss = loss

    def forward(self, src: Tensor, trg: Tensor, src_lengths: Tensor, trg_lengths: Tensor) -> Tensor:
        masks = AttentionMask.lengths(src_lengths), AttentionMask.lengths(trg_lengths) & AttentionMask.causal()
        if self.loss:
            return self.model.loss(src, trg, *masks, trg, label_smoothing=0.1)
        return self.model(src, trg, *masks)


class Windowed(Packed):
    """The same with a sliding window in the targets."""

    def forward(self, src: Tensor, trg: Tensor, src_lengths: Tensor, trg_lengths: Tensor) -> Tensor:
        window = AttentionMask.lengths(trg_lengths) & AttentionMask.window(2)
        return self.model(src, trg, AttentionMask.lengths(src_lengths), window)


class Keep(Packed):
    """The same on keep masks, and without padding in the targets."""

    def forward(self, src: Tensor, trg: Tensor, src_keep: Tensor, trg_mask: Tensor | None) -> Tensor:
        return self.model(src, trg, src_keep, AttentionMask.causal() if trg_mask is None else trg_mask)


def ids(length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (3, length))


def with_lengths(n: int) -> tuple[Any, ...]:
    return ids(n), ids(n - 1), torch.tensor([n, n - 2, 1]), torch.tensor([2, n - 1, n - 2])


def with_holes(n: int) -> tuple[Any, ...]:
    return ids(n), ids(n - 1), torch.rand(3, 1, n) > 0.4, None


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "logits": (Packed, with_lengths),
    "loss": (lambda: Packed(loss=True), with_lengths),
    "a keep mask with holes": (Keep, with_holes),
    "a window": (Windowed, with_lengths),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["logits", "loss", "a window"])
def test_one_graph_for_all_lengths_trained_with_dropout(name: str) -> None:
    torch._dynamo.reset()
    (make, inputs), counter = MODELS[name], CompileCounterWithBackend("aot_eager")
    model = make()
    compiled, frames = torch.compile(model, fullgraph=True, backend=counter), []
    for length in (5, 7, 12):
        assert_trained_alike(compiled, model, inputs(length))
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2], "the second length makes lengths dynamic; the third does not compile again"


@pytest.mark.parametrize("name", MODELS)
def test_export_with_dynamic_lengths(name: str) -> None:
    (make, inputs), auto = MODELS[name], torch.export.Dim.AUTO
    model = make().eval()
    shapes = ({1: auto}, {1: auto}, {2: auto} if "keep" in name else {}, None if "keep" in name else {})
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, inputs(7), dynamic_shapes=shapes), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for length in (7, 11):
        args = inputs(length)
        torch.testing.assert_close(loaded(*args), model(*args))


def test_layers_on_tokens_that_were_packed_before() -> None:
    torch._dynamo.reset()
    encoder, counter = tfast.layers.Encoder(VOCABULARY, D, 1, 2, 0.1), CompileCounterWithBackend("eager")
    compiled = torch.compile(encoder, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9):
        tokens, packing = tfast.pack(ids(length), torch.tensor([length, 1, length - 3]))
        outputs = []
        for m in (compiled, encoder):
            torch.manual_seed(0)
            outputs.append(m(tokens, PackedMask(packing, packing)))
        torch.testing.assert_close(*outputs)
    assert counter.frame_count == 1


def test_pack_and_unpack_in_one_graph() -> None:
    def doubled(x: Tensor, lengths: Tensor) -> Tensor:
        tokens, packing = tfast.pack(x, lengths)
        return tfast.unpack(2 * tokens, packing, fill=3.0)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(doubled, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 9):
        x, lengths = torch.randn(3, length, 2, requires_grad=True), torch.tensor([1, length, 0])
        for f in (compiled, doubled):
            out = f(x, lengths)
            kept = torch.arange(length) < lengths[:, None]
            assert torch.equal(out[kept], 2 * x[kept]) and torch.all(out[~kept] == 3.0)
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], 2.0 * kept[..., None].expand_as(x))
    assert counter.frame_count == 1


def test_a_dense_target_mask_is_refused_with_what_to_pass() -> None:
    torch._dynamo.reset()
    model, args = Keep(dropout=0.0), (*with_holes(6)[:3], tfast.layers.subsequentmask(5))
    says = r"\(1, 1, 5, 5\).*by torch.compile or torch.export: pass AttentionMask.lengths"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=says):
        torch.compile(model, fullgraph=True, backend="eager")(*args)
    with pytest.raises(ValueError, match=says):
        torch.export.export(model, args)
    # Allowed to break the graph, the eager code looks.
    torch.testing.assert_close(torch.compile(model, backend="eager")(*args), model(*args))
