"""The oracles of :mod:`transformer_fast.dialects`: each family in plain eager PyTorch, written for reading."""

from . import bert, d2l, tensorflow

__all__ = ["bert", "d2l", "tensorflow"]
