"""``QuantisedAs``: a swapped class that torch.ao.quantization takes for the class before."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

NAME = "parametrizations"
"""Attribute that torch reads to find the class of a module, and in which a class has its :class:`QuantisedAs`."""


class QuantisedAs:
    """Descriptor that gives a module its former class when torch.ao.quantization looks the class up.

    ``quantize_dynamic`` and its relatives compare the exact class of a module with those that they know, and skip every
    other module without a word. These functions ask ``type_before_parametrizations`` for the class, which nothing else
    in torch calls. Subclasses have code of their own, so they keep their class.
    """

    def __init__(self, former: type[nn.Module]) -> None:
        self.former = former

    def __get__(self, module: nn.Module | None, kind: type[nn.Module]) -> Any:
        if module is None:
            return self
        if NAME in vars(type(module)) and _quantization_asks():
            module.__class__ = self.former
        raise AttributeError(NAME)  # then nn.Module looks for parametrizations


def _quantization_asks() -> bool:
    read = sys._getframe(2)
    asked = read.f_back
    known = parametrize.is_parametrized.__code__, parametrize.type_before_parametrizations.__code__
    return asked is not None and (read.f_code, asked.f_code) == known
