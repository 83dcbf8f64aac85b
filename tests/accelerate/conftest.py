"""Fixtures of several files here."""

from accelerated import fused, small_calls  # noqa: F401
