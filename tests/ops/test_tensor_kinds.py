"""Swapped modules with tensors that the fused ops do not support give the results, or errors, of torch.nn's class."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from form_arguments import fresh
from handwritten_forms import FORMS
from op_calls import Operators
from swapped_modules import KINDS, E, L, N, assert_alike, assert_as_torch, every_kind, inputs, make, outcome, swapped
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import transformer_fast as tfast
from transformer_fast.swap.rules import SWAPS
from transformer_fast.tensors import takes_fused_ops


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of prototypes
        yield


class Labelled(Tensor):
    """Tensor subclass that changes nothing."""


class Watching(Tensor):
    """Tensor subclass that sees the functions called with it."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapping(Tensor):
    """Tensor subclass that wraps a tensor, has no memory itself, and sees the operators called with it."""

    inner: Tensor
    seen: ClassVar[list[Any]] = []

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(op)
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, Wrapping) else t, (args, kwargs or {}))
        return tree_map(lambda t: Wrapping(t) if isinstance(t, Tensor) else t, op(*args, **kwargs))


def rows(x: Tensor) -> list[Tensor]:
    """Return sentences of different lengths."""
    return [row[: max(1, x.shape[1] - 2 * n)] for n, row in enumerate(x)]


def jagged(x: Tensor) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows(x)])
    offsets = OFFSETS.setdefault(x.shape[1], F.pad(lengths.cumsum(0), (1, 0)))  # tensors of the same lengths share it
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows(x)), offsets)


OFFSETS: dict[int, Tensor] = {}

UNSERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "nested, jagged": jagged,
    "nested, strided": lambda x: torch.nested.nested_tensor(rows(x)),
    "subclass": lambda x: x.as_subclass(Labelled),
    "subclass with __torch_function__": lambda x: x.as_subclass(Watching),
    "subclass with __torch_dispatch__": Wrapping,
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "sparse": lambda x: x.to_sparse(),
    "sparse, hybrid": lambda x: x.to_sparse(1),
    "mkldnn": lambda x: x.to_mkldnn(),
}
"""Functions that convert a plain tensor (N, L, ...) to one of a kind."""

SERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "parameter": lambda x: nn.Parameter(x, requires_grad=x.is_floating_point()),
    "buffer": lambda x: nn.Buffer(x),
    "lazily negated": lambda x: torch.complex(x, -x).conj().imag if x.is_floating_point() else x,
    "strided": lambda x: torch.stack((x, x), -1)[..., 0],
}


def plain(t: Tensor) -> Tensor:
    """Return the values of a tensor of any kind."""
    t = t.detach()
    if isinstance(t, Wrapping):
        return plain(t.inner)
    if isinstance(t, torch.masked.MaskedTensor):
        return t.get_data()
    if t.is_nested:
        return t.values() if t.layout is torch.jagged else t.to_padded_tensor(0.0)
    t = t.as_subclass(Tensor)
    return t if t.layout is torch.strided else t.to_dense()


def called(module: nn.Module, convert: Callable[[Tensor], Tensor], args: list[Tensor], grad: bool) -> Any:
    """Return the output for tensors of a kind, and the gradients of the parameters; without parameters, those of a
    tensor."""
    options = {"need_weights": False} if isinstance(module, nn.MultiheadAttention) else {}
    with torch.set_grad_enabled(grad):
        given = [convert(t) for t in args] if grad else [convert(args[0])] * len(args)
        out = module(*given, **options)
        outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
        found = [p for p in module.parameters() if grad]
        return (*outs, *(torch.autograd.grad(outs[0].sum(), found, allow_unused=True) if found else ()))


def test_every_class_is_here() -> None:
    assert {*SWAPS} <= {*KINDS.values()}
    for kind in KINDS.values():
        made = type(swapped(make(kind)))
        names, ours = (list(inspect.signature(k.forward).parameters) for k in (kind, made))
        assert names == ours[: len(names)]  # arguments may be given by name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", UNSERVED)
