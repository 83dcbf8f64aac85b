"""One side of a comparison, in its own process.

PyTorch and CTranslate2 share one OpenMP runtime where they are loaded into one process. The runtime counts the threads
of all pools. More threads than processors sleep at every barrier instead of waiting. On two processors either side then
makes the other three to six times as slow as it is alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch


class Apart:
    """A function that runs in another process; the process is stopped between calls, with its waiting threads.

    Args:
        make: called there once, with `arguments`, it gives the function; both must be picklable.
        threads: PyTorch's, there; default: as many as here.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *arguments: Any, threads: int | None = None) -> None:
        self._given = make, arguments, threads or torch.get_num_threads()
        self._process: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the function and return its result.

        Raises:
            RuntimeError: where it, or `make`, raised one.
        """
        if self._process is None:
            self._start()
        os.kill(self._process.pid, signal.SIGCONT)
        self._connection.send(arguments)
        try:
            found, error = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the process ended with exit code {self._process.exitcode}") from None
        os.kill(self._process.pid, signal.SIGSTOP)
        if error is not None:
            raise RuntimeError(error)
        return found

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, *self._given), daemon=True)
        self._process.start()
        there.close()
        self._finalizer = weakref.finalize(self, _end, self._process)


def _end(process: Any) -> None:
    process.kill()
    process.join()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    function: Callable[..., Any] | None = None
    while True:
        given = connection.recv()
        try:
            function = function or make(*arguments)
            connection.send((function(*given), None))
        except RuntimeError as error:
            connection.send((None, str(error)))


def from_thread_that_ends(make: Callable[[], Any]) -> Any:
    """Return the result of `make`, called in a new thread, for a library with its own threads."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
