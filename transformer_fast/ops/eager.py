"""Eager fast path to an op.

A call of PyTorch's dispatcher from Python takes some microseconds: on a small tensor, longer than the kernel. The
dispatcher is only needed for tracing, tensor subclasses and modes. So a public function first passes the whole call to
the extension (csrc/ops/eager.h). The extension returns None for a call that needs the dispatcher.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import backends, extension

_TRITON_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def native() -> Any | None:
    """The extension if it may take a whole call; None if a call is being compiled or another backend was requested.
    Functions of the extension return None for tensors that are not plain CPU tensors."""
    if torch.compiler.is_compiling() or backends.current() not in ("auto", "native"):
        return None
    return extension.module()


def fast_path(op: str, q: Any) -> tuple[Any | None, bool]:
    """Pair: the extension if it may take a whole call of `op`, else None; and True if Triton kernels compute the op."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not isinstance(q, Tensor):
        return None, False
    asked = backends.current()
    by_triton = _runs_on_triton(asked, op, q.device, q.dtype)
    if not by_triton and asked not in ("auto", "native"):
        return None, False
    return extension.module(), by_triton


@functools.cache
def _runs_on_triton(asked: str, op: str, device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in _TRITON_TYPES or not (device.type == "cuda" or asked == "triton"):
        return False
    return backends.resolve(op, device, dtype) == "triton"


def is_plain(*tensors: Tensor | None) -> bool:
    """Return True if a call needs no dispatcher: no compilation, mode or tensor subclass, and not on the meta device,
    which computes nothing."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or ((type(t) is Tensor or type(t) is Parameter) and not t.is_meta) for t in tensors)


def autocast_enabled(t: Any) -> bool:
    """Return True if autocast is on for a tensor's device; False on the meta device, which has no autocast."""
    return isinstance(t, Tensor) and not t.is_meta and torch.is_autocast_enabled(t.device.type)
