"""Recorded calls of every operator of ``torch.ops.transformer_fast``, and calls that differ from them in one argument.

The operators and their arguments are read from the library. The calls are those that the public ops make.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import transformer_fast as tfast
from tests.support.op_calls import Draw, Operators, attention_calls, by_dispatcher, calls, masked_calls, token_calls
from transformer_fast import AttentionMask
from transformer_fast.ops import registry

NAMESPACE = "transformer_fast"
_VALUES = re.compile(r"must (rise|lie|name|keep|have sequences)|vocabulary has|are not all in the table")
"""Words of the errors about values of tensors, which are read where the operator runs."""
_NO_MEMORY = re.compile("allocate memory|bad_alloc")
BAND = 1 << 12  # elements on each side of a tensor, more than any row of a recorded call


class Recorded(NamedTuple):
    """A call of an operator: arguments by the names of its schema."""

    op: Any
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.op._schema.name.partition("::")[2]

    def run(self) -> Any:
        return self.op(**self.arguments)

    def with_argument(self, name: str, value: Any) -> Recorded:
        return self._replace(arguments={**self.arguments, name: value})


class Wrong(NamedTuple):
    """A recorded call with one argument changed.

    Attributes:
        call: the changed call.
        argument: name of the changed argument.
        what: how it was changed.
        by_value: True if sizes, dtypes and devices are unchanged: only the values of a tensor or a number differ.
    """

    call: Recorded
    argument: str
    what: str
    by_value: bool


def operators() -> dict[str, Any]:
    """Every operator of the library with a tensor argument, by name."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == NAMESPACE and any("Tensor" in str(argument.type) for argument in schema.arguments):
            found[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


@functools.cache
def recorded() -> dict[str, list[Recorded]]:
    """Calls of each operator, by its name; each differs from the others in the kinds of its arguments."""
    with Operators() as mode, by_dispatcher():
        for call in (calls() | attention_calls() | masked_calls() | token_calls()).values():
            call.trained() if call.leaves and "decode" not in call.op else call.outputs()
        _other_calls()
    found: dict[str, dict[Any, Recorded]] = {}
    for op, args, kwargs in mode.ours:
        names = [argument.name for argument in op._schema.arguments]
        defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        given = defaults | dict(zip(names, args)) | kwargs
        call = Recorded(op, {name: _detached(given[name]) for name in names})
        found.setdefault(call.name, {}).setdefault(tuple(map(_kind, call.arguments.values())), call)
    return {name: list(of.values()) for name, of in found.items()}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _kind(value: Any) -> Any:
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else type(value) if value is None else str(value)


def _other_calls() -> None:
    """Call the operators that a public op calls for large inputs or with an option, and those of decoding."""
    ops, draw = torch.ops.transformer_fast, Draw(5)
    x, weight, bias = draw.floats(3, 20), draw.floats(33, 20), draw.floats(33)
    calls()["linear_cross_entropy"].outputs()  # without gradients
    ops.linear_grad_weight(ops.linear(x, weight, bias), x)
    q, k, added = draw.floats(2, 4, 6, 8), draw.floats(2, 2, 7, 8), draw.floats(1, 4, 6, 7)
    tfast.attention(q, k, k, AttentionMask.lengths(torch.tensor([3, 7])), bias=added, return_weights=True)
    ops.fill_positional_table(torch.empty(5, 8))
    ops.packed_linear(x, ops.pack_weight([weight], False), bias, 33, "relu")
    ops.packed_linear(x, ops.pack_weight([weight], True), bias, 33, "gelu")
    ops.copy_cache_rows(draw.floats(2, 4, 2, 3, 5, 8), [0, 1], [2, 3], 4)
    best, token, _ = ops.choose_tokens(draw.floats(4, 11), 3, [2, 5], True)
    unit, slot = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    ops.choose_continuations(best, token, unit, slot, 2, 2, 3)


def changed_at_random(call: Recorded, chance: random.Random, times: int) -> tuple[Recorded, list[str]]:
    """A call after some random changes, one on top of the other, and what they are."""
    said = []
    for _ in range(times):
        name = chance.choice(list(call.arguments))
        changes = list(_changes(call.arguments[name]))
        if changes:
            what, _, value = chance.choice(changes)
            call = call.with_argument(name, value)
            said.append(f"{name}: {what}")
    return call, said


def wrong_calls(call: Recorded) -> Iterator[Wrong]:
    """Every change of one argument of a call."""
    for name, value in call.arguments.items():
        for what, by_value, changed in _changes(value):
            yield Wrong(call.with_argument(name, changed), name, what, by_value)


def _changes(value: Any) -> Iterator[tuple[str, bool, Any]]:
    if isinstance(value, Tensor):
        yield from _tensor_changes(value)
    elif isinstance(value, bool):
        yield "the other", True, not value
    elif isinstance(value, int):
        for other in (-1, value - 1, value + 1, 1 << 40):
            yield f"{other} for {value}", True, other
    elif isinstance(value, float):
        for other in (-0.5, 1.5):
            yield f"{other} for {value}", True, other
    elif isinstance(value, str):
        yield "an unknown word", True, value + "?"
    elif isinstance(value, list) and value and isinstance(value[0], int) and not isinstance(value[0], bool):
        yield "one less", True, value[:-1]
        yield "negative", True, [*value[:-1], -1]
        yield "past the end", True, [*value[:-1], 1 << 20]
    elif isinstance(value, list) and value and isinstance(value[0], Tensor):
        yield "none", True, []
        for what, by_value, changed in _tensor_changes(value[0]):
            yield what, by_value, [value[0], changed]


def _tensor_changes(t: Tensor) -> Iterator[tuple[str, bool, Tensor]]:
    yield "one more dimension", False, t[None]
    for dim in range(t.dim()):
        size = t.shape[dim]
        if t.dim() > 0 and size > 0:
            yield f"without dimension {dim}", False, t.select(dim, 0)
            yield f"one less in dimension {dim}", False, t.narrow(dim, 0, size - 1)
            yield f"one more in dimension {dim}", False, torch.cat([t, t.narrow(dim, 0, 1)], dim)
            yield f"nothing in dimension {dim}", False, t.narrow(dim, 0, 0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool):
        if dtype != t.dtype:
            yield f"{dtype} for {t.dtype}", False, t.to(dtype)
    if t.numel() > 1 and t.dim() > 1:
        yield "transposed in memory", False, t.mT.contiguous().mT
    if not t.is_floating_point() and t.dtype != torch.bool and t.numel() > 0:
        for what, number in (("negative", -1), ("past the end", min(1 << 20, torch.iinfo(t.dtype).max))):
            for place in {0, t.numel() - 1}:
                changed = t.clone(memory_format=torch.contiguous_format)
                changed.view(-1)[place] = number
                yield f"{what} at {place}", True, changed


def banded(t: Tensor, fill: int, band: int = BAND) -> Tensor:
    """Copy of a tensor with equal strides, inside memory that holds ``fill`` (0 or 1) elsewhere."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) if t.numel() else 0
    moved = torch.full((span + 2 * band,), fill, dtype=t.dtype).as_strided(t.shape, t.stride(), band)
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in t.stride())  # what is expanded is written once
    moved[once].copy_(t[once])
    return moved


def in_bands(call: Recorded, fill: int, band: int = BAND) -> Recorded:
    """A call whose tensors are all in bands of ``fill``."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return banded(value, fill, band)
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [banded(t, fill, band) for t in value]
        return value

    return call._replace(arguments={name: moved(value) for name, value in call.arguments.items()})


def on_meta(call: Recorded) -> Recorded:
    """A call with the same sizes and strides, and no values."""
    return call._replace(arguments={name: _without_values(value) for name, value in call.arguments.items()})


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_without_values(each) for each in value] if isinstance(value, list) else value


