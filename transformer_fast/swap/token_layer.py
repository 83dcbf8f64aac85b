"""Layers that compute each token alone outside of attention, as their user says by ``tfast.register``, without padding.

A layer is given tokens (1, T, d) as one sequence, and a mask of its own kind that keeps all of them. Attention inside
the layer reads the boundaries of the sentences from ``ops.token_mask``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..backends import in_transform
from ..layers.hooks import is_plain
from ..layers.padded_calls import StaysPaddedError, padded_calls
from ..layers.padder import Padder, check_reads, hand_over, held_packing, without_padding
from ..masks import AttentionMask
from ..masks.packing import Packing, packing_of
from ..models.packed import padding_of
from ..ops.scaled_dot_product_attention import TORCH, scaled_dot_product_attention
from ..ops.token_mask import OnTokens, call_on_tokens, on_tokens
from ..tensor_cache import get_or_compute
from ..tracing import is_traced
from .swapped import registered_class

LOWEST = -1e4
"""Number that hides a key when it is added to a score, or a lower one."""

MEANINGS = ("keep", "blocked", "added")
"""Meanings of a mask: 0 hides a key, 0 keeps a key, or the mask is added to the scores."""


@dataclasses.dataclass(frozen=True)
class TokenLayer:
    """Statement about a class of layers: each token is computed alone outside of attention.

    Attributes:
        mask: name of the argument that says where the padding is.
        means: one of ``MEANINGS``.
        batch_first: True if hidden states are (B, L, d), False for (L, B, d).
        reads: numbers of attentions that a call runs on the kernels, as seen in the check; empty if unknown.
        redirects: True if the layer's code calls ``F.scaled_dot_product_attention``.
    """

    mask: str
    means: str
    batch_first: bool = True
    reads: frozenset[int] = frozenset()
    redirects: bool = True

    def as_batch_first(self, x: Tensor) -> Tensor:
        """Exchange the axes of length and batch of a layer with the other order; keep the tokens that x holds."""
        return x if self.batch_first else hand_over(x, x.transpose(0, 1))

    def keep_of(self, mask: Any, batch: int, length: int) -> Tensor:
        """Padding of a mask, bool (B, L), True at tokens.

        Raises:
            StaysPaddedError: if the mask is not padding alone.
        """
        if not isinstance(mask, Tensor) or mask.requires_grad or not 2 <= mask.dim() <= 4:
            raise StaysPaddedError(f"its {self.mask} is no mask of two to four dimensions")
        if (mask.shape[0], mask.shape[-1]) != (batch, length):
            raise StaysPaddedError(f"its {self.mask} has not the sizes (B, ..., L) of the batch")
        other = mask <= LOWEST if self.means == "added" else mask == 1
        if mask.dtype == torch.bool and self.means == "added":
            raise StaysPaddedError(f"its {self.mask} is bool, and is added to scores")
        if mask.dtype != torch.bool and not bool(((mask == 0) | other).all()):
            raise StaysPaddedError(f"its {self.mask} holds scores, not padding alone")
        if mask.dim() == 4 and mask.shape[1] != 1:
            raise StaysPaddedError("its mask has heads of its own")
        keep = mask != 0 if self.means == "keep" else mask == 0
        keep = keep if keep.dim() == 4 else keep[:, None] if keep.dim() == 3 else keep[:, None, None]
        try:
            parts = padding_of(AttentionMask.keep(keep), length)
        except ValueError as reason:
            raise StaysPaddedError(str(reason)) from reason
        assert parts is not None and parts.key_keep_mask is not None
        return parts.key_keep_mask[:, 0, 0]

    def packing(self, mask: Any, batch: int, length: int) -> Packing:
        """Packing of a batch with this mask; the same object for all layers that are given the mask.

        Raises:
            StaysPaddedError: if the mask is not padding alone.
        """
        rows = self.keep_of(mask, batch, length)
        # On a CPU the values are compared, because writes may go unnoticed.
        stamp = rows.numpy().tobytes() if mask.is_cpu else None
        make = lambda: packing_of(rows, batch, length, mask.device)  # noqa: E731
        return get_or_compute(mask, ("tokens", self.means), (), make, stamp)


def _token_forward(base: type[nn.Module], layer: TokenLayer, parts: tuple[str, ...]) -> Callable[..., Any]:
    """Make the ``forward`` of a registered layer: hidden states first, then its mask; all else has its default."""
    names = positional_names(base.forward)
    defaults = {name: p.default for name, p in inspect.signature(base.forward).parameters.items()}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls = padded_calls(self)
        in_graph = torch.compiler.is_compiling() or is_traced() or in_transform()
        if calls is None or in_graph or len(args) > len(names) or call_on_tokens() is not None:
            return base.forward(self, *args, **kwargs)
        named = dict(zip(names, args)) | kwargs
        x, mask = named.get(names[0]), named.get(layer.mask)
        if type(x) is not Tensor or x.dim() != 3:
            return base.forward(self, *args, **kwargs)
        if mask is None:
            check_reads(self, held_packing(x), None)
            return base.forward(self, *args, **kwargs)

        def prepare() -> tuple[Padder, Callable[[], Any]]:
            padded = layer.as_batch_first(x)
            padder = Padder(layer.packing(mask, *padded.shape[:2]))
            check_reads(self, held_packing(x), padder.own)
            _check_parts(self, parts)
            known = {names[0], layer.mask}
            for name, value in named.items():
                default = value is None or value is defaults.get(name, value is None)
                if not default and name not in known:
                    raise StaysPaddedError(f"its layers are given {name}, which is more than hidden states and a mask")
            padder.check_sources()
            (tokens,) = padder.remove(padded)
            total = padder.own.total
            kept = mask.new_full((*[1] * (mask.dim() - 1), total), layer.means == "keep")
            values = named | {names[0]: tokens.unsqueeze(int(not layer.batch_first)), layer.mask: kept}
            ordered = [values.pop(name) for name in names[: len(args)]]

            def run() -> Any:
                with on_tokens(padder.masks[0]) as call, _Redirect(call) if layer.redirects else nullcontext():
                    try:
                        result = base.forward(self, *ordered, **values)
                    except StaysPaddedError:
                        raise
                    except Exception as error:  # an error of the author comes again, with the padding
                        raise StaysPaddedError(f"its code fails on tokens ({type(error).__name__})") from error
                first, *others = result if isinstance(result, tuple) else (result,)
                if type(first) is not Tensor or first.dim() != 3 or layer.as_batch_first(first).shape[:2] != (1, total):
                    raise StaysPaddedError("it returns something else than hidden states")
                others = [mask if other is kept else other for other in others]
                if not all(other is mask or other is None for other in others):
                    raise StaysPaddedError("it returns more than hidden states, such as attention weights")
                _check_reads(call, layer)
                first = layer.as_batch_first(first).squeeze(0)
                return (first, *others) if isinstance(result, tuple) else first

            return padder, run

        result = without_padding(self, calls, x, prepare)
        if result is None:
            return base.forward(self, *args, **kwargs)
        if isinstance(result, tuple):
            return layer.as_batch_first(result[0]), *result[1:]
        return layer.as_batch_first(result)

    return forward


def parts_of(layer: nn.Module) -> tuple[str, ...]:
    """Names of the classes of a layer and of the modules inside."""
    return tuple(type(module).__name__ for module in layer.modules())


def _check_parts(layer: nn.Module, parts: tuple[str, ...]) -> None:
    if parts_of(layer) != parts:
        raise StaysPaddedError(f"a module inside a {type(layer).__name__} was replaced since accelerate")
    for child in layer.modules():
        if child is not layer and not is_plain(child):
            kind = type(child).__name__
            raise StaysPaddedError(f"a {kind} inside a layer has a hook, which would see tokens without padding")


def _check_reads(call: OnTokens, layer: TokenLayer) -> None:
    call.check_weights()
    if call.reads == 0 or (layer.reads and call.reads not in layer.reads):
        seen = f", and {' or '.join(map(str, sorted(layer.reads)))} in its check" if layer.reads else ""
        raise StaysPaddedError(f"{call.reads} attentions inside it run on the kernels{seen}")
    if (seen_calls := _seen.get()) is not None:
        seen_calls.append(call)


class _Redirect(TorchFunctionMode):
    """Calls of torch's attention attend on tokens."""

    def __init__(self, call: OnTokens) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not TORCH:
            return func(*args, **(kwargs or {}))
        self.call.redirected = True
        return scaled_dot_product_attention(*args, **(kwargs or {}))


