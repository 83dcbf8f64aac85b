"""Fixtures of several files here."""

from accelerated import fused, proven_once, small_calls  # noqa: F401
