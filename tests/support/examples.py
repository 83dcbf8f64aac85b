"""Number of hypothesis examples: few in the short list, the same in every run; 2,000 with ``--all``, or EXAMPLES.

The 2,000 are drawn anew in each run, after calls that failed in an earlier one. Import this module before `given`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def examples(short: int, most: int = 2000) -> settings:
    """Return settings with this many examples in the short list, and more with ``--all``."""
    everything = os.environ.get("TESTS_ALL") == "1"  # which tests/support/short_list.py sets
    count = int(os.environ.get("EXAMPLES", most if everything else short))
    fixed = not everything and "EXAMPLES" not in os.environ
    return settings(max_examples=count, deadline=None, derandomize=fixed, suppress_health_check=SLOW)