_seen: ContextVar[list[OnTokens] | None] = ContextVar("seen", default=None)


@contextlib.contextmanager
def seen() -> Iterator[list[OnTokens]]:
    """Collect the calls on tokens of this thread."""
    calls: list[OnTokens] = []
    token = _seen.set(calls)
    try:
        yield calls
    finally:
        _seen.reset(token)


TOKENS: dict[type[nn.Module], Any] = {}
"""Registered classes: the registration, whose ``now`` is the :class:`TokenLayer`."""


@functools.cache
def token_class(kind: type[nn.Module], layer: TokenLayer, parts: tuple[str, ...]) -> type[nn.Module]:
    """Class for layers that skip padding; ``parts`` are the classes of the layer and the modules inside, by name, when
    ``accelerate`` was called."""
    return registered_class(kind, (kind,), (token_class, layer, parts), _token_forward(kind, layer, parts))


def token_layer_of(module: nn.Module) -> TokenLayer | None:
    """Statement about the class of a module, as its author wrote the class; None for a class that nobody registered."""
    kind: Any = type(module)
    while kind not in TOKENS and "recipe" in vars(kind):
        kind = kind.former
    return TOKENS[kind].now if kind in TOKENS else None


def skips_padding(module: nn.Module) -> bool:
    """Return True for a layer of a class that :func:`token_class` has made."""
    return vars(type(module)).get("recipe", (None,))[0] is token_class


@functools.cache
def positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a method's positional arguments, without ``self``."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
