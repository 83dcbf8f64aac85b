"""Lazy logits: a tensor that stands for the output of a linear layer until its values are read, and its gradient.

``linear(hidden, weight, bias)`` is a :class:`LazyLogits`. ``F.cross_entropy`` of lazy logits calls
:func:`transformer_fast.linear_cross_entropy` on hidden, weight and bias. Any other use computes the logits once, by the
``F.linear`` that was skipped; after that, every use is PyTorch's own.

The graph is that of eager PyTorch: the tensor is the output of an autograd node, autograd records its views, and the
loss is a node whose input is the tensor. So hooks, ``retain_grad`` and ``torch.autograd.grad`` work. The gradient from
the loss is lazy too, a :class:`LazyGradient`: it holds the gradients of hidden, weight and bias, and the node of the
linear layer returns them. Any other use computes the gradient of the logits.

Logits read after an optimizer's step have their values from before the step: a hook on the optimizers copies the
weights for lazy tensors that are still alive. After any other change of the weights, reading raises an error. Writes
that PyTorch does not count are seen as far as :func:`transformer_fast.tensor_cache.stamp_of` says: those to whole rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from .. import backends, ops
from ..lazy_tensor import VIEWS, Lazy, Node, cast, make_nothing
from ..ops import eager
from ..tensor_cache import stamp_of
from ..tracing import is_traced
from .report import LOCK

_aten = torch.ops.aten


class _Linear(Node):
    """``F.linear(hidden, weight, bias)``, detached."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...]) -> None:
        super().__init__(hidden.detach(), None, make_nothing, True)
        # Not the parameters but tensors on their memory: assigning a parameter's ``.data`` changes nothing here.
        self.weight, self.bias, self.needs = weight.detach(), None if bias is None else bias.detach(), needs
        self.token = object()  # the graph refers to the linear layer by this token, without keeping it alive
        self._seen = self._state()
        _alive.add(self)
        if _hook is None:  # undone since the forward pass
            self.keep_weights()

    def computed(self, base: Tensor | None) -> Tensor:
        self.check()
        assert self.rows is not None
        return F.linear(self.rows, self.weight, self.bias)

    def check(self) -> None:
        """Raise unless the tensors are what they were."""
        if self._state() != self._seen:
            raise RuntimeError(
                "accelerate: these logits are computed when they are read, because the loss did not need them. The "
                "weights of the output layer, or its input, changed since the forward pass, and not by the step of "
                "a torch.optim.Optimizer. Read the logits, or take logits.detach(), before such a change"
            )

    def keep_weights(self) -> None:
        """Copy the weights, which are about to change. If they have changed already, reading will say so."""
        if self.value is None and self._state() == self._seen:
            self.weight, self.bias = self.weight.clone(), None if self.bias is None else self.bias.clone()
            self._seen = self._state()

    def _state(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Version counters, which every change raises except one through ``.data``; and stamps, which show such a
        change as far as ``stamp_of`` says."""
        tensors = [t for t in (self.rows, self.weight, self.bias) if t is not None]
        sizes = [t.untyped_storage().nbytes() for t in tensors]  # sharding frees the memory of gathered weights
        stamps = [stamp_of(t.reshape(-1, t.shape[-1] if t.dim() > 1 else 1)) for t in tensors] if all(sizes) else []
        return [*sizes, *(t._version for t in tensors)], stamps


_alive: weakref.WeakSet[_Linear] = weakref.WeakSet()


_hook: Any = None  # handle of the hook on the optimizers


def watch_optimizers() -> None:
    """Hook every optimizer, once: copy weights that lazy logits still need before the step."""
    global _hook
    if _hook is not None:
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def before_step(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            _keep_all_weights()

    with LOCK:
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(before_step)


def leave_optimizers() -> None:
    """Remove the hook. Lazy tensors that are still alive get copies of their weights."""
    global _hook
    with LOCK:
        if _hook is not None:
            _hook.remove()
            _hook = None
            _keep_all_weights()


def _keep_all_weights() -> None:
    for linear in list(_alive):
        linear.keep_weights()


class LazyLogits(Lazy):
    """Logits that are computed only when something other than ``F.cross_entropy`` reads them."""

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.cross_entropy and (loss := _cross_entropy(*args, **(kwargs or {}))) is not None:
            return loss
        return super().__torch_function__(function, types, args, kwargs)

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        rows = self.node.rows
        if function in VIEWS:
            return self.reshaped(function, args, kwargs)
        if function in (_aten.slice.Tensor, _aten.select.int):
            dim = args[0] if args else 0
            if self.dim() < 2 or dim % self.dim() == self.dim() - 1:
                return None
            return self.as_derived(function, args, kwargs, function(rows, dim % self.dim(), *args[1:]), False)
        if function is _aten.clone.default:
            return self.as_derived(function, args, kwargs, rows, True)
        if function is _aten._to_copy.default and cast(kwargs) is torch.float32:
            return self.as_derived(function, (), {"dtype": torch.float32}, rows, True)
        if function is _aten.add.Tensor and not kwargs and self._is_bias(args[0]):
            bias = args[0].detach().clone()  # a copy, small (V,), because the original may change
            node = self.node.derived(rows, lambda value: value + bias, True)
            node.added = (*node.added, bias.reshape(-1))
            return LazyLogits(node, torch.empty(self.shape, dtype=self.dtype, device="meta"))
        return None

    def _is_bias(self, other: Any) -> bool:
        """Return True for a tensor (V,) that is added to every row and needs no gradient."""
        return (
            type(other) in (Tensor, Parameter)
            and other.dtype == self.dtype
            and other.device.type == "cpu"
            and other.dim() <= self.dim()
            and other.shape[-1:] == self.shape[-1:]
            and other.numel() == self.shape[-1]
            and not other.requires_grad
        )


class LazyGradient(Lazy):
    """Gradient of lazy logits.

    The rows of its node are the gradient of the hidden states. The node's root holds the gradients of weight and bias,
    and ``token``.
    """

    def kept(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        rows = self.node.rows
        if function in VIEWS:
            return self.reshaped(function, args, kwargs)
        if function in (_aten.slice_backward.default, _aten.select_backward.default):
            sizes, dim, *others = args
            if dim % len(sizes) == len(sizes) - 1:
                return None
            if rows is not None:
                rows = function(rows, [*sizes[:-1], rows.shape[-1]], dim % len(sizes), *others)
            return self.as_derived(function, args, kwargs, rows, True)
        if function is _aten._to_copy.default and (dtype := cast(kwargs)) is not None:
            return self.as_derived(function, (), {"dtype": dtype}, rows, True)
        return None


class _LazyLinear(Function):
    """Autograd node of the linear layer. The node is not an op: its output has a graph but no values yet."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs = ctx.needs_input_grad
        ctx.save_for_backward(hidden if needs[1] else None, weight if needs[0] else None)
        ctx.set_materialize_grads(False)
        linear = _Linear(hidden, weight, bias, needs)
        ctx.token, ctx.rows = linear.token, hidden.shape
        like = torch.empty(*hidden.shape[:-1], weight.shape[0], dtype=hidden.dtype, device="meta")
        return LazyLogits(linear, like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors  # raises if a tensor was changed, as for F.linear
        if grad is None:
            return None, None, None
        if isinstance(grad, LazyGradient):
            node = grad.node
            if not node.is_read() and node.root.token is ctx.token:
                return node.rows, node.root.weight, node.root.bias
            grad = node.read()
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            None if weight is None else flat.mm(weight).view(ctx.rows),
            None if hidden is None else flat.t().mm(hidden.reshape(-1, hidden.shape[-1])),
            flat.sum(0) if ctx.needs_input_grad[2] else None,
        )


class _LossGradient(Node):
    """Gradient of logits (N, V), as the loss passes it on.

    Attributes:
        weight, bias: gradients of the linear layer's parameters (None: not requested).
        token: token of the linear layer.
    """

    def __init__(self, parts: list[Tensor | None], token: object, logits: _Linear, loss: Callable[..., Tensor]) -> None:
        rows, self.weight, self.bias = parts
        super().__init__(rows, None, make_nothing, True)
        self.token, self.logits, self.loss = token, logits, loss

    def computed(self, base: Tensor | None) -> Tensor:
        logits = self.logits.read().detach().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(logits)
        return torch.autograd.grad(loss, logits)[0]


class _FusedLoss(Function):
    """Autograd node of the loss, with the logits as its input. The node is not an op, but calls one."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, target: Tensor, options: dict[str, Any]) -> Tensor:
        node, linear = logits.node, logits.node.root
        biases = [t for t in (linear.bias, *node.added) if t is not None]
        needs = linear.needs if ctx.needs_input_grad[0] else (False, False, False)
        parts = (node.rows, linear.weight, sum(biases[1:], start=biases[0]) if biases else None)
        leaves = [t if t is None else t.detach().requires_grad_(need) for t, need in zip(parts, needs, strict=True)]
        with torch.enable_grad():
            loss = ops.linear_cross_entropy(*leaves, target, **options).to(logits.dtype)  # type: ignore[arg-type, call-arg]
        ctx.options, ctx.token = options, linear.token
        # Only for second derivatives, and not among the saved tensors: the logits may be written to, as in eager
        # PyTorch.
        ctx.logits = logits, logits._version
        ctx.save_for_backward(target, loss, *leaves)
        return loss.detach().clone()  # the saved tensor stays unchanged if the other one is written to

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        target, loss, *leaves = ctx.saved_tensors
        (logits, version), options = ctx.logits, ctx.options
        again = torch.is_grad_enabled()
        if (
            again or backends.in_transform() or torch._C._functorch.is_legacy_batchedtensor(grad)
        ):  # a second derivative is needed, or a batch of gradients
            if logits._version != version:
                raise RuntimeError(
                    "accelerate: these logits were changed in place, so their loss has neither a second derivative nor "
                    "a batch of gradients; expected logits that are unchanged since the loss"
                )
            with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
                loss = F.cross_entropy(logits, target, **options)
            return *torch.autograd.grad(loss, logits, grad, create_graph=again), None, None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.logits = None
        needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        made = iter(torch.autograd.grad(loss, needed, grad, retain_graph=keep))
        parts = [next(made) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        hidden, weight, bias = leaves
        # Compute the logits again: the existing ones may have been written to.
        unchanged, dtype = _Linear(hidden, weight, bias, (False, False, False)), logits.dtype
        node = _LossGradient(
            parts, ctx.token, unchanged, lambda y: grad * F.cross_entropy(y.to(dtype), target, **options)
        )
        return LazyGradient(node, torch.empty(logits.shape, dtype=dtype, device="meta")), None, None


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(hidden, weight, bias)``, computed only when something other than ``F.cross_entropy`` reads the result.

    hidden (..., d) with at least two dimensions, weight (V, d) and bias (V,) or None are plain tensors of one dtype on
    the CPU; at least one of them requires a gradient.
    """
    watch_optimizers()
    return _LazyLinear.apply(hidden, weight, bias)


def takes_fused_ops() -> bool:
    """Return True if a call may skip the logits: no mode or transform observes single operations."""
    return not (
        torch.compiler.is_compiling()
        or is_traced()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or backends.in_transform()
        or forward_ad._current_level >= 0
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # such as activation checkpointing
        or eager.native() is None
    )


def _cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of lazy logits; None if the logits themselves are needed."""
    if type(logits) is not LazyLogits or logits.dim() != 2 or logits.node.is_read():
        return None
    serves = (
        weight is None
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum")
        and type(target) is Tensor
        and target.dtype == torch.int64
        and target.device.type == "cpu"
        and target.shape == logits.shape[:1]
        and 0.0 <= label_smoothing <= 1.0
        and all(added.dtype == logits.node.root.weight.dtype for added in logits.node.added)
        and takes_fused_ops()
    )
    if not serves:
        return None
    logits.node.root.check()
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return _FusedLoss.apply(logits, target, options)
