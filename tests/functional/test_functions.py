"""torch's functions in a block: values, gradients and errors are torch's, whoever computes the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from accelerated import from_one_seed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import transformer_fast as tfast
from transformer_fast.function_mode import OURS, counted_calls
from transformer_fast.layers import functions
from transformer_fast.testing import assert_as_exact_as_eager

KEEP = torch.arange(9) < torch.tensor([9, 4])[:, None, None, None]
TARGETS = torch.randint(0, 300, (20,), generator=torch.Generator().manual_seed(9))
IGNORED = TARGETS.masked_fill(torch.arange(20) % 3 == 0, -1)


class Inputs:
    """Tensors of one dtype, with the same numbers in every dtype.

    Attributes:
        q, k, v: (2, 4, 9, 16); ``few`` has two heads, and ``bias`` is (4, 9, 9).
        x: rows (3, 7, 32), with ``gain`` and ``shift``; ``wide_gain`` and ``wide_shift`` are float32 at least.
        logits: (20, 300).
    """

    SHAPES: ClassVar = {
        "q": (2, 4, 9, 16), "k": (2, 4, 9, 16), "v": (2, 4, 9, 16), "few": (2, 2, 9, 16), "bias": (4, 9, 9),
        "x": (3, 7, 32), "gain": (32,), "shift": (32,), "wide_gain": (32,), "wide_shift": (32,), "logits": (20, 300),
    }  # fmt: skip

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        for seed, (name, shape) in enumerate(self.SHAPES.items()):
            t = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)
            wide = torch.promote_types(dtype, torch.float32) if name.startswith("wide") else dtype
            setattr(self, name, t.to(wide).requires_grad_())

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(name)  # for the type checker


Call = Callable[[Inputs], Tensor]


def attention(*args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **options)


TAKEN: dict[str, Call] = {
    "attention": lambda t: attention(t.q, t.k, t.v),
    "attention, causal": lambda t: attention(t.q, t.k, t.v, is_causal=True),
    "attention, causal, fewer queries": lambda t: attention(t.q[:, :, :4], t.k, t.v, is_causal=True),
    "attention, kept": lambda t: attention(t.q, t.k, t.v, KEEP),
    "attention, empty rows": lambda t: attention(t.q, t.k, t.v, torch.zeros(9, 9, dtype=torch.bool)),
    "attention, some rows empty": lambda t: attention(t.q, t.k, t.v, torch.ones(9, 9).tril(-1).bool()),
    "attention, added": lambda t: attention(t.q, t.k, t.v, t.bias),
    "attention, -inf": lambda t: attention(t.q, t.k, t.v, t.bias.masked_fill(~KEEP, -torch.inf)),
    "attention, scale": lambda t: attention(t.q, t.k, t.v, scale=0.3),
    "attention, grouped": lambda t: attention(t.q, t.few, t.few, KEEP, enable_gqa=True),
    "attention, three dimensions": lambda t: attention(t.q[0], t.k[0], t.v[0], attn_mask=t.bias),
    "attention, keywords": lambda t: attention(query=t.q, key=t.k, value=t.v, dropout_p=0.0),
    "norm": lambda t: F.layer_norm(t.x, (32,), t.gain, t.shift),
    "norm, keywords": lambda t: F.layer_norm(input=t.x, normalized_shape=[32], weight=t.gain, bias=t.shift, eps=1e-3),
    "norm, no parameters": lambda t: F.layer_norm(t.x, t.x.shape[-1:]),
    "norm, no shift": lambda t: F.layer_norm(t.x, t.gain.shape, t.gain),
    "norm, no gain": lambda t: F.layer_norm(t.x, (32,), None, t.shift),
    "norm, strided": lambda t: F.layer_norm(t.x.transpose(0, 1), (32,), t.gain, t.shift),
    "norm, wider parameters": lambda t: F.layer_norm(t.x, (32,), t.wide_gain, t.wide_shift),
    "norm, builtin": lambda t: torch.layer_norm(t.x, (32,), t.gain, t.shift, 1e-5, False),
    "norm of torch.nn": lambda t: nn.LayerNorm(32, dtype=t.x.dtype)(t.x),
    "RMSNorm": lambda t: F.rms_norm(t.x, (32,), t.gain),
    "RMSNorm, eps": lambda t: F.rms_norm(t.x, (32,), t.gain, eps=0.1),
    "RMSNorm, no gain": lambda t: F.rms_norm(t.x, (32,), eps=1e-5),
    "RMSNorm, builtin": lambda t: torch.rms_norm(t.x, (32,), t.gain),
    "RMSNorm of torch.nn": lambda t: nn.RMSNorm(32, eps=1e-6, dtype=t.x.dtype)(t.x),
    "loss": lambda t: F.cross_entropy(t.logits, TARGETS),
    "loss, sum": lambda t: F.cross_entropy(t.logits, TARGETS, reduction="sum"),
    "loss, smoothed": lambda t: F.cross_entropy(t.logits, TARGETS, label_smoothing=0.2),
    "loss, ignored": lambda t: F.cross_entropy(t.logits, IGNORED, ignore_index=-1, label_smoothing=0.1),
    "loss, NaN in a row that is ignored": lambda t: F.cross_entropy(
        t.logits.masked_fill((IGNORED == -1)[:, None], torch.nan), IGNORED, ignore_index=-1
    ),
    "loss, all ignored": lambda t: F.cross_entropy(t.logits, torch.full((20,), -100)),
    "loss, strided": lambda t: F.cross_entropy(t.logits.t().contiguous().t(), TARGETS),
    "loss of torch.nn": lambda t: nn.CrossEntropyLoss(ignore_index=-1)(t.logits, IGNORED),
    "dropout in evaluation": lambda t: F.dropout(t.x * 1, 0.4, training=False),
}
"""Calls that are ours, and equal torch's."""


