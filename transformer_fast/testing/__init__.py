"""Tools to test your own kernels: the error gate, poisoned memory, a fixed dropout seed, a timer.

docs/testing.md has examples.
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
