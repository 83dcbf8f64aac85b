"""The seed of a dropout mask."""

from __future__ import annotations

from typing import Any

import torch

from .. import extension

_CPU = torch.device("cpu")


def draw_seed(device: torch.device) -> torch.Tensor:
    """One int64 on ``device`` from torch's own generator there: the seed of one dropout mask.

    ``torch.manual_seed`` governs it, and a replayed CUDA graph draws a fresh one.
    """
    if device == _CPU and not torch.compiler.is_compiling() and (native := _native()):
        return native.draw_seed()  # the same number, sooner
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def draw_launch_seed(device: torch.device, as_number: bool) -> int | torch.Tensor:
    """The seed of one dropout mask, for an op whose kernels take it as a number too; ``as_number``: may this call.

    A number is drawn on the host, from torch's generator there (``torch.manual_seed`` governs both), which saves a
    kernel on the device. A CUDA graph under capture must draw a fresh one at each replay: there, as where a call is
    compiled, it is the tensor of :func:`draw_seed`.
    """
    on_cuda = device.type == "cuda"
    captured = on_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or captured or not (as_number or on_cuda):
        return draw_seed(device)
    native = _native()
    number = native.draw_number() if native else int(draw_seed(_CPU).item())
    return number if as_number else torch.full((1,), number, dtype=torch.int64, device=device)


def _native() -> Any | None:
    """The extension, unless a mode of this thread wants to see the call that draws (it may give a generator)."""
    return None if torch._C._len_torch_function_stack() else extension.module()