class Labelled(Tensor):
    """Tensor subclass of a user."""


STAYS: dict[str, Call] = {
    "attention, a subclass": lambda t: attention(t.q.as_subclass(Labelled), t.k, t.v),
    "attention, vmap": lambda t: torch.func.vmap(lambda q: attention(q, q, q))(t.q),
    "attention, no dimension of the head": lambda t: attention(t.q[..., :0], t.k[..., :0], t.v),
    "dropout in place": lambda t: F.dropout(t.x * 1, 0.4, True, True),
    "dropout of all": lambda t: F.dropout(t.x, 1.0),
    "dropout, gaps": lambda t: F.dropout(t.x[..., ::2], 0.4),
    "dropout of a number": lambda t: F.dropout(t.x[0, 0, 0], 0.4),
    "dropout of channels": lambda t: F.dropout1d(t.x, 0.4),
    "norm of two dimensions": lambda t: F.layer_norm(t.x, (7, 32)),
    "RMSNorm of two dimensions": lambda t: F.rms_norm(t.x, (7, 32)),
    "norm, grad": lambda t: torch.func.grad(lambda x: F.layer_norm(x, (32,)).pow(3).sum())(t.x.detach()),
    "norm, a subclass": lambda t: F.layer_norm(t.x.as_subclass(Labelled), (32,)),
    "norm of groups": lambda t: F.group_norm(t.x, 7),
    "loss, weights": lambda t: F.cross_entropy(t.logits, TARGETS, weight=torch.rand(300)),
    "loss, few classes": lambda t: F.cross_entropy(t.logits[:, :255], TARGETS % 255),
    "loss, none": lambda t: F.cross_entropy(t.logits, TARGETS, reduction="none"),
    "loss, probabilities": lambda t: F.cross_entropy(t.logits, t.logits.detach().softmax(-1)),
    "loss, one row": lambda t: F.cross_entropy(t.logits[0], TARGETS[0]),
    "loss, images": lambda t: F.cross_entropy(t.logits.view(2, 10, 300).transpose(1, 2), TARGETS.view(2, 10)),
    "traced": lambda t: torch.jit.trace(lambda x: F.dropout(F.layer_norm(x, (32,)), 0.4), t.x, check_trace=False)(t.x),
}
"""Calls that are torch's in a block too, bit for bit."""


