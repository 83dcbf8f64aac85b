"""Check of the targets of a loss, for devices on which reading values does not stall."""

from __future__ import annotations

from torch import Tensor


def check_targets(target: Tensor, ignore_index: int, vocabulary: int) -> None:
    """Raise for a target that is outside the vocabulary and not ``ignore_index``, as the native kernel does.

    Args:
        target: (rows,) int64 on a CPU.
        ignore_index: target of rows that are left out.
        vocabulary: number of classes.

    Raises:
        IndexError: the message names the first invalid target and its place.
    """
    wrong = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if wrong.any():
        place = int(wrong.nonzero()[0, 0])
        raise IndexError(
            f"linear_cross_entropy: target {place} of {target.numel()} is {int(target[place])}, but the vocabulary has "
            f"{vocabulary} rows: expected 0 <= target < {vocabulary}, or ignore_index"
        )
