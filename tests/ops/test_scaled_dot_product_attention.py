"""scaled_dot_product_attention against torch's function: equal results, gradients, shapes and errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import OLD_TORCH
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

import transformer_fast as tfast
from transformer_fast import reference
from transformer_fast.ops import scaled_dot_product_attention as ours
from transformer_fast.ops.scaled_dot_product_attention import TORCH
from transformer_fast.testing import assert_as_exact_as_eager, fixed_dropout_seed

INF = float("inf")
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    # query, key, value, mask, options
    "plain": ((2, 4, 17, 8), (2, 4, 17, 8), (2, 4, 17, 8), None, {}),
    "cross": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), None, {}),
    "values of another width": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 3), None, {}),
    "causal": ((2, 4, 17, 8), (2, 4, 17, 8), (2, 4, 17, 8), None, {"is_causal": True}),
    "causal, more keys": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), None, {"is_causal": True}),
    "causal, fewer keys": ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), None, {"is_causal": True}),
    "scale": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), None, {"scale": 0.7}),
    "an int and negative for scale": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), None, {"scale": -1}),
    "mask of queries and keys": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (5, 9), {}),
    "mask of keys": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 1, 1, 9), {}),
    "mask of one key": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 5, 1), {}),
    "mask of one number": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (1, 1), {}),
    "mask of heads": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (4, 5, 9), {}),
    "mask of all": ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 5, 9), {}),
    "two dimensions": ((5, 8), (9, 8), (9, 3), (5, 9), {}),
    "three dimensions": ((4, 5, 8), (4, 9, 8), (4, 9, 8), (4, 5, 9), {}),
    "three dimensions, causal": ((4, 5, 8), (4, 5, 8), (4, 5, 8), None, {"is_causal": True}),
    "five dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), (2, 3, 4, 5, 9), {}),
    "five, mask of some": ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), (3, 1, 5, 9), {}),
    "five, broadcast": ((2, 3, 4, 5, 8), (2, 1, 4, 9, 8), (1, 3, 4, 9, 8), (2, 1, 1, 5, 9), {}),
    "ranks differ": ((2, 3, 4, 5, 8), (4, 9, 8), (9, 3), (5, 9), {}),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 9, 8), (2, 1, 9, 8), (5, 9), {}),
    "one head of keys, many of values": ((2, 4, 5, 8), (2, 1, 9, 8), (2, 4, 9, 8), None, {}),
    "one head of queries": ((2, 1, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 5, 9), {}),
    "values alone have a batch": ((1, 4, 5, 8), (1, 4, 9, 8), (3, 4, 9, 8), (5, 9), {}),
    "groups": ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), (2, 4, 5, 9), {"enable_gqa": True}),
    "groups, causal": ((2, 6, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), None, {"enable_gqa": True, "is_causal": True}),
    "groups of three dimensions": ((4, 5, 8), (2, 9, 8), (2, 9, 8), None, {"enable_gqa": True}),
    "groups, batch broadcast": ((2, 4, 5, 8), (1, 2, 9, 8), (2, 2, 9, 8), None, {"enable_gqa": True}),
    "groups of keys and of values": ((2, 4, 5, 8), (2, 2, 9, 8), (2, 4, 9, 8), None, {"enable_gqa": True}),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8), None, {}),
    "no queries": ((2, 4, 0, 8), (2, 4, 5, 8), (2, 4, 5, 8), None, {}),
    "no batch": ((0, 4, 5, 8), (0, 4, 5, 8), (0, 4, 5, 8), None, {}),
    "no heads": ((2, 0, 5, 8), (2, 0, 5, 8), (2, 0, 5, 8), None, {}),
    "no columns": ((2, 4, 5, 0), (2, 4, 5, 0), (2, 4, 5, 8), None, {}),
}  # fmt: skip
MASKS = ("bool", "float", "learned")
PAIRS = [
    (name, kind)
    for name, (*_, mask, _options) in CASES.items()
    for kind in (MASKS if mask else ("none",))
    # A constant that is added to all keys of a query has a zero gradient, up to rounding.
    if not (kind == "learned" and mask[-1] == 1)
]


def inputs(name: str, kind: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Return query, key, value and mask; float ones require a gradient."""
    generator = torch.Generator().manual_seed(0)
    *shapes, mask, options = CASES[name]
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    if mask is not None:
        scores = torch.randn(mask, generator=generator)
        if kind == "bool":
            tensors.append(scores > -0.5)
        elif kind == "float":  # one entry blocks each score that it is added to
            scores.view(-1)[0] = -INF
            tensors.append(scores.to(dtype))
        else:
            tensors.append(scores.to(dtype).requires_grad_())
    return tensors, options


