"""The errors a user of `transformer_fast.translation` can cause, each with one message that says what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class TranslationError(Exception):
    """Base of every error that the data, the configuration or the files on disk can cause.

    A command line can catch this one class, print the message and exit; anything else is a bug.
    """


class ConfigError(TranslationError, ValueError):
    """A training setting has a value that cannot work, or contradicts another one."""


class DataError(TranslationError, ValueError):
    """A text file is missing, empty, not UTF-8, or not aligned with its partner."""


class CheckpointError(TranslationError, RuntimeError):
    """A run folder cannot be written, read, or continued with the given settings."""


class DivergedError(TranslationError, ArithmeticError):
    """The loss or its gradient stopped being a finite number."""


@contextlib.contextmanager
def os_error_as_checkpoint_error(failed: str, advice: str = "") -> Iterator[None]:
    """Context in which an OSError becomes a CheckpointError: what failed, the system's reason, and advice."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{failed}: {error.strerror or error}{advice}") from error