def outcome(run: Callable[..., Any], *args: Any) -> tuple[list[Tensor] | None, str]:
    """Results of a call as a list, or None and the message of its error."""
    try:
        out = run(*args)
    except (ValueError, TypeError, IndexError, RuntimeError, MemoryError) as error:
        return None, f"{type(error).__name__}: {error}"
    return [] if out is None else [out] if isinstance(out, Tensor) else list(out), ""


def has_kernel(name: str, key: str = "Meta") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"transformer_fast::{name}", key)


def _poison(results: list[Tensor], fill: int) -> None:
    """Leave memory of the results' sizes behind, freed, that holds ``fill``."""
    sizes = [t.untyped_storage().nbytes() for t in results]
    [torch.full((size,), fill, dtype=torch.uint8) for size in sizes if 0 < size < 1 << 20]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _layout(t: Tensor) -> tuple[Any, ...]:
    """Size, strides that say where an element is, and dtype of a tensor."""
    steps = [stride if size > 1 else None for size, stride in zip(t.shape, t.stride())] if t.numel() else []
    return t.shape, steps, t.dtype


def _assert_plain(call: Recorded, results: list[Tensor]) -> None:
    """Compare the first result with PyTorch's own operators, where they compute the call."""
    arguments = call.arguments
    function = registry.PLAIN.get(call.name)
    if function is None or any(arguments.get(name) for name in ("dropout_p", "p")):
        return
    if call.name == "linear_cross_entropy":
        arguments = arguments | {"gradients": [False] * 3}
    expected = function(**arguments)
    expected = expected if isinstance(expected, Tensor) else expected[0]
    torch.testing.assert_close(results[0].double(), expected.double(), rtol=2e-2, atol=2e-2, equal_nan=True)


def problem_of(call: Recorded) -> str:
    """Fault in the outcome of a call, or "".

    The outcome is an error that names an argument, or the right result: one that does not depend on memory outside of
    the arguments, has the layout that the meta function promises, and is that of PyTorch's own operators where they
    compute the call.
    """
    meta, meta_error = outcome(on_meta(call).run) if has_kernel(call.name) else (None, "no meta")
    results, error = outcome(in_bands(call, 0, band=0).run)  # AddressSanitizer sees what is outside
    _poison(meta or [], 0)
    ones, one_error = outcome(in_bands(call, 0).run)
    _poison(meta or [], 255)
    others, other_error = outcome(in_bands(call, 1).run)
    if not error == one_error == other_error:
        return f"depends on memory outside of its arguments: {[error, one_error, other_error]}, where '' is a result"
    if results is None or ones is None or others is None:
        if _NO_MEMORY.search(error):
            return ""
        if not any(re.search(rf"\b{name}\b", error) for name in call.arguments):
            return f"an error that names no argument: {error}"
        return "" if meta_error or _VALUES.search(error) else f"no error while a graph is made: {error}"
    if not all(map(_same, results, ones)) or not all(map(_same, ones, others)):
        return "results depend on memory outside of the arguments"
    if has_kernel(call.name):
        if meta is None:
            return f"an error only without values: {meta_error}"
        promised, kept = ([_layout(t) for t in found] for found in (meta, results))
        if promised != kept:
            return f"promised {promised}, kept {kept}"
    try:
        _assert_plain(call, results)
    except Exception as unequal:  # any reason why the plain operators disagree
        if not _NO_MEMORY.search(str(unequal)):
            return f"not the result of plain operators: {type(unequal).__name__}: {unequal}"
    return ""
