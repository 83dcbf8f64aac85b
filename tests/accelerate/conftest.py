"""Fixtures that several tests of accelerate share."""

from accelerated import fused, proven_once, small_calls  # noqa: F401