@every_kind
def test_tensors_without_kernels_get_torchs_numbers(kind: type[nn.Module], name: str, training: bool) -> None:
    """With equal dropout masks, torch's operators compute equal bits."""
    module, args = make(kind, p=0.3).train(training), inputs(kind)
    results, seen = [], []
    for m in (module, swapped(module)):
        Watching.seen, Wrapping.seen = [], []
        results.append(outcome(lambda m=m: called(m, UNSERVED[name], args, training), plain))
        seen.append((Watching.seen, Wrapping.seen))
    assert_alike(results[1], results[0])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", UNSERVED)
def test_each_kind_is_known_as_such(name: str) -> None:
    t = UNSERVED[name](torch.randn(N, L, E))
    assert (
        not takes_fused_ops(t)
        and not takes_fused_ops(None, 3, torch.ones(2), t)
        and takes_fused_ops(None, 3, torch.ones(2))
    )


COMPUTED = {
    "nested, jagged": ("LayerNorm", "RMSNorm", "Embedding", "Dropout", "Linear"),
    "nested, strided": ("LayerNorm", "Dropout", "Linear", "MultiheadAttention", "TransformerEncoderLayer"),
    **{name: tuple(KINDS) for name in UNSERVED if "subclass" in name},
}
"""What torch.nn computes, and does not refuse."""


@pytest.mark.parametrize("name, kind", [(name, kind) for name, kinds in COMPUTED.items() for kind in kinds])
def test_what_torch_computes_is_computed(kind: str, name: str) -> None:
    module = swapped(make(KINDS[kind])).eval()
    found = outcome(lambda: called(module, UNSERVED[name], inputs(KINDS[kind]), False), plain)
    assert isinstance(found[0], tuple)


@pytest.mark.parametrize("name", SERVED)
@every_kind
def test_kinds_that_the_ops_take(kind: type[nn.Module], name: str) -> None:
    module, args = make(kind), inputs(kind)
    assert_as_torch(module, lambda m: called(m, SERVED[name], args, True), plain, exactly=False)
    assert takes_fused_ops(*map(SERVED[name], args))


@pytest.mark.parametrize("name", UNSERVED)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_takes_the_sum_along(kind: type[nn.Module], name: str) -> None:
    """A layer calls the norm as (norm(s), s) with s = residual + dropout(x)."""
    module, (x,), (y,) = make(kind), inputs(kind), inputs(kind)

    def expected() -> tuple[Tensor, Tensor]:
        s = UNSERVED[name](x) + F.dropout(UNSERVED[name](y), 0.3)
        return module(s), s

    def ours() -> Any:
        return swapped(module)(UNSERVED[name](y), residual=UNSERVED[name](x), dropout_p=0.3)

    assert_alike(outcome(ours, plain), outcome(expected, plain))


@pytest.mark.cover(16)
@pytest.mark.parametrize("name", ["nested, jagged", *(n for n in UNSERVED if "subclass with" in n)])
@pytest.mark.parametrize("form", FORMS)
def test_modules_written_by_hand(form: str, name: str) -> None:
    build, arguments = FORMS[form]
    module, args = build(), arguments()
    results = []
    for fast in (False, True):
        if fast:
            assert tfast.accelerate(module).rows[0].now
        Watching.seen, Wrapping.seen = [], []

        def call(convert: Callable[[Tensor], Tensor] = UNSERVED[name]) -> Any:
            given = [convert(t.detach()) if isinstance(t, Tensor) and t.dim() > 1 else fresh(t) for t in args]
            return module(*given)

        results.append([*outcome(call, plain), list(Watching.seen)])
    ours, theirs = results
    assert ours[-1] == theirs[-1]
    assert_alike(ours[:-1], theirs[:-1])


