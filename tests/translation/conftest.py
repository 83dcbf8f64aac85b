"""Fixtures of the tests of training."""

from small_training import corpus, finished, run_copy  # noqa: F401
