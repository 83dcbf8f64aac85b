"""The texts of :mod:`transformer_fast.dialects`: each family in plain eager PyTorch, written for reading.

Each text is also the oracle of its fast form, which has its constructors and its plain functions.
"""

from . import bert, d2l, tensorflow

__all__ = ["bert", "d2l", "tensorflow"]
