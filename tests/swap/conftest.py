"""Fixtures that tests of ``register`` share with those of ``accelerate``."""

from accelerated import proven_once  # noqa: F401
