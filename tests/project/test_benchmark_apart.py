"""Sides of a benchmark in their own processes: results come back, and the process is idle between calls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
from apart import Apart, from_thread_that_ends


def make_counter(start: int) -> Callable[[int], tuple[int, int, int]]:
    """Return a side that counts its calls, and starts a thread that keeps counting."""
    counts = [start, 0]

    def spin() -> None:
        while True:
            counts[1] += 1
            time.sleep(0.001)

    threading.Thread(target=spin, daemon=True).start()

    def call(step: int) -> tuple[int, int, int]:
        counts[0] += step
        return counts[0], counts[1], torch.get_num_threads()

    return call


FAILED: list[str] = []


def make_quitter(what: str) -> Callable[[], None]:
    """Fail at first; then return a side that ends its process."""
    if not FAILED:
        FAILED.append(what)
        raise RuntimeError(f"{what} is not installed")
    return lambda: os._exit(3)


def test_calls_go_to_one_process_that_stands_still_between_them() -> None:
    side = Apart(make_counter, 10, threads=1)
    side(1)
    before = side(1)
    time.sleep(0.3)
    after = side(5)
    assert (before[0], after[0], after[2]) == (12, 17, 1)
    assert after[1] - before[1] < 100  # a running thread would count to nearly 300
    side.close()
    side.close()
    assert side(1)[0] == 11  # another process
    side.close()


def test_errors_and_ends_are_reported() -> None:
    side = Apart(make_quitter, "the peer")
    with pytest.raises(RuntimeError, match="the peer is not installed"):
        side()
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        side()
    side.close()


def test_a_thread_that_ends() -> None:
    assert from_thread_that_ends(lambda: threading.current_thread()) is not threading.current_thread()