@pytest.mark.parametrize("kind", ["TransformerEncoder", "TransformerDecoder"])
def test_hooks_inside_a_stack_see_the_tensors_that_torch_passes(kind: str) -> None:
    blocked, look_ahead = torch.arange(L) >= torch.tensor([[L], [L - 2], [1]]), torch.ones(L, L).triu(1).bool()
    masks = {"mask": look_ahead, "src_key_padding_mask": blocked}
    if kind == "TransformerDecoder":
        masks = {"tgt_mask": look_ahead, "memory_key_padding_mask": blocked, "tgt_key_padding_mask": blocked}
    module, args, seen = make(KINDS[kind]), inputs(KINDS[kind]), []
    for m in (module, swapped(module)):
        found: list[Any] = []
        for inner in (m.layers[0], m.layers[1].self_attn):
            inner.register_forward_pre_hook(
                lambda m, args, kwargs, found=found: found.append((len(args), kwargs)), with_kwargs=True
            )
        m(*args, **masks)
        seen.append(found)
    for theirs, ours in zip(*seen, strict=True):
        assert theirs[0] == ours[0] and theirs[1].keys() == ours[1].keys()
        for name, mask in theirs[1].items():
            assert type(mask) is type(ours[1][name]) or not isinstance(mask, Tensor)
            if isinstance(mask, Tensor):
                blocks = [m if m.dtype == torch.bool else m == float("-inf") for m in (mask, ours[1][name])]
                assert torch.equal(*blocks)


class Functions(TorchFunctionMode):
    """Mode that passes every function on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES = {
    "operators": Operators,
    "functions": Functions,
    "device": lambda: torch.device("cpu"),
    "flops": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@every_kind
def test_modes_see_a_call_and_change_nothing(kind: type[nn.Module], mode: Callable[[], Any]) -> None:
    module, args = make(kind), inputs(kind)
    fast = swapped(module)
    with mode() as entered:
        ours = outcome(lambda: called(fast, lambda t: t, args, True))
    assert_alike(ours, outcome(lambda: called(module, lambda t: t, args, True)), exactly=False)
    if isinstance(entered, FlopCounterMode) and kind is nn.Linear:
        assert entered.get_total_flops() > 0


@pytest.mark.parametrize("how", ["fake", "meta"])
@pytest.mark.parametrize("kind", SWAPS, ids=lambda kind: kind.__name__)
def test_tensors_without_numbers_reach_our_ops(kind: type[nn.Module], how: str) -> None:
    module, args = swapped(make(kind)), inputs(kind)
    if how == "meta":
        module, args = module.to("meta"), [t.to("meta") for t in args]
    fake = FakeTensorMode(allow_non_fake_inputs=True) if how == "fake" else contextlib.nullcontext()
    with fake, Operators() as operators:
        out = module(*(fake.from_tensor(t) if how == "fake" else t for t in args))
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape == (N, L, E)
    assert bool(operators.ours) == (kind is not nn.Dropout)


def test_tensors_that_this_package_makes_keep_modules_fused() -> None:
    """Only the attention of a block reads such tensors, for example the masks of models of transformers.

    ``TokenLogits`` have values. No module of a model reads logits.
    """
    from transformer_fast.huggingface import masks as lazy_mask
    from transformer_fast.huggingface.logits import TokenLogits
    from transformer_fast.swap import lazy_logits

    assert lazy_logits and lazy_mask
    kinds, waiting = [], [Tensor]
    while waiting:
        kinds.append(kind := waiting.pop())
        waiting += kind.__subclasses__()
    ours = [kind for kind in kinds if kind.__module__.startswith("transformer_fast.") and kind is not TokenLogits]
    assert len(ours) >= 4 and all(getattr(kind, "made_when_read", False) for kind in ours)
    mask = lazy_mask.LazyMask(tfast.AttentionMask.causal(), (1, 1, 3, 3), torch.device("cpu"), torch.bool)
    assert takes_fused_ops(mask)
