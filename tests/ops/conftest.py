"""Fixtures: uninitialised tensors start as NaN; ``kernels`` are the C++ kernels."""

from attention_kernels import dtype, kernels  # noqa: F401
from helpers import poisoned  # noqa: F401
