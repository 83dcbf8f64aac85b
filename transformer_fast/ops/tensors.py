"""The kinds of tensors that the fused ops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter

_KNOWN = (Parameter, FakeTensor, FunctionalTensor)
"""The classes that the ops have rules for; torch.compile and torch.export call modules with the last two."""


def is_served(*values: Any) -> bool:
    """Whether the fused ops take these values in a call that is made here.

    They do not where :func:`have_kernels` says no, inside a transform of torch.func (vmap, grad), and inside
    forward-mode differentiation.
    """
    return have_kernels(*values) and forward_ad._current_level < 0 and not _in_transform()


def have_kernels(*values: Any) -> bool:
    """Whether all tensors among some values are of kinds that the fused ops take.

    Not taken are nested and sparse tensors, tensors of a class that the ops do not know, such as DTensor, and the
    proxies of torch.fx. None and values of other classes are no obstacle.
    """
    for value in values:
        kind = type(value)
        if kind is Tensor:
            if value.is_nested or value.layout is not torch.strided:
                return False
        elif value is not None and kind not in _KNOWN and issubclass(kind, (Tensor, Proxy)):
            return False
    return True


def _in_transform() -> bool:
    """Whether a transform of torch.func is running. torch.compile calls it, and does not read it."""
    return maybe_current_level() is not None


_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py