def outcome(call: Call, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor | None]:
    """Return the result of a call and the gradients of the inputs, from one seed."""
    torch.manual_seed(seed)
    inputs = Inputs(dtype)
    out = call(inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    leaves = [getattr(inputs, name) for name in Inputs.SHAPES]
    grads = torch.autograd.grad(out, leaves, weights, allow_unused=True) if out.requires_grad else ()
    return [out.detach(), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", TAKEN)
def test_what_is_ours(what: str, dtype: torch.dtype) -> None:
    """Held to the gate, as are PyTorch's samples in ``tests/ops/test_torch_samples.py``."""
    with counted_calls() as calls:
        found = outcome(tfast.functional()(TAKEN[what]), dtype)
    assert calls and all(ours for _, ours in calls), calls
    expected, exact = outcome(TAKEN[what], dtype), outcome(TAKEN[what], torch.float64)
    for n, (ours, torchs, truth) in enumerate(zip(found, expected, exact, strict=True)):
        assert (ours is None) is (torchs is None), n
        if ours is not None:
            assert (ours.shape, ours.dtype) == (torchs.shape, torchs.dtype), n
            rows = ours.numel() // max(1, ours.shape[-1]) if ours.dim() > 1 else 21  # a vector's gradient is a sum
            assert_as_exact_as_eager(ours, torchs, truth, ulps=4 * max(1, rows) ** 0.5, what=f"{what}, {n}")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("what", STAYS)
def test_what_stays_torch_s(what: str) -> None:
    with counted_calls() as calls:
        found = outcome(tfast.functional()(STAYS[what]))
    assert not any(ours for _, ours in calls), calls
    for ours, torchs in zip(found, outcome(STAYS[what]), strict=True):
        assert (ours is None) is (torchs is None) and (ours is None or torch.equal(ours, torchs))


def test_every_function_has_both_kinds_of_calls() -> None:
    """The tables lack no function."""
    for table, taken in ((TAKEN, True), (STAYS, False)):
        with tfast.functional(), counted_calls() as calls:
            for call in table.values():
                call(Inputs())
        assert {name for name, ours in calls if ours is taken} == {function.__name__ for function in OURS}


WRONG: dict[str, Call] = {
    "attention, dtypes": lambda t: attention(t.q, t.k.double(), t.v),
    "attention, sizes": lambda t: attention(t.q, t.k[..., :8], t.v),
    "attention, a mask's dtype": lambda t: attention(t.q, t.k, t.v, t.bias.double()),
    "attention, no tensor": lambda t: attention([1.0], t.k, t.v),
    "attention, unknown": lambda t: attention(t.q, t.k, t.v, causal=True),
    "dropout, p": lambda t: F.dropout(t.x, 1.5),
    "dropout, integers": lambda t: F.dropout(torch.ones(3, 4, dtype=torch.long), 0.5),
    "dropout, text": lambda t: F.dropout(t.x, "half"),
    "norm, shape": lambda t: F.layer_norm(t.x, (31,), t.gain),
    "norm, an int": lambda t: F.layer_norm(t.x, 32),
    "norm, weight": lambda t: F.layer_norm(t.x, (32,), t.gain[:31]),
    "norm, dtypes": lambda t: F.layer_norm(t.x, (32,), t.gain.bfloat16()),
    "norm, two dtypes": lambda t: F.layer_norm(t.x.bfloat16(), (32,), t.gain, t.shift.bfloat16()),
    "norm, eps": lambda t: F.layer_norm(t.x, (32,), t.gain, t.shift, eps=None),
    "norm, a list": lambda t: F.layer_norm(t.x, (32,), [1.0] * 32),
    "norm, integers": lambda t: F.layer_norm(TARGETS, (20,)),
    "RMSNorm, eps": lambda t: F.rms_norm(t.x, (32,), eps="small"),
    "RMSNorm, weight": lambda t: F.rms_norm(t.x, (32,), t.gain[:31]),
    "loss, target": lambda t: F.cross_entropy(t.logits, TARGETS + 200),
    "loss, negative target": lambda t: F.cross_entropy(t.logits, TARGETS - 250),
    "loss, sizes": lambda t: F.cross_entropy(t.logits, TARGETS[:9]),
    "loss, smoothing": lambda t: F.cross_entropy(t.logits, TARGETS, label_smoothing=1.5),
    "loss, reduction": lambda t: F.cross_entropy(t.logits, TARGETS, reduction="average"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_call_gets_torch_s_error(what: str) -> None:
    errors = []
    for call in (WRONG[what], tfast.functional()(WRONG[what])):
        with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)) as error:
            call(Inputs())
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


DRAWS: dict[str, Callable[[Inputs, float], Tensor]] = {
    "dropout": lambda t, p: F.dropout(t.x, p),
    "dropout, builtin": lambda t, p: torch.dropout(t.x, p, True),
    "dropout of torch.nn": lambda t, p: nn.Dropout(p)(t.x),
    "attention": lambda t, p: attention(t.q, t.k, t.v, dropout_p=p),
    "attention, masked": lambda t, p: attention(t.q, t.k, t.v, KEEP, p),
}


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("what", DRAWS)
def test_dropout_follows_the_seed_and_equals_the_reference(what: str, p: float) -> None:
    def call(t: Inputs) -> Tensor:
        return DRAWS[what](t, p)

    def results(seed: int = 0) -> list[Tensor]:
        return [t for t in outcome(call, seed=seed) if t is not None]

    with tfast.functional():
        with counted_calls() as calls:
            first, again, other = results(), results(), results(seed=1)
        with tfast.backend("reference"):
            expected = results()
    assert all(ours for _, ours in calls)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    torch.testing.assert_close(first, expected)
    assert not torch.equal(first[0], results()[0]), "torch draws another mask"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("what", TAKEN)
def test_under_autocast(what: str, dtype: torch.dtype) -> None:
    """Dtypes are torch's; outputs are held to the gate."""
    with torch.autocast("cpu", dtype):
        ours, torchs = outcome(tfast.functional()(TAKEN[what])), outcome(TAKEN[what])
    kinds = [[None if t is None else (t.shape, t.dtype) for t in found] for found in (ours, torchs)]
    assert kinds[0] == kinds[1]
    exact = outcome(TAKEN[what], torch.float64)[0]
    if "attention" in what:  # computed in 16 bits
        assert_as_exact_as_eager(ours[0], torchs[0], exact)
    else:
        torch.testing.assert_close(ours[0], torchs[0], equal_nan=True)


@pytest.mark.parametrize("what", TAKEN)
def test_without_gradients(what: str) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context(), counted_calls() as calls:
            found, expected = tfast.functional()(TAKEN[what])(Inputs()), TAKEN[what](Inputs())
        assert calls and all(ours for _, ours in calls)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_tangents_go_to_torch() -> None:
    with forward_ad.dual_level(), tfast.functional(), counted_calls() as calls:
        x = forward_ad.make_dual(torch.randn(3, 32), torch.ones(3, 32))
        out = forward_ad.unpack_dual(F.layer_norm(x * x, (32,)))
    assert out.tangent is not None and not any(ours for _, ours in calls)


def test_the_backend_is_asked() -> None:
    """The reference computes what is ours; a call with logits stays torch's then."""
    with tfast.backend("reference"), tfast.functional(), counted_calls() as calls:
        for call in (TAKEN["attention, kept"], TAKEN["norm"], TAKEN["RMSNorm"], TAKEN["loss"]):
            call(Inputs())
    assert {name for name, ours in calls if not ours} == {"cross_entropy"}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ours"),
    [(torch.bfloat16, 64, True), (torch.float32, 256, True), (torch.float32, 264, False), (torch.float64, 64, False)],
    ids=str,
)
def test_attention_on_a_gpu_is_ours_with_a_mask_or_dropout(dtype: torch.dtype, head_dim: int, ours: bool) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, head_dim, device="cuda", dtype=dtype)
        keep = torch.ones(2, 1, 5, 5, device="cuda", dtype=torch.bool)
        assert (functions.scaled_dot_product_attention(q, q, q, keep) is not None) is ours
        assert (functions.scaled_dot_product_attention(q, q, q, keep, is_causal=False, scale=2.0) is not None) is ours
        for options in ({}, {"is_causal": True}, {"scale": 2.0}):
            assert functions.scaled_dot_product_attention(q, q, q, **options) is None


