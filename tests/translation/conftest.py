"""Fixtures of the tests of training."""

from small_training import command, corpus, finished, never_stopped, numbers, run_copy, trained  # noqa: F401