def run(attend: Callable[..., Tensor], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Return the result, and the gradients of all inputs that require one."""
    out = attend(*tensors, **options)
    weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    trained = [t for t in tensors if t.requires_grad]
    return [out, *torch.autograd.grad((out * weights).sum(), trained)]


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [t if t.dtype == torch.bool else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_as_torch_computes(name: str, kind: str, dtype: torch.dtype) -> None:
    if name == "no heads" and OLD_TORCH:
        pytest.skip("PyTorch 2.11 divides by the number of heads, and the process ends")
    tensors, options = inputs(name, kind, dtype)
    actual = run(ours, tensors, options)
    with sdpa_kernel(SDPBackend.MATH):
        eager = run(TORCH, tensors, options)
        exact = run(TORCH, doubled(tensors), options)
    rows = max(t.numel() for t in tensors) // 8
    for what, *results in zip(("out", "query", "key", "value", "mask"), actual, eager, exact):
        assert results[0].shape == results[1].shape and results[0].dtype == results[1].dtype == dtype
        assert_as_exact_as_eager(*results, ulps=max(8.0, 4 * rows**0.5), what=what)


def test_the_signature_is_that_of_torch() -> None:
    """torch's signature is in its documentation, where scale and enable_gqa are not keyword-only, as its parser
    wants."""
    documented = re.search(r"scaled_dot_product_attention\((.*?)\)", TORCH.__doc__, re.DOTALL)[1]
    parameters = inspect.signature(ours).parameters
    assert [part.strip().partition("=")[0] for part in documented.split(",")] == list(parameters)
    keyword_only = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == ["scale", "enable_gqa"]
    with pytest.raises(TypeError):
        TORCH(*[torch.randn(2, 3)] * 3, None, 0.0, False, None)


Q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(1))
SAME_ERROR: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "fewer heads": ((Q, Q[:, :2], Q[:, :2]), {}),
    "heads that do not divide": ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}),
    "groups of two dimensions": ((Q[0, 0], Q[0, 0], Q[0, 0]), {"enable_gqa": True}),
    "other batch": ((Q, Q[:1].expand(3, -1, -1, -1), Q), {}),
    "other width": ((Q, Q[..., :7], Q), {}),
    "one dimension": ((Q[0, 0, 0], Q, Q), {}),
    "mask too large": ((Q, Q, Q, torch.ones(5, 7) > 0), {}),
    "mask of more dimensions": ((Q, Q, Q, torch.ones(1, 2, 4, 5, 5) > 0), {}),
    "mask with a batch of its own": ((Q[:1], Q[:1], Q[:1], torch.ones(3, 4, 5, 5) > 0), {}),
    "mask of one dimension": ((Q, Q, Q, torch.zeros(5)), {}),
    "mask in fp64": ((Q, Q, Q, torch.zeros(5, 5, dtype=torch.float64)), {}),
    "mask in bf16": ((Q, Q, Q, torch.zeros(5, 5, dtype=torch.bfloat16)), {}),
    "integer mask": ((Q, Q, Q, torch.ones(5, 5, dtype=torch.int64)), {}),
    "list for a mask": ((Q, Q, Q, [1]), {}),
    "mixed dtypes": ((Q, Q.double(), Q), {}),
    "integers": ((Q.long(), Q.long(), Q.long()), {}),
    "complex": ((Q.to(torch.complex64),) * 3, {}),
    "no tensor": ((None, Q, Q), {}),
    "no key": ((Q, None, Q), {}),
    "a list": (([1.0], Q, Q), {}),
    "too much dropout": ((Q, Q, Q), {"dropout_p": 1.5}),
    "negative dropout": ((Q, Q, Q), {"dropout_p": -0.1}),
    "text for dropout": ((Q, Q, Q), {"dropout_p": "a"}),
    "an int for is_causal": ((Q, Q, Q), {"is_causal": 1}),
    "None for is_causal": ((Q, Q, Q), {"is_causal": None}),
    "an int for enable_gqa": ((Q, Q, Q), {"enable_gqa": 1}),
    "text for scale": ((Q, Q, Q), {"scale": "x"}),
    "scale by position": ((Q, Q, Q, None, 0.0, False, 1.0), {}),
    "unknown name": ((Q, Q, Q), {"mask": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_ERROR)
def test_a_wrong_call_gets_the_error_of_torch(name: str) -> None:
    args, options = SAME_ERROR[name]
    with pytest.raises((TypeError, RuntimeError, IndexError)) as expected:
        TORCH(*args, **options)
    with pytest.raises(expected.type) as actual:
        ours(*args, **options)
    assert type(actual.value) is type(expected.value)


def test_a_mask_and_is_causal() -> None:
    """torch's documentation forbids both; the math kernel refuses, and the flash kernel for CPUs since 2.14."""
    mask, refusal = torch.randn(5, 5), "should not be set when is_causal=True"
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match=refusal):
        ours(Q, Q, Q, mask, is_causal=True)
    if torch.__version__ >= TorchVersion("2.14"):
        with pytest.raises(RuntimeError, match=refusal):
            ours(Q, Q, Q, mask, is_causal=True)
    else:
        assert torch.equal(ours(Q, Q, Q, mask, is_causal=True), TORCH(Q, Q, Q, mask, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_rows_that_see_no_key(kind: str, kernel: SDPBackend, dtype: torch.dtype) -> None:
    """If all keys are blocked, the result and gradient are 0; if the lowest number is added, the result is the mean
    of the values."""
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=dtype).requires_grad_() for _ in range(3))
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[1] = False
    added = -INF if kind == "-inf" else torch.finfo(dtype).min
    mask = keep if kind == "bool" else torch.zeros(4, 4, dtype=dtype).masked_fill(~keep, added)
    out = ours(q, k, v, mask)
    with sdpa_kernel(kernel):
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, TORCH(q, k, v, mask), atol=bound, rtol=bound)
    grad = torch.autograd.grad(out[:, :, 1].sum(), q)[0][:, :, 1]
    if kind == "lowest":
        torch.testing.assert_close(out[:, :, 1], v.mean(2))
    else:
        assert not out[:, :, 1].any() and not grad.any()


