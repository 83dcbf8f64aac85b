"""Begin and end of a block of ``functional()``, and its cost for our own modules: counted, not timed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerated import whose
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import transformer_fast as tfast
from transformer_fast.function_mode import FunctionalMode, counted_calls, is_in_block
from transformer_fast.inference import multihead
from transformer_fast.layers import torch_modules
from transformer_fast.layers.dropout import Dropout

Q = torch.randn(2, 4, 9, 16)
X = torch.randn(2, 9, 32)


def attend() -> Tensor:
    return F.scaled_dot_product_attention(Q, Q, Q)


def is_ours() -> bool:
    """Return True if a call of torch's attention is ours here."""
    return whose(attend) == {"ours"}


class Other(TorchFunctionMode):
    """Another mode: it notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_block_is_left_where_it_ends() -> None:
    block = tfast.functional()
    assert not is_ours() and not is_in_block()
    for _ in range(2):
        with block as nothing:
            assert nothing is None and is_ours() and is_in_block()
            with block, tfast.functional():
                assert is_ours()
            assert is_ours()
        assert not is_ours() and torch._C._len_torch_function_stack() == 0


def test_a_block_is_left_by_an_error() -> None:
    def fail() -> None:
        assert is_ours()
        F.scaled_dot_product_attention(Q, Q[..., :3], Q)

    for call in (fail, tfast.functional()(fail)):
        with pytest.raises(RuntimeError), tfast.functional():
            call()
        assert not is_ours() and torch._C._len_torch_function_stack() == 0


def test_a_decorator() -> None:
    @tfast.functional()
    def depth(n: int, *, last: str = "") -> tuple[Any, ...]:
        """Depth of a recursion."""
        return (is_ours(), last) if n == 0 else depth(n - 1, last=last)

    assert depth(3, last="end") == (True, "end") and depth.__doc__ == "Depth of a recursion."
    assert not is_ours()

    class Model(nn.Module):
        @tfast.functional()
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (32,)) if is_ours() else x

    torch.testing.assert_close(Model()(X), F.layer_norm(X, (32,)))


def test_a_generator_that_is_decorated() -> None:
    """The generator's own code runs in the block, and the code between the values does not."""

    @tfast.functional()
    def generate() -> Iterator[bool]:
        try:
            yield is_ours()
            yield is_ours()
        finally:
            assert is_ours()

    values = generate()
    for _ in range(2):
        assert next(values) and not is_ours()
    values.close()
    assert not is_ours() and list(generate()) == [True, True]


@pytest.mark.parametrize("what", [nn.Linear, 3, asyncio.sleep], ids=["a class", "a number", "a coroutine function"])
def test_what_cannot_be_decorated(what: Any) -> None:
    with pytest.raises(TypeError, match=r"^functional: expected a function to decorate, got"):
        tfast.functional()(what)


def test_threads() -> None:
    """A block holds for the thread that enters it, and threads may share one object."""
    block, found, both = tfast.functional(), {}, threading.Barrier(2)

    def run(name: str) -> None:
        for round_ in range(20):
            both.wait()
            if name == "inside":
                with block:
                    both.wait()
                    found[name, round_] = is_ours()
            else:
                both.wait()
                found[name, round_] = is_ours()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("inside", "outside")]
    with block:  # new threads begin outside
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 40 and all(ours is (name == "inside") for (name, _), ours in found.items())


def test_calls_of_other_modes() -> None:
    """A mode around the block sees our op, one inside sees torch's function first."""
    with Other() as around, tfast.functional():
        attend()
    assert F.scaled_dot_product_attention not in around.seen and "transformer_fast" in str(around.seen)
    with tfast.functional(), Other() as inside, counted_calls() as calls:
        attend()
    assert inside.seen[0] is F.scaled_dot_product_attention and calls["scaled_dot_product_attention", True] == 1


def test_a_default_device() -> None:
    with tfast.functional(), torch.device("meta"):
        assert torch.empty(2).is_meta and is_ours()
    with torch.device("meta"), tfast.functional():
        assert torch.empty(2).is_meta and is_ours()


def test_what_is_no_function_of_ours_passes() -> None:
    x = X.clone().requires_grad_()
    with tfast.functional():
        y = (x @ x.mT).softmax(-1).flatten(1)[..., 3:].to(torch.float64)
        assert y.shape == (2, 78) and y.requires_grad and repr(y.detach()[0, 0]).startswith("tensor(")
        y.sum().backward()
    assert x.grad is not None


class Passed(list[Any]):
    """torch's functions that went through a block."""


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    calls, handle = Passed(), FunctionalMode.__torch_function__

    def count(self: FunctionalMode, func: Any, *rest: Any) -> Any:
        calls.append(func)
        return handle(self, func, *rest)

    monkeypatch.setattr(FunctionalMode, "__torch_function__", count)
    return calls


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls of the eager fast path, True for those that it served."""
    served: list[bool] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            served.append(found is not None)
            return found

        return call

    for room, name in (
        (torch_modules, "eager_layer_norm"),
        (torch_modules, "eager_embed"),
        (multihead, "evaluated_heads"),
    ):
        monkeypatch.setattr(room, name, counted(getattr(room, name)))
    return served


SWAPPED: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "LayerNorm": (nn.LayerNorm(32), (X,)),
    "RMSNorm": (nn.RMSNorm(32, eps=1e-6), (X,)),
    "Embedding": (nn.Embedding(50, 32), (torch.arange(9),)),
    "MultiheadAttention": (nn.MultiheadAttention(32, 4, batch_first=True), (X, X, X)),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_modules_keep_the_fast_path(name: str, passed: Passed, direct: list[bool]) -> None:
    """No function of torch goes through the block, and the fast path serves the call; another mode ends it."""
    module, inputs = SWAPPED[name]
    fast = nn.ModuleList([module])
    report = tfast.accelerate(fast.eval())
    with torch.no_grad():
        outside = fast[0](*inputs)
        with tfast.functional():
            inside = fast[0](*inputs)
        assert direct == [True, True] and passed == []
        torch.testing.assert_close(inside, outside, rtol=0, atol=0)
        for modes in ((Other(), tfast.functional()), (tfast.functional(), Other())):
            direct.clear()
            with modes[0], modes[1]:
                torch.testing.assert_close(fast[0](*inputs), outside)
            assert not any(direct), "another mode sees the ops"
    report.undo()


def test_a_swapped_dropout_stays_outside(passed: Passed) -> None:
    module = Dropout(0.3)
    with tfast.functional():
        out = module(X)
        assert passed == [] and is_in_block()
    assert (out == 0).any()


def test_ops_in_a_block_are_direct(passed: Passed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one attribute of a tensor is read through the block before the extension has the call."""
    monkeypatch.setattr(torch.ops.transformer_fast, "attention", None)  # the dispatcher is not called
    with tfast.functional():
        tfast.attention(Q, Q, Q)
        tfast.layer_norm(X, None, None)
        attend()
    assert len(passed) == 3 and passed[-1] is F.scaled_dot_product_attention


def test_a_class_of_a_user_keeps_no_fast_path(direct: list[bool]) -> None:
    """A subclass of the mode may do anything."""

    class Mine(FunctionalMode):
        pass

    fast = nn.ModuleList([nn.LayerNorm(32)])
    tfast.accelerate(fast)
    with Mine():
        fast[0](X)
    assert direct == [False]
