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

from ..generation.decoding import evaluation_mode
from .errors import ConfigError

if TYPE_CHECKING:
    from .translator import Translation, Translator

Lines = list[str | Exception]
Answer = tuple[list[list["Translation"]], list[tuple[int, str]]]
"""The translations of each line of a chunk, and number in it (from 1) and reason of each that has none."""


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
        first = 1
        for translations, errors in _in_order(pool, translator, chunks, 2 * workers):
            for number, reason in errors:
                if on_error is None:
                    raise ValueError(f"line {first + number - 1}: {reason}")
                on_error(first + number - 1, reason)
            yield from translations
            first += len(translations)


def _in_order(pool: ThreadPoolExecutor, translator: Translator, chunks: Iterable[Lines], most: int) -> Iterator[Answer]:
    """The answers to all chunks, of which at most so many are in work or wait."""
    running: deque[Future[Answer]] = deque()
    for chunk in chunks:
        running.append(pool.submit(_answer, translator, chunk))
        if len(running) == most:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _answer(translator: Translator, lines: Lines) -> Answer:
    errors: list[tuple[int, str]] = []
    found = translator.translations(lines, chunk_lines=len(lines), on_error=lambda *error: errors.append(error))
    return list(found), errors
