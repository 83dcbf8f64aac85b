"""Replay of instructions on one sub-partition: which warp issues when, by stall counts, barriers and pipes.

A program of W warps has W / 4 on each sub-partition, which has a fourth of the shared memory's width and a tensor core
of its own. All four do the same at the same time, so one is replayed. In each step the warp that can issue first does,
one a cycle; what it then waits for is what the compiler wrote into the control codes, and what its pipe has queued.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .machine import H100, Machine
from .pipes import PIPES, Kind, Operation

_ISSUE, _TENSOR, _FP32, _MULTIPLY, _ALU, _MUFU, _UNIFORM, _SHARED = range(len(PIPES))
_NEVER = float("inf")
_IN_TURN = (_MULTIPLY, _ALU, _UNIFORM)
_QUEUE = {_MUFU: 4, _SHARED: 8}
"""Instructions that wait for these pipes without holding up their warp."""
_STAGGER = 600
"""Programs start within so many cycles of one another."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Args:
        cycles: of one pass of all resident programs along the trace.
        busy: of each pipe, the share of the cycles that it works; two pipes share "fp32".
    """

    cycles: float
    busy: dict[str, float]

    @property
    def busiest(self) -> str:
        """The pipe with the largest share."""
        return max(self.busy, key=self.busy.__getitem__)


class _Warp:
    __slots__ = ("at", "barriers", "copies", "copying", "ends", "own", "products", "program", "time", "waiting")

    def __init__(self, program: int, time: float) -> None:
        self.program, self.time = program, time
        self.at = 0
        self.own = time
        self.barriers = [0.0] * 7
        self.copying = 0.0
        self.copies: list[float] = []
        self.products: list[float] = []
        self.ends: list[float] = []
        self.waiting = False


def replay(
    trace: Sequence[Operation], warps: int, programs: int, *, passes: int = 14, skip: int = 4, machine: Machine = H100
) -> Replay:
    """Replay `programs` programs of `warps` warps each, `passes` times along the trace.

    Args:
        trace: one pass of a warp.
        warps: of a program.
        programs: that share the multiprocessor.
        passes: how often each goes along the trace; at least ``skip + 4``.
        skip: first passes that are not counted, nor are the last two.
        machine: latencies.
    """
    if not trace or passes < skip + 4:
        raise ValueError(f"a replay needs a trace and at least {skip + 4} passes, not {len(trace)} and {passes}")
    own = max(1, warps // 4)
    start = random.Random(0)
    resident = [
        _Warp(p, offset + w) for p in range(programs) for offset in [start.random() * _STAGGER] for w in range(own)
    ]
    free, busy = [0.0] * len(PIPES), [0.0] * len(PIPES)
    arrived: list[list[tuple[_Warp, float]]] = [[] for _ in range(programs)]
    port, length, active = 0.0, len(trace), list(resident)
    for warp in active:
        warp.own = _own_time(warp, trace[0])
    while active:
        best, best_time = None, _NEVER
        for warp in active:
            if warp.own > best_time:
                continue
            time = max(warp.own, _pipe_time(trace[warp.at], free), port)
            if time < best_time or (time == best_time and best is not None and warp.time < best.time):
                best, best_time = warp, time
        if best is None:
            raise RuntimeError("every warp waits at a barrier: the path leaves one out for some of them")
        port = best_time + 1
        busy[_ISSUE] += 1
        released = _issue(best, trace[best.at], best_time, free, busy, machine, arrived[best.program], own)
        best.at += 1
        if best.at == length:
            best.at = 0
            best.ends.append(best_time)
            del best.copies[:-8], best.products[:-8]
            if len(best.ends) == passes:
                active.remove(best)
        best.own = _NEVER if best.waiting else _own_time(best, trace[best.at])
        for warp in released:
            warp.own = _own_time(warp, trace[warp.at])
    counted = passes - 3 - skip
    cycles = sum((warp.ends[-3] - warp.ends[skip]) / counted for warp in resident) / len(resident)
    total = max(warp.ends[-1] for warp in resident)
    share = [b / total for b in busy]
    share[_FP32] = (share[_FP32] + share[_MULTIPLY]) / 2
    return Replay(cycles, {pipe: round(s, 4) for pipe, s in zip(PIPES, share, strict=True)})


def _own_time(warp: _Warp, operation: Operation) -> float:
    """First cycle at which the warp can issue the operation, its pipe and other warps aside."""
    time = warp.time
    for barrier in operation.waits:
        if warp.barriers[barrier] > time:
            time = warp.barriers[barrier]
    kind = operation.kind
    if kind is Kind.WAIT_FOR_COPIES or kind is Kind.WAIT_FOR_PRODUCTS:
        groups = warp.copies if kind is Kind.WAIT_FOR_COPIES else warp.products
        if len(groups) > operation.count:
            time = max(time, groups[len(groups) - 1 - operation.count])
    return time


def _pipe_time(operation: Operation, free: list[float]) -> float:
    """First cycle at which the operation's pipe can take it."""
    pipe = operation.pipe
    if pipe == _FP32:
        return min(free[_FP32], free[_MULTIPLY])
    if pipe in _IN_TURN:
        return free[pipe]
    if pipe in _QUEUE:
        return free[pipe] - _QUEUE[pipe] * max(operation.cost, 1)
    return 0.0


