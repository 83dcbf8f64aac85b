"""A text translated by several workers at a time: threads of Python with a share of PyTorch's threads each.

The threads of one product wait for the slowest of them, and all but one wait while Python runs. Workers do not wait for
one another: ops run without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from .. import backends
from ..generation.decoding import evaluation_mode
from .errors import ConfigError

if TYPE_CHECKING:
    from .translator import Translation, Translator

Lines = list[str | Exception]
Answer = tuple[list[list["Translation"]], list[tuple[int, str]]]
"""The translations of each line of a chunk, and number and reason of each that has none."""


def translate_chunks(
    translator: Translator,
    chunks: Iterable[Lines],
    *,
    workers: int,
    on_error: Callable[[int, str], None] | None,
) -> Iterator[list[Translation]]:
    """What the translator gives for the lines of all chunks, in order; each chunk is translated by one worker.

    Two chunks a worker are read ahead, so memory does not grow with the text. The models are in evaluation mode until
    the last line, or until the iterator is closed.

    Raises:
        ConfigError: for a model that is not on a CPU.
    """
    if translator.device.type != "cpu":
        raise ConfigError(f"workers={workers} is for models on a CPU; expected 1 for one on {translator.device}")
    threads = torch.get_num_threads()
    share = max(threads // workers, 1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(*translator.models))  # not by each worker: one would end it for the others
        stack.callback(torch.set_num_threads, threads)  # a thread's own is what new threads begin with
        pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(share,))
        stack.callback(pool.shutdown, cancel_futures=True)
        running: deque[Future[Answer]] = deque()
        first = 1
        for chunk in chunks:
            running.append(pool.submit(_answer, translator, chunk, first, on_error is not None, backends.current()))
            first += len(chunk)
            if len(running) == 2 * workers:
                yield from _reported(running.popleft().result(), on_error)
        while running:
            yield from _reported(running.popleft().result(), on_error)


def _reported(answer: Answer, on_error: Callable[[int, str], None] | None) -> list[list[Translation]]:
    """The translations, once the lines without one are reported."""
    translations, errors = answer
    for error in errors:
        assert on_error is not None  # without it they were raised
        on_error(*error)
    return translations


def _answer(translator: Translator, lines: Lines, first: int, keep_errors: bool, backend: str) -> Answer:
    errors: list[tuple[int, str]] = []
    keep = (lambda *error: errors.append(error)) if keep_errors else None
    with backends.backend(backend):  # each thread has its own
        return list(translator.translate_chunk(lines, first, keep)), errors
