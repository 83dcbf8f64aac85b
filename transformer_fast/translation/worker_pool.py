"""A text translated by several processes, each with its share of the threads.

Between the products of a step runs Python, on one processor, and every product ends with the slowest thread: the
smaller the model and the more processors there are, the longer the others wait. Processes do not wait for one another.
"""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from .. import backends
from .errors import ConfigError

if TYPE_CHECKING:
    from .translator import Translation, Translator

Lines = list[str | Exception]
Answer = tuple[list[list["Translation"]], list[tuple[int, str]]]
"""The translations of each line of a chunk, and number in it (from 1) and reason of each that has none."""

AHEAD = 3
"""Chunks that are read ahead for each worker. Those that wait are what this process takes for itself."""

_translator: Translator
"""In a worker that was started."""


def translate_chunks(
    translator: Translator,
    chunks: Iterable[Lines],
    *,
    workers: int,
    on_error: Callable[[int, str], None] | None,
) -> Iterator[list[Translation]]:
    """What the translator gives for the lines of all chunks, in order; each chunk is translated by one worker.

    One of the workers is this process. The others have a copy of the models each, and are started afresh: a script that
    asks for them must do so below `if __name__ == "__main__"`. Chunks are read `AHEAD`, so memory does not grow with
    the text.

    Raises:
        ConfigError: for a model that is not on a CPU.
        ChildProcessError: when a worker was killed.
    """
    if translator.device.type != "cpu":
        raise ConfigError(f"workers={workers} is for models on a CPU; expected 1 for one on {translator.device}")
    given = iter(chunks)
    several = list(islice(given, 2))
    if len(several) < 2:  # a process takes seconds to start
        for chunk in several:
            yield from _reported(_answer(translator, chunk), 1, on_error)
        return
    threads = torch.get_num_threads()
    share = max(threads // workers, 1)
    # Bytes, and not the tensors themselves: those would travel in /dev/shm, where a container has 64 MB.
    state = pickle.dumps(translator), share
    pool = ProcessPoolExecutor(workers - 1, mp_context=get_context("spawn"), initializer=_start, initargs=state)
    given = chain(several, given)
    waiting: deque[tuple[Lines, Future[Answer]]] = deque()
    first = 1
    torch.set_num_threads(share)
    try:
        while True:
            for chunk in islice(given, AHEAD * workers - len(waiting)):
                waiting.append((chunk, pool.submit(_translate, chunk, backends.current())))
            if not waiting:
                break
            if not waiting[0][1].done():
                _take_one(translator, waiting)
            first += yield from _reported(waiting.popleft()[1].result(), first, on_error)
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"one of {workers} workers was killed, and lines from {first} on are not translated; is there enough "
            "memory for a model in each of them?"
        ) from error
    finally:
        torch.set_num_threads(threads)
        pool.shutdown(cancel_futures=True)


def _take_one(translator: Translator, waiting: deque[tuple[Lines, Future[Answer]]]) -> None:
    """Translate here the first chunk that no worker has begun, if there is one."""
    for index, (chunk, future) in enumerate(waiting):
        if future.cancel():
            done: Future[Answer] = Future()
            waiting[index] = chunk, done
            done.set_result(_answer(translator, chunk))
            return


def _reported(
    answer: Answer, first: int, on_error: Callable[[int, str], None] | None
) -> Generator[list[Translation], None, int]:
    """Gives the translations of a chunk whose first line has this number. Returns how many there are."""
    translations, errors = answer
    for number, reason in errors:
        if on_error is None:
            raise ValueError(f"line {first + number - 1}: {reason}")
        on_error(first + number - 1, reason)
    yield from translations
    return len(translations)


def _answer(translator: Translator, lines: Lines) -> Answer:
    errors: list[tuple[int, str]] = []
    found = translator.translations(lines, chunk_lines=len(lines), on_error=lambda *error: errors.append(error))
    return list(found), errors


def _start(translator: bytes, threads: int) -> None:
    """The beginning of a worker."""
    global _translator
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that shows the answers
    torch.set_num_threads(threads)
    _translator = pickle.loads(translator)


def _translate(lines: Lines, backend: str) -> Answer:
    with backends.backend(backend):
        return _answer(_translator, lines)
