"""torch.compile in one graph without recompilation for a new length; torch.export, autocast, copies and dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_models import MODELS, PARTS, VOCABULARY, D, PackedKeep, ids, packed_with_holes
from helpers import assert_trained_alike
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import transformer_fast as tfast
from transformer_fast.masks.packing import PackedMask

LARGE = "d2l model", "swapped d2l decoder"
PARTS_AND_MODELS = PARTS | {f"model, {name}": rest[:2] for name, rest in MODELS.items() if "packed" not in name}


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", [name for name in MODELS if "holes" not in name])
def test_one_graph_for_all_lengths_trained_with_dropout(name: str) -> None:
    make, inputs, _ = MODELS[name]
    torch._dynamo.reset()
    model, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    frames = []
    for length in (5, 7, 9, 12):
        assert_trained_alike(compiled, model, inputs(length))
        frames.append(counter.frame_count)
    assert frames == [1, 2, 2, 2], "the second length makes lengths dynamic; no later one compiles again"


@pytest.mark.parametrize("name", [
    "attention", "RMSNorm", "bert embedding", pytest.param("hand-written", marks=pytest.mark.slow("compiles C++")),
])  # fmt: skip
def test_inductor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A cache of its own: the usual one may hold code for vectors that this run is told not to use.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    make, inputs = PARTS[name] if name in PARTS else MODELS[name][:2]
    model = make().eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (5, 8):
        args = inputs(length)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", MODELS)
def test_export_with_dynamic_lengths(name: str) -> None:
    make, inputs, shapes = MODELS[name]
    model, buffer = make().eval(), io.BytesIO()
    torch.export.save(torch.export.export(model, inputs(7), dynamic_shapes=shapes), buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for length in (7, 11):
        args = inputs(length)
        torch.testing.assert_close(loaded(*args), model(*args))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_transforms_of_torch_func_are_refused_clearly(transform: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    # A transform refuses to fill memory that is not its own.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
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


def called(model: Callable, args: tuple[Any, ...]) -> Tensor:
    torch.manual_seed(0)
    out = model(*tree_map(lambda a: a, args))  # lists of its own: a decoder changes its state
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.cover(3)
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow("compiles for seconds") if name in LARGE else ()) for name in PARTS
])  # fmt: skip
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


@pytest.mark.parametrize("name", PARTS_AND_MODELS)
def test_copies_change_types_and_take_autocast(name: str) -> None:
    make, inputs = PARTS_AND_MODELS[name]
    model, args = make().eval(), inputs(7)
    expected = called(model, args)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            out = called(model, args)
        torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.05)
        out.float().square().mean().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in gradients)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(called(twin, args), expected)
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
    model, args = PackedKeep(dropout=0.0), (*packed_with_holes(6)[:3], tfast.layers.subsequentmask(5))
    says = (
        r"\(1, 1, 5, 5\).*by torch.compile or torch.export: "
        "it must be padding and look-ahead only; pass AttentionMask.lengths"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=says):
        torch.compile(model, fullgraph=True, backend="eager")(*args)
    with pytest.raises(ValueError, match=says):
        torch.export.export(model, args)
    # Allowed to break the graph, the eager code looks.
    torch.testing.assert_close(torch.compile(model, backend="eager")(*args), model(*args))


def test_attention_of_the_reference_is_one_graph() -> None:
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    with tfast.backend("reference"):
        compiled = torch.compile(lambda q: tfast.attention(q, q, q, causal=True), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q), tfast.attention(q, q, q, causal=True))