def test_dropout_and_loss_on_a_gpu_are_torch_s_and_norms_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        x, logits = torch.empty(2, 5, 64, device="cuda"), torch.empty(5, 300, device="cuda")
        assert functions.dropout(x, 0.3) is None and functions.builtin_dropout(x, 0.3, True) is None
        assert functions.cross_entropy(logits, torch.empty(5, device="cuda", dtype=torch.long)) is None
        for norm in (functions.layer_norm, functions.rms_norm):
            assert norm(x, (64,)).dtype == torch.float32 and norm(x.half(), (64,)).dtype == torch.float16
            assert norm(x.half(), (64,), torch.empty(64, device="cuda")) is None, "torch takes no wider weights there"
            with monkeypatch.context() as patch:
                patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
                assert norm(x.half(), (64,)).dtype == torch.float32, "torch's dtype under autocast"


def test_other_devices_are_torch_s() -> None:
    with tfast.functional(), counted_calls() as calls:
        q = torch.empty(2, 4, 5, 8, device="meta")
        F.dropout(F.layer_norm(F.scaled_dot_product_attention(q, q, q), (8,)), 0.1)
    assert len(calls) == 3 and not any(ours for _, ours in calls)


def test_a_loss_has_no_second_derivative_and_says_so() -> None:
    logits = torch.randn(20, 300, requires_grad=True)
    with tfast.functional():
        loss = F.cross_entropy(logits, TARGETS)
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        (loss + grad.square().sum()).backward()


