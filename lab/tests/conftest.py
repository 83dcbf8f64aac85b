"""Tests run on one thread each; the benchmarks do not."""

from tests.support import one_thread  # noqa: F401
