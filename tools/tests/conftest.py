"""Tests run on one thread each; the benchmarks do not."""

import one_thread  # noqa: F401