def test_a_loss_may_be_differentiated_several_times() -> None:
    logits = torch.randn(20, 300, requires_grad=True)
    with tfast.functional():
        loss = F.cross_entropy(logits, IGNORED, ignore_index=-1)
    grads = [torch.autograd.grad(loss, logits, torch.tensor(f), retain_graph=f < 3)[0].clone() for f in (2.0, 1.0, 3.0)]
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, IGNORED, ignore_index=-1), logits)
    for grad, factor in zip(grads, (2, 1, 3), strict=True):
        torch.testing.assert_close(grad, factor * expected)


def test_logits_stay_as_they_were() -> None:
    """The kernel writes to copies."""
    logits = torch.randn(20, 300)
    before = logits.clone()
    with tfast.functional():
        F.cross_entropy(logits, TARGETS)
        F.cross_entropy(logits.requires_grad_(), IGNORED, ignore_index=-1).backward()
    assert torch.equal(logits, before)


def test_seeds_of_a_step() -> None:
    """A step of a small network, from one seed, twice."""
    rows = torch.randn(7, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 300))

    @tfast.functional()
    def step() -> Tensor:
        loss = F.cross_entropy(model(rows), TARGETS[:7])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    assert torch.equal(*from_one_seed(step, step)) and not torch.equal(step(), step())
