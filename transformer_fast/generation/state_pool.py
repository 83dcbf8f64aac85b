"""Memory for keys and values that stays from call to call, with `GenerationConfig.keep_weights` on a CPU.

Given back to the system, some hundred megabytes a batch come again page by page, each of them cleared first, and
threads that ask for pages wait for one another.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..tensor_cache import get_or_compute


class StatePool:
    """Blocks of memory that no cache uses at the moment: at most as many as once were in use at a time."""

    def __init__(self) -> None:
        self._blocks: dict[int, Tensor] = {}  # by address
        # No lock: the collector of garbage may call `give` within `take`. One call of a dict is not interrupted.

    def take(self, count: int, like: Tensor) -> Tensor:
        """A block of at least so many numbers of the type of `like`, not initialised, which is the caller's until it
        is given back: the smallest that will do, or a new one in the place of the largest."""
        blocks = sorted(self._blocks.copy().values(), key=Tensor.numel)
        for block in blocks:
            fits = block.numel() >= count and block.dtype == like.dtype
            if fits and self._blocks.pop(block.data_ptr(), None) is not None:
                return block
        if blocks:
            self._blocks.pop(blocks[-1].data_ptr(), None)
        return like.new_empty(count)

    def give(self, block: Tensor) -> None:
        """A block that nobody reads or writes any more."""
        self._blocks[block.data_ptr()] = block


class StateMemory:
    """The memory of one cache, which goes to the pool, where there is one, when the cache goes."""

    def __init__(self, pool: StatePool | None) -> None:
        self._pool = pool
        self._block: Tensor | None = None

    def resized(self, shape: tuple[int, ...], known: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tensor of this shape, not initialised, in the place of the one before, and what is known of that one, which
        the caller copies. `known`: a part of the one before; `like`: has the type."""
        if self._pool is None:
            return like.new_empty(shape), known
        count = math.prod(shape)
        if self._block is None or self._block.numel() < count:
            self._block = self._pool.take(count, like)
        elif known is not None:
            known = known.clone()  # it lies where the new tensor shall be
        return self._block[:count].view(shape), known

    def __del__(self) -> None:
        if self._pool is not None and self._block is not None:
            self._pool.give(self._block)


def state_pool(decoder: nn.Module) -> StatePool | None:
    """The pool of a decoder, which lies on its first parameter, and goes with it; None on a GPU, whose memory PyTorch
    keeps."""
    first = next(decoder.parameters(), None)
    if first is None or first.device.type != "cpu":
        return None
    return get_or_compute(first, ("states",), (), StatePool)