@pytest.mark.parametrize("options", [{}, {"mask": "bool"}, {"mask": "float"}, {"is_causal": True}], ids=str)
def test_dropout_draws_the_mask_of_the_oracle(options: dict[str, Any]) -> None:
    """All entry points, with 4 and 3 dimensions, draw the reference's masks in the seed's order."""
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    keep = torch.rand(9, 9) > 0.3
    keep[:, 0] = True
    mask = {"bool": keep, "float": torch.randn(9, 9), None: None}[options.get("mask")]
    causal = options.get("is_causal", False)
    with fixed_dropout_seed(11) as seed:
        actual = ours(q, k, v, mask, 0.4, causal)
        flat = ours(q[0], k[0], v[0], mask, 0.4, causal)
    given = {"keep": keep[None, None]} if options.get("mask") == "bool" else {}
    given |= {"bias": mask[None, None]} if options.get("mask") == "float" else {}
    given |= {"causal": 0} if causal else {}
    expected = reference.attention.attention(
        q, k, v, scale=8**-0.5, dropout_p=0.4, seed=seed, empty_rows="zero", **given
    )[0]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(flat, expected[0])


def test_the_seed_of_torch_governs_dropout() -> None:
    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(Q, Q, Q, dropout_p=0.5)

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))
    assert not ours(Q, Q, Q, dropout_p=1.0).any()
    mean = torch.stack([ours(Q, Q, Q, dropout_p=0.5) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, TORCH(Q, Q, Q), atol=0.15, rtol=0.0)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16)], ids=str)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "half", "lowest"])
