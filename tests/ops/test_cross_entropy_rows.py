"""``linear_cross_entropy`` with all that ``F.cross_entropy`` takes: class weights, probabilities, losses per row.

tests/interpreter/test_cross_entropy.py has the kernel of the plain cases.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_as_exact_as_eager

import transformer_fast as tfast
from transformer_fast.ops import cross_entropy, linear_cross_entropy
from transformer_fast.reference.cross_entropy import linear_cross_entropy as reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IGNORED, ROWS, VOCABULARY = 3, 150, 37
NAMES = "loss", "grad_x", "grad_weight", "grad_bias", "grad_target"
OPTIONS = [
    {"weighted": weighted, "label_smoothing": smoothing, "kind": kind, "bias": bias}
    for weighted, smoothing, kind, bias in itertools.product(
        (False, True), (0.0, 0.1), ("classes", "probabilities"), (True, False)
    )
]


def inputs(device, dtype=torch.float32, *, kind="classes", weighted=True, bias=True, shape=(3, ROWS // 3)):
    """x (3, rows / 3, d), weight, bias, target and class weights; all that may require a gradient do."""
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes):
        return torch.randn(sizes, generator=generator).to(device, dtype).requires_grad_()

    x, weight, added = normal(*shape, 16), normal(VOCABULARY, 16), normal(VOCABULARY)
    target = torch.randint(0, VOCABULARY, shape, generator=generator).to(device)
    if kind == "probabilities":
        target = normal(*shape, VOCABULARY).detach().float().softmax(-1).to(dtype).requires_grad_()
    by_class = torch.rand(VOCABULARY, generator=generator).to(device, dtype) if weighted else None
    return x, weight, added if bias else None, target, by_class


def eager(x, weight, bias, target, *, class_weight=None, **options):
    """``F.cross_entropy`` of all logits, in their own dtype."""
    logits = F.linear(x, weight, bias).reshape(-1, weight.shape[0])
    rows = target.reshape(logits.shape) if target.is_floating_point() else target.flatten()
    loss = F.cross_entropy(logits, rows, class_weight, **options)
    return loss.reshape(x.shape[:-1]) if options.get("reduction") == "none" else loss


def outcome(function, given, **options):
    """The loss, and the gradients of a fixed weighted sum of it, for all inputs that have one."""
    *given, class_weight = given
    loss = function(*given, class_weight=class_weight, **options)
    weights = torch.randn(loss.shape, generator=torch.Generator().manual_seed(2)).to(loss)
    return loss, *torch.autograd.grad(loss, [t for t in given if t is not None and t.requires_grad], weights)


def widened(given):
    wide = [t.detach().double() if t is not None and t.is_floating_point() else t for t in given]
    return [w.requires_grad_() if t is not None and t.requires_grad else w for t, w in zip(given, wide, strict=True)]


def names(given):
    return ["loss", *(name for name, t in zip(NAMES[1:], given) if t is not None and t.requires_grad)]


def check(given, what="", **options):
    """Our loss and gradients pass the gate; dtypes and shapes are torch's; the oracle is torch's loss."""
    if given[3].dtype == torch.int64:
        options["ignore_index"] = IGNORED
    actual = outcome(linear_cross_entropy, given, **options)
    plain, wide = outcome(eager, given, **options), widened(given)
    exact, oracle = outcome(eager, wide, **options), outcome(reference, wide, **options)
    for name, a, e, x, o in zip(names(given), actual, plain, exact, oracle, strict=True):
        torch.testing.assert_close(o, x, msg=lambda m, name=name: f"oracle, {what} {name}: {m}")
        assert (a.dtype, a.shape) == (e.dtype, e.shape), f"{what} {name}"
        ulps = 8 if name in ("grad_x", "grad_target") else 4 * ROWS**0.5
        assert_as_exact_as_eager(a, e, x, what=f"{what} {name}", ulps=ulps)


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request, monkeypatch):
    if request.param == "chunks":  # of 64 rows, the fewest
        monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 1, "cuda": 1})


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_options_of_torch(dtype, reduction, device):
    for options in OPTIONS:
        given = inputs(device, dtype, kind=options["kind"], weighted=options["weighted"], bias=options["bias"])
        check(given, str(options), label_smoothing=options["label_smoothing"], reduction=reduction)


@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_one_row(kind, reduction, weighted, device):
    for dtype in DTYPES:
        check(inputs(device, dtype, kind=kind, weighted=weighted, shape=()), f"{dtype}", reduction=reduction)


@pytest.mark.parametrize("reduction", cross_entropy.REDUCTIONS)
def test_no_rows_and_rows_that_are_all_ignored(reduction, device):
    empty = inputs(device, shape=(3, 0))
    ignored = inputs(device, shape=(2, 3))
    ignored[3].fill_(IGNORED)
    for given in (empty, ignored, inputs(device, shape=(0,), kind="probabilities")):
        options = {"reduction": reduction}
        if given[3].dtype == torch.int64:
            options["ignore_index"] = IGNORED
        for ours, torchs in zip(outcome(linear_cross_entropy, given, **options), outcome(eager, given, **options)):
            torch.testing.assert_close(ours, torchs, equal_nan=True)


@pytest.mark.parametrize("wrong", [-1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_named_or_not_a_number(wrong, device):
    x, weight, bias, target, by_class = inputs(device)
    target[0, :2], target[1, 4] = -100, wrong
    if device.type == "cpu":
        with pytest.raises(IndexError, match=rf"target 54 of 150 is {wrong}, .*expected 0 <= target < 37"):
            linear_cross_entropy(x, weight, bias, target, class_weight=by_class)
    else:
        assert linear_cross_entropy(x, weight, bias, target, class_weight=by_class).isnan()


def test_what_is_ignored_may_be_anything(device):
    x, weight, bias, target, by_class = inputs(device)
    expected = outcome(linear_cross_entropy, (x, weight, bias, target, by_class), ignore_index=IGNORED)
    with torch.no_grad():
        x[target == IGNORED] *= 1e30
    found = outcome(linear_cross_entropy, (x, weight, bias, target, by_class), ignore_index=IGNORED)
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


def test_an_impossible_class_that_is_not_wanted(device):
    x, weight, bias, target, by_class = inputs(device)
    with torch.no_grad():
        bias[5] = -torch.inf
    target[target == 5] = 6
    for reduction in cross_entropy.REDUCTIONS:
        given = (x, weight, bias, target, by_class)
        for ours, torchs in zip(
            outcome(linear_cross_entropy, given, reduction=reduction), outcome(eager, given, reduction=reduction)
        ):
            torch.testing.assert_close(ours, torchs)


def test_probabilities_of_a_wider_dtype_give_the_result_theirs(device):
    x, weight, bias, target, _ = inputs(device, torch.bfloat16, kind="probabilities", weighted=False)
    wide = target.detach().float()
    assert linear_cross_entropy(x, weight, bias, wide).dtype == eager(x, weight, bias, wide).dtype == torch.float32
    assert linear_cross_entropy(x, weight, bias, target, dtype=torch.float32).dtype == torch.float32


def test_frozen_inputs_get_no_gradient(device):
    for frozen in range(4):
        given = inputs(device, kind="probabilities")
        given[frozen].requires_grad_(False)
        linear_cross_entropy(*given[:4], class_weight=given[4]).backward()
        assert [t.grad is None for t in given[:4]] == [n == frozen for n in range(4)]


def test_targets_made_in_inference_mode_can_be_trained_on(device):
    for kind in ("classes", "probabilities"):
        x, weight, bias, target, by_class = inputs(device, kind=kind)
        target = target.detach()
        expected = outcome(linear_cross_entropy, (x, weight, bias, target, by_class))
        with torch.inference_mode():
            target, by_class = target.clone(), by_class.clone()
        for a, b in zip(outcome(linear_cross_entropy, (x, weight, bias, target, by_class)), expected, strict=True):
            assert torch.equal(a, b)


def test_small_gradients_of_half_precision_are_not_lost(device):
    x, weight, bias, target, by_class = inputs(device, torch.float16)
    losses = linear_cross_entropy(x, weight, bias, target, class_weight=by_class, reduction="none", dtype=torch.float32)
    grads = torch.autograd.grad(losses, (weight, bias), torch.full_like(losses, 2.0**-20), retain_graph=True)
    large = torch.autograd.grad(losses, (weight, bias), torch.ones_like(losses))
    for small, one in zip(grads, large, strict=True):
        torch.testing.assert_close(small.float() * 2.0**20, one.float(), atol=0.1, rtol=1e-2)
        assert small.any()


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_autocast_casts_as_torch(kind, device):
    x, weight, bias, target, by_class = inputs(device, kind=kind)
    given = [t.detach().bfloat16() for t in (x, weight, bias)]
    options = {"class_weight": by_class, "reduction": "none"}
    with torch.autocast(device.type, torch.bfloat16):
        ours, torchs = (
            linear_cross_entropy(x, weight, bias, target, **options),
            eager(x, weight, bias, target, **options),
        )
    assert ours.dtype == torchs.dtype == torch.float32
    exact = eager(*(t.double() for t in given), widened([target])[0], class_weight=by_class.double(), reduction="none")
    assert_as_exact_as_eager(ours, torchs, exact)
    ours.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_compiles_without_a_graph_break_for_any_number_of_rows(kind, device):
    graphs = []

    def counted(graph, args):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, args)

    def step(x, weight, bias, target, by_class):
        return linear_cross_entropy(x, weight, bias, target, class_weight=by_class, label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, backend=counted, dynamic=True)
    for rows in (5, 70, 150):
        given = inputs(device, kind=kind, shape=(rows,))
        leaves = [t for t in given if t.requires_grad]
        for a, b in zip(*(torch.autograd.grad(f(*given), leaves) for f in (compiled, step)), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_cannot_be_differentiated_twice(kind, device):
    given = inputs(device, kind=kind)
    losses = linear_cross_entropy(*given[:4], class_weight=given[4], reduction="none")
    (grad,) = torch.autograd.grad(losses.sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy cannot be differentiated again"):
        grad.sum().backward()
    with tfast.backend("reference"):
        losses = linear_cross_entropy(*given[:4], class_weight=given[4], reduction="none")
        (grad,) = torch.autograd.grad(losses.sum(), given[0], create_graph=True)
        grad.square().sum().backward()
    assert given[1].grad.any()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_meta_device_tells_shapes(weighted):
    for kind, reduction in itertools.product(("classes", "probabilities"), cross_entropy.REDUCTIONS):
        for dtype in DTYPES:
            given = inputs("meta", dtype, kind=kind, weighted=weighted)
            for ours, torchs in zip(*(outcome(f, given, reduction=reduction) for f in (linear_cross_entropy, eager))):
                assert (ours.device, ours.dtype, ours.shape) == (torchs.device, torchs.dtype, torchs.shape)


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_opcheck(kind, device):
    x, weight, bias, target, by_class = inputs(device, kind=kind, shape=(7,))
    options = by_class, 0.1, -100, 2**23
    ops = torch.ops.transformer_fast
    torch.library.opcheck(ops.linear_cross_entropy_rows.default, (x, weight, bias, target, *options))
    given = [t.detach() for t in (torch.rand(7, device=device), x, weight, bias, target)]
    asked = [True, False, True, kind == "probabilities"]
    torch.library.opcheck(ops.linear_cross_entropy_rows_backward.default, (*given, *options, asked))


def test_gradcheck():
    x, weight, bias, target, by_class = inputs("cpu", torch.float64, kind="probabilities", shape=(3,))

    def losses(*leaves):
        return linear_cross_entropy(*leaves, class_weight=by_class, label_smoothing=0.1, reduction="none")

    assert torch.autograd.gradcheck(losses, (x, weight, bias, target))


def test_logits_are_never_whole(monkeypatch, device):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", {"cpu": 64 * VOCABULARY, "cuda": 64 * VOCABULARY})
    given = inputs(device, shape=(6400,))
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(*given[:4], class_weight=given[4], label_smoothing=0.1).backward()
    used = "self_cpu_memory_usage" if device.type == "cpu" else "self_device_memory_usage"
    assert max(getattr(event, used) for event in profile.events()) < 6400 * VOCABULARY * 4


def test_a_model_gives_its_loss_in_float32():
    model = tfast.Transformer(20, 23, 16, 2, 2, 0.0).bfloat16()
    ids = torch.randint(1, 20, (2, 5))
    assert model.loss(ids, ids, None, None, ids).dtype == torch.float32
    with pytest.raises(ValueError, match=r"Transformer\.loss: reduction must be .*got 'none'"):
        model.loss(ids, ids, None, None, ids, reduction="none")
