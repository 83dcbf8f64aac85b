"""Fixtures that several tests of accelerate share."""

from accelerated import fused, small_calls  # noqa: F401