def test_autocast(dtypes: tuple[torch.dtype, ...], kind: str) -> None:
    q, k, v = (Q.to(dtype) for dtype in dtypes)
    masks = {
        "none": None,
        "bool": torch.rand(5, 5) > 0.2,
        "float": torch.randn(5, 5),
        "half": torch.randn(5, 5).half(),
        "lowest": torch.full((5, 5), torch.finfo(torch.float32).min),  # -inf in bfloat16
    }
    mask = masks[kind]
    rounded = [t if t is None or t.dtype == torch.bool else t.bfloat16().double() for t in (q, k, v, mask)]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = ours(q, k, v, mask), TORCH(q, k, v, mask)
        assert actual.dtype == expected.dtype == torch.bfloat16
        assert_as_exact_as_eager(actual, expected, TORCH(*rounded))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(q.double(), k.double(), v.double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="same dtype"):
            ours(q.double(), k, v)


def test_strides_are_those_of_torch() -> None:
    """Models call view on the transposed result."""
    for q in (Q, torch.randn(2, 5, 4, 8).transpose(1, 2)):
        assert ours(q, q, q).stride() == TORCH(q, q, q).stride()


def test_what_the_kernels_do_not_serve_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        calls.append("")
        return TORCH(*args, **kwargs)

    module = inspect.getmodule(ours)
    monkeypatch.setattr(module, "TORCH", theirs)

    class Marked(Tensor):
        pass

    def forward_mode(t: Tensor) -> Tensor:
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            return forward_ad.unpack_dual(ours(forward_ad.make_dual(t, torch.ones_like(t)), t, t)).tangent

    expected = TORCH(Q, Q, Q)
    torch.testing.assert_close(torch.vmap(ours)(Q, Q, Q), expected)
    assert len(calls) == 1
    summed = torch.func.grad(lambda t: ours(t, Q, Q).sum())(Q)
    torch.testing.assert_close(summed, torch.func.grad(lambda t: TORCH(t, Q, Q).sum())(Q))
    assert forward_mode(Q).isfinite().all() and len(calls) == 3
    assert type(ours(Q.as_subclass(Marked), Q, Q)) is Marked and len(calls) == 4
    jagged = torch.nested.nested_tensor([Q[0].transpose(0, 1), Q[1].transpose(0, 1)], layout=torch.jagged)
    assert ours(*[jagged.transpose(1, 2)] * 3).is_nested and len(calls) == 5
    from torch.nn.attention.bias import causal_lower_right

    torch.testing.assert_close(
        ours(Q[:, :, :3], Q, Q, causal_lower_right(3, 5)), TORCH(Q[:, :, :3], Q, Q, causal_lower_right(3, 5))
    )
    assert len(calls) == 6
    monkeypatch.setattr(module, "_backend", lambda asked, device, dtype: None)  # a machine without kernels
    monkeypatch.setattr(module, "_eager_result", lambda *call: None)
    assert torch.equal(ours(Q, Q, Q), expected) and len(calls) == 7


def test_a_backend_that_was_asked_for_is_used() -> None:
    with tfast.backend("reference"):
        torch.testing.assert_close(ours(Q, Q, Q, is_causal=True), TORCH(Q, Q, Q, is_causal=True))


def test_ours_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users assign our function to torch's name; calls that fall back must not recurse."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
    torch.testing.assert_close(F.scaled_dot_product_attention(Q, Q, Q), TORCH(Q, Q, Q))
    with pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(Q, Q.double(), Q)


def test_the_meta_device() -> None:
    q = torch.empty(2, 4, 5, 8, device="meta", dtype=torch.bfloat16)
    out = ours(q, q, q[..., :3])
    assert out.device.type == "meta" and out.shape == (2, 4, 5, 3) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_causal_with_a_scale_that_is_not_positive(scale: float) -> None:
    """PyTorch's fused kernel gives NaN."""
    ahead = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = (Q @ Q.mT * scale).masked_fill(~ahead, -torch.inf).softmax(-1) @ Q
    torch.testing.assert_close(ours(Q, Q, Q, is_causal=True, scale=scale), expected)


def test_jagged_tensors_are_left_to_torch() -> None:
    """Causal, no kernel of a CPU takes it; `tfast.attention` names the argument."""
    torch.manual_seed(0)
    x = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    expected = TORCH(x, x, x)
    torch.testing.assert_close(ours(x, x, x).values(), expected.values())
    for call in (TORCH, ours):
        with pytest.raises(RuntimeError, match="No viable backend"):
            call(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="q: expected a dense tensor, got a nested tensor"):
        tfast.attention(x, x, x, causal=True)
