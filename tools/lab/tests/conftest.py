"""Tests run on one thread each; the benchmarks do not."""

import one_thread  # noqa: F401

pytest_plugins = ["every_test"]
