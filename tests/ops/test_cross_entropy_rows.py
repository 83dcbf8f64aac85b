"""``linear_cross_entropy`` with the options of ``F.cross_entropy``: class weights, probabilities, losses per row.

test_cross_entropy.py has the plain cases, and tests/interpreter/test_cross_entropy.py their kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from loss_calls import IGNORED, VOCABULARY, assert_no_loss, by_torch, chunks, hold_to_torch, loss_call, our_loss  # noqa: F401
from op_calls import Call, assert_equal

import transformer_fast as tfast
from transformer_fast.ops import cross_entropy
from transformer_fast.testing import assert_as_exact_as_eager

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KINDS = ["classes", "probabilities"]
OPTIONS: list[dict[str, Any]] = [
    {"weighted": weighted, "label_smoothing": smoothing, "kind": kind, "bias": bias}
    for weighted, smoothing, kind, bias in itertools.product((False, True), (0.0, 0.1), KINDS, (True, False))
]


def ignoring(kind: str) -> dict[str, int]:
    """Return the ignored index for targets of a kind."""
    return {"ignore_index": IGNORED} if kind == "classes" else {}


def weighted(device, kind="classes", **options) -> Call:
    return loss_call(device, kind=kind, weighted=True, **options)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_options_of_torch(dtype, reduction, device):
    for options in OPTIONS:
        hold_to_torch(loss_call(device, dtype, **options, **ignoring(options["kind"]), reduction=reduction))


@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_class", [False, True], ids=["", "weights"])
def test_one_row(kind, reduction, by_class, device):
    for dtype in DTYPES:
        options = {"reduction": reduction, **ignoring(kind)}
        hold_to_torch(loss_call(device, dtype, kind=kind, weighted=by_class, shape=(), **options))


@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
def test_no_rows_and_rows_that_are_all_ignored(reduction, device):
    ignored = weighted(device, shape=(2, 3), reduction=reduction, ignore_index=IGNORED)
    ignored.tensors["target"].fill_(IGNORED)
    empty = (weighted(device, kind, shape=(3, 0), reduction=reduction, **ignoring(kind)) for kind in KINDS)
    for call in (ignored, *empty, loss_call(device, shape=(0, 3), reduction=reduction)):
        torch.testing.assert_close(call.trained(), by_torch(call).trained(), equal_nan=True)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_named_or_not_a_number(wrong, device):
    for call in (loss_call(device), weighted(device)):
        assert_no_loss(call, wrong)


def test_what_is_ignored_may_be_anything(device):
    call = weighted(device, ignore_index=IGNORED)
    expected = call.trained()
    call.tensors["x"][call.tensors["target"] == IGNORED] *= 1e30
    assert_equal(call.trained()[:2], expected[:2])


def test_an_impossible_class_that_is_not_wanted(device):
    for reduction in cross_entropy.REDUCTIONS:
        call = weighted(device, reduction=reduction)
        call.tensors["bias"][5] = -torch.inf
        call.tensors["target"][call.tensors["target"] == 5] = 6
        torch.testing.assert_close(call.trained(), by_torch(call).trained())


def test_probabilities_of_a_wider_dtype_give_the_result_theirs(device):
    call = loss_call(device, torch.bfloat16, kind="probabilities")
    wide = call.tensors["target"].float()
    assert call.outputs(target=wide)[0].dtype == by_torch(call).outputs(target=wide)[0].dtype == torch.float32
    narrow = loss_call(device, torch.bfloat16, kind="probabilities", dtype=torch.float32)
    assert narrow.outputs()[0].dtype == torch.float32


def test_targets_made_in_inference_mode_can_be_trained_on(device):
    for kind in KINDS:
        call = weighted(device, kind)._replace(constant=("target", "class_weight"))
        with torch.inference_mode():
            made = {name: call.tensors[name].clone() for name in call.constant}
        assert_equal(call.trained(**made), call.trained())


def test_small_gradients_of_half_precision_are_not_lost(device):
    call = loss_call(device, torch.float16, weighted=True, reduction="none", dtype=torch.float32)
    small, large = (call.trained(grads=[torch.full((3, 50), by, device=device)])[2:] for by in (2.0**-20, 1.0))
    for few, one in zip(small, large, strict=True):
        torch.testing.assert_close(few.float() * 2.0**20, one.float(), atol=0.1, rtol=1e-2)
        assert few.any()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_as_torch(kind, device):
    call = weighted(device, kind, reduction="none")
    with torch.autocast(device.type, torch.bfloat16):
        (ours, *grads), torchs = call.trained(), by_torch(call).outputs()[0]
    assert ours.dtype == torchs.dtype == torch.float32
    narrow = {name: t.bfloat16() if name in ("x", "weight", "bias") else t for name, t in call.tensors.items()}
    wide = {name: t.double() if t.is_floating_point() else t for name, t in narrow.items()}
    assert_as_exact_as_eager(ours, torchs, by_torch(call).outputs(**wide)[0])
    assert grads[0].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_graph_break_for_any_number_of_rows(kind, device):
    torch._dynamo.reset()
    graphs = []

    def counted(graph, args):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, args)

    def step(**given):
        return our_loss(**given, label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, backend=counted, dynamic=True)
    for rows in (5, 70, 150):
        call = weighted(device, kind, shape=(rows,))
        leaves = [call.tensors[name].requires_grad_() for name in call.leaves]
        ours, eager = (torch.autograd.grad(f(**call.tensors), leaves) for f in (compiled, step))
        torch.testing.assert_close(ours, eager)
    assert len(graphs) == 1


@pytest.mark.parametrize("by_class", [False, True])
def test_the_meta_device_tells_shapes(by_class):
    for kind, reduction, dtype in itertools.product(KINDS, cross_entropy.REDUCTIONS, DTYPES):
        call = loss_call("cpu", dtype, kind=kind, weighted=by_class, reduction=reduction)
        call = call._replace(tensors={name: t.to("meta") for name, t in call.tensors.items()})
        for ours, torchs in zip(call.trained(), by_torch(call).trained(), strict=True):
            assert (ours.device, ours.dtype, ours.shape) == (torchs.device, torchs.dtype, torchs.shape)


def test_logits_are_never_whole(monkeypatch, device):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 64 * VOCABULARY, "cuda": 64 * VOCABULARY})
    call = weighted(device, shape=(12_800,), label_smoothing=0.1)
    call.trained()  # cuBLAS takes its workspace of 32 MiB with a thread's first product, and keeps it
    with torch.profiler.profile(profile_memory=True) as profile:
        call.trained()
    used = "self_cpu_memory_usage" if device.type == "cpu" else "self_device_memory_usage"
    assert max(getattr(event, used) for event in profile.events()) < 12_800 * VOCABULARY * 4


def test_a_model_gives_its_loss_in_float32():
    model = tfast.Transformer(20, 23, 16, 2, 2, 0.0).bfloat16()
    ids = torch.randint(1, 20, (2, 5))
    assert model.loss(ids, ids, None, None, ids).dtype == torch.float32
    with pytest.raises(ValueError, match=r"Transformer\.loss: reduction must be .*got 'none'"):
        model.loss(ids, ids, None, None, ids, reduction="none")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("weight", [torch.inf, torch.nan])
@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_weight_of_a_class_without_a_target_counts_nowhere(backend, reduction, weight, device):
    """Weights such as ``n / counts`` are inf for a class that does not occur, also where only ignored targets have
    it."""
    call = weighted(device, reduction=reduction, ignore_index=IGNORED)
    absent = sorted({0, 1, IGNORED})
    targets = call.tensors["target"]
    targets[torch.isin(targets, torch.tensor(absent, device=targets.device))] = IGNORED
    call.tensors["class_weight"] = call.tensors["class_weight"].detach().clone()
    call.tensors["class_weight"][absent] = weight
    with tfast.backend(backend):
        found = call.trained()
    assert all(bool(t.isfinite().all()) for t in found)
    torch.testing.assert_close(found, by_torch(call).trained())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_mean_of_weights_that_sum_to_0_is_nan(backend, device):
    x, weight, target = torch.randn(4, 8, device=device), torch.randn(5, 8, device=device), torch.zeros(4).long()
    by_class = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], device=device)
    with tfast.backend(backend):
        loss = tfast.linear_cross_entropy(
            x, weight, None, target.to(device), class_weight=by_class, label_smoothing=0.1
        )
    assert loss.isnan()


@pytest.mark.parametrize("by_class", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
def test_no_classes_and_targets_that_are_all_ignored(reduction, by_class, device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(0, 8, device=device)
    target, weights = torch.full((4,), -100, device=device), torch.randn(0, device=device) if by_class else None
    loss = tfast.linear_cross_entropy(x, weight, None, target, class_weight=weights, reduction=reduction)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, target, weights, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["x", "weight", "target"])
def test_the_op_names_a_missing_tensor(name):
    tensors = {"x": torch.randn(4, 8), "weight": torch.randn(5, 8), "bias": None, "target": torch.zeros(4).long()}
    with pytest.raises((TypeError, RuntimeError), match=f"{name} must be a tensor, got NoneType"):
        torch.ops.transformer_fast.linear_cross_entropy_rows(*(tensors | {name: None}).values(), None, 0.0, -100, 64)
