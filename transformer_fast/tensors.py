"""Kinds of tensors that the fused ops take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.nn import Parameter

from .tracing import constant_when_compiled, is_traced

Kind = TypeVar("Kind", bound=Tensor)

_IN_GRAPHS = (FakeTensor, FunctionalTensor)
"""Tensor classes that torch.export and AOTAutograd pass to modules; the ops have rules for both."""


def takes_fused_ops(*values: Any) -> bool:
    """Return True if the fused ops take these values in the current context.

    The ops refuse nested and sparse tensors, unknown tensor classes such as DTensor, and proxies of torch.fx. The ops
    refuse all tensors inside a transform of torch.func (vmap, grad), in forward-mode differentiation and under
    torch.jit.trace. None, values that are not tensors, and tensors of classes marked by :func:`made_when_read` are
    accepted.
    """
    for value in values:
        if value is None or (kind := type(value)) is Parameter:
            continue
        if kind is Tensor:
            if value.is_nested or value.layout is not torch.strided:
                return False
        elif (
            kind not in _IN_GRAPHS and issubclass(kind, (Tensor, Proxy)) and not getattr(kind, "made_when_read", False)
        ):
            return False
    return forward_ad._current_level < 0 and not _in_transform() and not is_traced()


def made_when_read(kind: type[Kind]) -> type[Kind]:
    """Mark a tensor class of this package and its subclasses: its tensors become plain tensors when an op reads
    them."""
    kind.made_when_read = True  # type: ignore[attr-defined]
    return kind


@constant_when_compiled
def _in_transform() -> bool:
    """Return True inside a transform of torch.func. torch.compile calls this function without tracing into it."""
    return maybe_current_level() is not None


@contextlib.contextmanager
def usual_tensors() -> Iterator[None]:
    """Make tensors that count writes, also in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
