"""The seed of a dropout mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from .. import extension

_CPU = torch.device("cpu")
_RANDINT = torch.ops.aten.randint.low_generator  # Inductor keeps it as it is, and so draws as eager does

_library = torch.library.Library("transformer_fast", "FRAGMENT")
_library.define("draw_seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def draw_seed(device: torch.device) -> Tensor:
    """One int64 on ``device`` from torch's own generator there: the seed of one dropout mask.

    ``torch.manual_seed`` governs it, and a replayed CUDA graph draws a fresh one. A compiled backward has the seed of
    its forward, whatever else it computes again.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return torch.ops.transformer_fast.draw_seed(device)
    if device == _CPU and (native := _native()):
        return native.draw_seed()  # the same number, sooner
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def draw_launch_seed(device: torch.device, as_number: bool) -> int | Tensor:
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


def _recorded_seed(device: torch.device) -> Tensor:
    """:func:`draw_seed` in a graph under construction, in which the partitioner must not draw it twice.

    The partitioner of torch.compile cuts a graph into forward and backward. It would compute this op again where the
    memory budget is below 1. A mark says that the result is saved. A budget of 0 saves nothing; there the mark says
    that the op is computed again from the same state of the generator. Marks of checkpointing stay.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    seed = _RANDINT(-(2**63), 2**63 - 1, [1], generator=None, dtype=torch.int64, device=device)
    if mode := get_proxy_mode():
        node = next(node for node in reversed(mode.tracer.graph.nodes) if node.target is _RANDINT)
        saved = _memory_budget(node) > 0.0
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE)
    return seed


_library.impl("draw_seed", _recorded_seed, "CompositeImplicitAutograd")


def _memory_budget(node: torch.fx.Node) -> float:
    """The share of activations that the partitioner may save, of the whole program or of the region of a node."""
    from torch._functorch import config
    from torch.fx import traceback

    of_region = getattr(traceback, "_get_memory_budget_annotation", lambda _: None)(node)  # torch 2.13
    return config.activation_memory_budget if of_region is None else of_region


def _native() -> Any | None:
    """The extension, unless a mode of this thread wants to see the call that draws (it may give a generator)."""
    return None if torch._C._len_torch_function_stack() else extension.module()
