"""Tools to hold a kernel of your own to its reference: the gate, poisoned memory, one dropout seed, a timer.

docs/testing.md shows them at work.
"""

from .gate import ULPS, assert_as_exact_as_eager, errors
from .memory import poisoned_memory
from .seed import fixed_dropout_seed
from .timer import Timing, interleaved

__all__ = [
    "ULPS",
    "Timing",
    "assert_as_exact_as_eager",
    "errors",
    "fixed_dropout_seed",
    "interleaved",
    "poisoned_memory",
]
