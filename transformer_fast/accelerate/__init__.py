"""``accelerate(model)``: the fused ops inside a model that somebody already has.

The package can be called, since ``transformer_fast.accelerate`` is the name of the function and of the package. So
``tfast.accelerate(model)`` and ``import transformer_fast.accelerate.lazy_logits`` are both right.
"""

import importlib
import sys
import types
from typing import Any

from torch import nn

from ..generation.forms import decoder_makers
from .cached_decoder import as_decoder
from .engine import accelerate
from .report import Report, Row

__all__ = ["Report", "Row", "accelerate"]

decoder_makers.append(as_decoder)


class _Callable(types.ModuleType):
    """The package as the function."""

    __wrapped__ = staticmethod(accelerate)  # from which inspect reads the signature

    def __call__(self, model: nn.Module, *, fused_loss: bool = False, packed: bool = False) -> Report:
        """See :func:`transformer_fast.accelerate.accelerate`."""
        return accelerate(model, fused_loss=fused_loss, packed=packed)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (__name__,)


__doc__ = accelerate.__doc__  # what help() shows of either
sys.modules[__name__].__class__ = _Callable