def _issue(
    warp: _Warp, operation: Operation, time: float, free: list[float], busy: list[float], machine: Machine,
    arrived: list[tuple[_Warp, float]], own: int,
) -> list[_Warp]:  # fmt: skip
    """Let the warp issue the operation at `time`; return the warps that a barrier releases."""
    kind, pipe, cost, latency = operation.kind, operation.pipe, operation.cost, operation.latency
    done = read = time + 4
    released: list[_Warp] = []
    if pipe == _FP32:
        lane = _MULTIPLY if free[_MULTIPLY] < free[_FP32] else _FP32
        free[lane] = max(time, free[lane]) + cost
        busy[lane] += cost
    elif pipe in _IN_TURN:
        free[pipe] = max(time, free[pipe]) + cost
        busy[pipe] += cost
        done = time + cost + latency
    elif kind is Kind.PRODUCT:
        shared_end = max(time, free[_SHARED]) + operation.operand_cost
        end = max(max(time, free[_TENSOR]) + cost, shared_end)
        free[_SHARED], free[_TENSOR] = shared_end, end
        busy[_SHARED] += operation.operand_cost
        busy[_TENSOR] += cost
        done = end
        if operation.count:
            warp.products.append(end + machine.wgmma_latency)
    elif pipe != _ISSUE:
        begin = max(time, free[pipe])
        free[pipe] = begin + cost
        busy[pipe] += cost
        done, read = begin + cost + latency, begin + cost + 4
        if kind is Kind.COPY:
            warp.copying = max(warp.copying, begin + cost + operation.memory)
    else:
        done = time + max(4, latency)
    warp.time = time + operation.stall
    if kind is Kind.COMMIT_COPIES:
        warp.copies.append(max(warp.copying, time))
        warp.copying = 0.0
    elif kind is Kind.DELAY:
        warp.time = max(warp.time, time + latency)
    elif kind is Kind.BARRIER:
        arrived.append((warp, time))
        warp.waiting = len(arrived) < own
        if not warp.waiting:
            last = max(t for _, t in arrived) + latency
            released = [other for other, _ in arrived]
            for other in released:
                other.waiting = False
                other.time = max(other.time, last)
            arrived.clear()
    barriers = warp.barriers
    barriers[operation.write_barrier] = max(barriers[operation.write_barrier], done)
    barriers[operation.read_barrier] = max(barriers[operation.read_barrier], read)
    barriers[6] = 0.0
    return released
