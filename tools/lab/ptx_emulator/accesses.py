"""Loads, stores and atomic operations, as generated code calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .arithmetic import UNSIGNED, Array
from .machine import Machine
from .memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BITS
from .state import State


class Space(Protocol):
    """Parts of a memory that `load`, `store` and `atomic` need. Places index `data`; lanes is None for all lanes."""

    state: State
    data: np.ndarray

    def place(
        self, mask: Array, address: Array, offset: int, total: int, index: int
    ) -> tuple[np.ndarray | None, np.ndarray]: ...
    def check_read(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None: ...
    def write(self, lanes: np.ndarray | None, places: np.ndarray, data: np.ndarray, index: int) -> None: ...
    def check_atomic(self, lanes: np.ndarray | None, places: np.ndarray, total: int, index: int) -> None: ...


def load(
    space: Space, mask: Array, address: Array, offset: int, size: int, kind: np.dtype, old: Sequence[Array] | None,
    count: int, index: int,
) -> list[np.ndarray]:  # fmt: skip
    """`count` registers of numpy type `kind`, from `count` elements of `size` bytes each.

    Args:
        kind: numpy type of the registers; elements are extended to it, with sign if it is signed.
        old: the registers before, for the lanes that do not load; None if those are never read.
    """
    total = size * count
    lanes, places = space.place(mask, address, offset, total, index)
    if places.size:
        space.check_read(lanes, places, total, index)
    signed = kind.kind == "i"
    values = space.data.view(f"{'i' if signed else 'u'}{size}").reshape(-1, count)[places >> (total.bit_length() - 1)]
    registers = []
    for column in range(count):
        value = values[:, column].astype(kind)
        if signed:
            value = value.view(UNSIGNED[8 * kind.itemsize])
        if lanes is not None:
            before = space.state.undefined(kind.itemsize) if old is None else old[column]
            register = np.empty(space.state.lanes, value.dtype)
            register[:] = before
            register[lanes] = value
            value = register
        registers.append(value)
    return registers


def store(
    space: Space, mask: Array, address: Array, offset: int, size: int, values: Sequence[Array], index: int
) -> None:
    total = size * len(values)
    lanes, places = space.place(mask, address, offset, total, index)
    if not places.size:
        return
    data = np.empty((places.size, len(values)), UNSIGNED[8 * size])
    for column, value in enumerate(values):
        data[:, column] = value if lanes is None or value.ndim == 0 else value[lanes]
    space.write(lanes, places, data, index)


def load_generic(machine: Machine, mask: Array, address: Array, offset: int, *rest: Any) -> list[np.ndarray]:
    """Load from generic addresses: each lane's address selects the memory."""
    size, kind, old, count, index = rest
    for space, chosen in _chosen(machine, mask, address):
        old = load(space, chosen, address, offset, size, kind, old, count, index)
    return list(old) if old is not None else [machine.undefined(kind.itemsize)] * count


def store_generic(machine: Machine, mask: Array, address: Array, offset: int, *rest: Any) -> None:
    for space, chosen in _chosen(machine, mask, address):
        store(space, chosen, address, offset, *rest)


def _chosen(machine: Machine, mask: Array, address: Array) -> list[tuple[Any, np.ndarray]]:
    window = machine.full(address) >> WINDOW_BITS
    active = machine.active(mask)
    shared = window == (SHARED_WINDOW >> 40)
    local = window == (LOCAL_WINDOW >> 40)
    found: list[tuple[Any, np.ndarray]] = [(machine.shared, shared & active), (machine.local, local & active)]
    found.append((machine.memory, ~shared & ~local & active))
    return [(space, chosen) for space, chosen in found if chosen.any()]


def atomic(
    space: Space, mask: Array, address: Array, offset: int, operation: str, kind: np.dtype, operands: Sequence[Array],
    index: int,
) -> np.ndarray:  # fmt: skip
    """Run an atomic operation, lane by lane in order; return the previous value per lane."""
    state, size = space.state, kind.itemsize
    lanes, places = space.place(mask, address, offset, size, index)
    if places.size:
        space.check_atomic(lanes, places, size, index)
    memory = space.data.view(kind)
    update = ATOMIC[operation]
    chosen = np.arange(state.lanes) if lanes is None else lanes
    given = [state.full(value).view(kind)[chosen] for value in operands]
    before = np.zeros(state.lanes, kind)
    for turn, (lane, place) in enumerate(zip(chosen.tolist(), (places // size).tolist(), strict=True)):
        old = memory[place]
        before[lane] = old
        memory[place] = update(old, *(value[turn] for value in given))
    return before.view(UNSIGNED[8 * size])


ATOMIC: dict[str, Any] = {
    "add": lambda old, value: old + value,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "min": np.fmin,
    "max": np.fmax,
    "exch": lambda old, value: value,
    "cas": lambda old, compare, value: value if old == compare else old,
    "inc": lambda old, limit: type(old)(0) if old >= limit else old + type(old)(1),
    "dec": lambda old, limit: limit if old == 0 or old > limit else old - type(old)(1),
}
