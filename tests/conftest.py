"""Tests run on one thread each; benchmarks use all threads."""

import one_thread  # noqa: F401

pytest_plugins = ["every_test"]
