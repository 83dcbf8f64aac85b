"""The kinds of tensors that the fused ops take."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter

Kind = TypeVar("Kind", bound=Tensor)

_IN_GRAPHS = (FakeTensor, FunctionalTensor)
"""The classes of tensors that torch.export and AOTAutograd call modules with; the ops have rules for both."""


def is_served(*values: Any) -> bool:
    """Return True if the fused ops take these values, here and now.

    They take no nested and no sparse tensors, none of a class that they do not know, such as DTensor, and no proxies of
    torch.fx; nothing inside a transform of torch.func (vmap, grad), and nothing in forward-mode differentiation. None,
    tensors of classes that :func:`made_when_read` marks, and values of other classes are no obstacle.
    """
    for value in values:
        if value is None or (kind := type(value)) is Parameter:
            continue
        if kind is Tensor:
            if value.is_nested or value.layout is not torch.strided:
                return False
        elif kind not in _IN_GRAPHS and issubclass(kind, (Tensor, Proxy)) and not _is_made_when_read(kind):
            return False
    return forward_ad._current_level < 0 and not _in_transform()


def made_when_read(kind: type[Kind]) -> type[Kind]:
    """Mark a class of this package, and its subclasses, whose tensors become plain ones where an op reads them."""
    kind.made_when_read = True  # type: ignore[attr-defined]
    return kind


def _is_made_when_read(kind: type) -> bool:
    return getattr(kind, "made_when_read", False) is True


def _in_transform() -> bool:
    """Return True inside a transform of torch.func. torch.compile calls this function, and does not read it."""
    return maybe_current_level() is not None


_in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in tracing.py
