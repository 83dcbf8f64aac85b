"""Number of hypothesis examples: few in the short list, 2,000 with ``--all``. Import it before `given`."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def examples(short: int, most: int = 2000) -> settings:
    """Return settings with this many examples in the short list, and more with ``--all``."""
    everything = os.environ.get("TESTS_ALL") == "1"  # which tests/support/short_list.py sets
    return settings(max_examples=most if everything else short, deadline=None, suppress_health_check=SLOW)
