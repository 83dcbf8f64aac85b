"""Seeds of dropout masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from .. import extension

_CPU = torch.device("cpu")
# Inductor keeps this op unchanged, so compiled code draws the same numbers as eager code.
_RANDINT = torch.ops.aten.randint.low_generator

_library = torch.library.Library("transformer_fast", "FRAGMENT")
_library.define("draw_seed(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def draw_seed(device: torch.device) -> Tensor:
    """Draw the seed of one dropout mask: int64 (1,) on ``device``, from torch's generator of that device.

    ``torch.manual_seed`` governs the seed. A replayed CUDA graph draws a new seed. A compiled backward pass uses the
    seed of its forward pass, even if it recomputes other values.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return torch.ops.transformer_fast.draw_seed(device)
    if device == _CPU and (native := _native()):
        return native.draw_seed(False)  # the same number, drawn faster
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


_RECORDING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE", "FUNCTIONAL")]


def _is_recorded() -> bool:
    """Return True if a call is being compiled or traced. Modes that only watch, as they count operations, do not
    count: a checkpoint may recompute a layer outside of them, with the same seed."""
    if torch.compiler.is_compiling():
        return True
    some = torch._C._len_torch_dispatch_stack() > 0
    return some and any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDING)


def draw_launch_seed(device: torch.device) -> Tensor:
    """Draw the seed of one dropout mask on ``device``: int64 (1,), on the host if the host reads it.

    A seed on the host is drawn from torch's CPU generator. The kernels get its value as an argument, which saves a
    kernel on the device. ``torch.manual_seed`` governs both generators. During CUDA graph capture and where the call is
    compiled or traced, the result is that of :func:`draw_seed`, because each replay must draw a new seed.
    """
    if device.type != "cuda" or _is_recorded() or torch.cuda.is_current_stream_capturing():
        return draw_seed(device)
    return draw_seed(_CPU)


def on_device_of(x: Tensor, seed: Tensor | None) -> Tensor | None:
    """The seed of :func:`draw_launch_seed` on the device of ``x``, as graphs and the reference take it."""
    return seed if seed is None or seed.device == x.device else seed.to(x.device)


def _recorded_seed(device: torch.device) -> Tensor:
    """Run :func:`draw_seed` in a graph under construction, and mark the seed so that the partitioner does not draw it
    twice.

    The partitioner of torch.compile cuts a graph into forward and backward. With a memory budget below 1 the
    partitioner may recompute this op in the backward. A mark makes the partitioner save the result instead. A budget of
    0 saves nothing; then the mark makes it recompute the op from the same generator state. Marks of checkpointing stay.
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
    """Share of activations that the partitioner may save, for the whole program or for the region of a node."""
    from torch._functorch import config
    from torch.fx import traceback

    of_region = getattr(traceback, "_get_memory_budget_annotation", lambda _: None)(node)  # torch 2.13
    return config.activation_memory_budget if of_region is None else of_region


def _native() -> Any | None:
    """The extension; None if a mode of this thread must see the random call (the mode may supply a generator)."""
    return None if torch._C._len_torch_function_stack() else extension.module()
