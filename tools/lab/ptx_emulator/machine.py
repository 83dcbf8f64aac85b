"""Runs some CTAs of a launch at once: every thread is a lane of numpy arrays, every basic block a generated function.

The lanes at the lowest block run first, so that diverged lanes meet again; a barrier holds the lanes of a CTA until all
of them are there. A block runs under a mask of its lanes, None if that is all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from .arithmetic import UNSIGNED, Array
from .memory import GlobalSpace, LocalSpace, SharedSpace, Tensors
from .program import Program, Step
from .report import EmulationError, Report
from .sanitizer import GlobalShadow
from .state import UNINITIALISED, State

BLOCK_LIMIT = 2_000_000
"""Limit of executed blocks, after which a machine counts as an endless loop."""

Extension = TypeVar("Extension")


class Machine(State):
    """State, memory and barriers of `ctas` CTAs from number `first` on.

    Attributes that generated code and extensions read, besides those of the state:
        parameters: bytes of each kernel parameter.
        shared, memory, local: the spaces.
    """

    def __init__(
        self, program: Program, first: int, ctas: int, grid: tuple[int, int, int], block: tuple[int, int, int],
        shared: int, parameters: Mapping[str, bytes], tensors: Tensors, shadow: GlobalShadow | None, report: Report,
        order: str,
    ) -> None:  # fmt: skip
        super().__init__(program.kernel, first, ctas, grid, block, report)
        self.program, self.order = program, order
        self.parameters = parameters
        sanitize = shadow is not None
        self.memory = GlobalSpace(self, tensors, shadow)
        self.shared = SharedSpace(self, shared, program.shared_granule, sanitize)
        self.local = LocalSpace(self, program.kernel.static_size("local"))
        self.shuffles: dict[tuple[str, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.executed = np.zeros(len(program.blocks), np.int64)
        self._extensions: dict[type, Any] = {}

    # ---- what generated code and extensions call

    def parameter(self, name: str, offset: int, size: int) -> Array:
        data = self.parameters[name][offset : offset + size]
        if len(data) != size:
            raise EmulationError(f"parameter {name} has no {size} bytes at {offset}")
        return UNSIGNED[8 * size](int.from_bytes(data, "little"))

    def address(self, name: str) -> int:
        """Address of a variable in global or const space."""
        return self.memory.tensors.addresses[name]

    def extension(self, kind: type[Extension]) -> Extension:
        """Return the single instance of a class with the state of a family of instructions; created on first use.

        The instance's `finish`, if it has one, is called when the machine has run to its end.
        """
        if kind not in self._extensions:
            self._extensions[kind] = kind(self)  # type: ignore[call-arg]
        return self._extensions[kind]

    # ---- scheduling

    def run(self) -> None:
        """Run until every lane has exited.

        Raises:
            EmulationError: a barrier that not all threads reach, a jump out of the kernel, or too many blocks.
        """
        blocks = self.program.blocks
        registers: list[Array] = [UNINITIALISED[width] for width in self.kernel.widths]
        at = np.zeros(self.lanes, np.int32)
        alive, waiting = np.ones(self.lanes, bool), np.zeros(self.lanes, bool)
        barrier = np.zeros(self.lanes, np.int32)
        steps = 0
        while alive.any():
            ready = alive & ~waiting
            if not ready.any():
                raise EmulationError(f"{self.kernel.name}: deadlock, some threads of a CTA never reach its barrier")
            if self.order != "lockstep":
                ready = self._one_warp(ready)
            number = int(at[ready].min())
            if number >= len(blocks):
                raise EmulationError(f"{self.kernel.name}: ran off the end of the kernel")
            here = ready & (at == number)
            mask = None if here.all() else here
            self.executed[number] += self.lanes // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
            block = blocks[number]
            condition = block.function(self, registers, mask)
            if condition is not None:
                condition = self.guarded(here, condition)
            if block.step is Step.NEXT:
                at[here] = number + 1
            elif block.step is Step.BRANCH:
                at[here] = number + 1
                at[here if condition is None else condition] = block.target
            elif block.step is Step.EXIT:
                at[here] = number + 1
                alive &= ~(here if condition is None else condition)
            else:
                at[here] = number + 1
                waiting |= here
                barrier[here] = number
            if waiting.any():
                self._release(alive, waiting, barrier)
            steps += 1
            if steps > BLOCK_LIMIT:
                raise EmulationError(f"{self.kernel.name}: no end after {BLOCK_LIMIT} blocks")
        for extension in self._extensions.values():
            if hasattr(extension, "finish"):
                extension.finish()

    def _one_warp(self, ready: np.ndarray) -> np.ndarray:
        """Select the ready lanes of each CTA's first ready warp (order "serial") or last ready warp ("reverse")."""
        warps = np.asarray(ready.reshape(self.ctas, self.warps, 32).any(2))
        chosen = warps.argmax(1) if self.order == "serial" else self.warps - 1 - warps[:, ::-1].argmax(1)
        return ready & (self.warp == np.repeat(chosen, self.threads))

    def _release(self, alive: np.ndarray, waiting: np.ndarray, barrier: np.ndarray) -> None:
        """Releases the CTAs of which every thread waits or has exited."""
        by_cta = (self.ctas, self.threads)
        here = waiting.reshape(by_cta)
        complete = (here | ~alive.reshape(by_cta)).all(1) & here.any(1)
        if not complete.any():
            return
        number = int(barrier[waiting.argmax()])
        if not (here[complete].all() and (barrier[waiting] == number).all()):
            self._check_barriers(here, complete, barrier.reshape(by_cta))
        released = np.repeat(complete, self.threads)
        waiting &= ~released
        self.epoch = self.epoch + released
        self.begin_warp_epoch(released)
        if self.shared.shadow is not None and released.all():
            self.shared.shadow.forget_reads()

    def _check_barriers(self, here: np.ndarray, complete: np.ndarray, barrier: np.ndarray) -> None:
        """Check that all threads of a CTA are at the same barrier. here, barrier: arrays (CTAs, threads)."""
        for cta in np.flatnonzero(complete):
            numbers = np.unique(barrier[cta][here[cta]])
            index = self.program.blocks[numbers[0]].last
            name = f"CTA {self.cta_number[cta * self.threads]}"
            if not here[cta].all():
                self.report("barrier after threads of the CTA have exited", index, name)
            if numbers.size > 1:
                self.report("threads of a CTA wait at different barriers", index, name)
