"""Pool of workers that translate a text: Python threads, each with a share of PyTorch's threads.

The threads of one product wait for the slowest of them, and all but one wait while Python runs. Workers do not wait for
one another: ops run without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import nn

from ..generation.decoding import evaluation_mode

T = TypeVar("T")
Lines = list[str | Exception]
OnError = Callable[[int, str], None] | None
Translate = Callable[[Lines, int, OnError], Iterable[T]]
"""``(lines, number of the first, on_error)`` -> one answer per line."""


def translate_chunks(
    translate: Translate[T], chunks: Iterable[Lines], models: Sequence[nn.Module], *, workers: int, on_error: OnError
) -> Iterator[T]:
    """Yield the answers to the lines of all chunks, in order; each chunk is translated by one worker.

    Two chunks per worker are read ahead, so memory does not grow with the text. The models are in evaluation mode until
    the last line, or until the iterator is closed.
    """
    threads = torch.get_num_threads()
    share = max(threads // workers, 1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(*models))  # once for all workers
        stack.callback(torch.set_num_threads, threads)  # a thread's own is what new threads begin with
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
        stack.callback(pool.shutdown, cancel_futures=True)
        running: deque[Future[tuple[list[T], list[tuple[int, str]]]]] = deque()
        first = 1
        for chunk in chunks:
            running.append(pool.submit(_answer, translate, chunk, first, on_error is not None))
            first += len(chunk)
            if len(running) == 2 * workers:
                yield from _with_errors_reported(*running.popleft().result(), on_error)
        while running:
            yield from _with_errors_reported(*running.popleft().result(), on_error)


def _with_errors_reported(answers: list[T], errors: list[tuple[int, str]], on_error: OnError) -> list[T]:
    """Report the lines without an answer, and return the answers."""
    for error in errors:
        assert on_error is not None  # without on_error the first error was raised
        on_error(*error)
    return answers


def _answer(
    translate: Translate[T], lines: Lines, first: int, keep_errors: bool
) -> tuple[list[T], list[tuple[int, str]]]:
    """Return the answers, and number and reason of each line that has none."""
    errors: list[tuple[int, str]] = []
    keep = (lambda *error: errors.append(error)) if keep_errors else None
    return list(translate(lines, first, keep)), errors
