"""``accelerate(model)``: swap the fused ops into an existing model.

``transformer_fast.accelerate`` is both a function and a module, so the module is callable: ``tfast.accelerate(model)``
and ``from transformer_fast.accelerate import Int8`` both work. The code is in ``swap/``.
"""

import importlib
import sys
import types
from typing import Any

from .generation.forms import decoder_makers
from .swap.accelerate import accelerate
from .swap.cached_decoder import as_decoder
from .swap.int8 import Int8
from .swap.report import Measurement, Report, Speed
from .swap.rows import Row

__all__ = ["Int8", "Measurement", "Report", "Row", "Speed", "accelerate"]

decoder_makers.append(as_decoder)


class _Callable(types.ModuleType):
    """Module class that makes the module callable."""

    __wrapped__ = staticmethod(accelerate)  # inspect reads the signature from here

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        """See :func:`transformer_fast.accelerate.accelerate`."""
        return accelerate(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (__name__,)


__doc__ = accelerate.__doc__  # the text that help() shows
sys.modules[__name__].__class__ = _Callable
