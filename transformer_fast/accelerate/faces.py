"""Faces: the fused ops behind the modules people write themselves, one face a structure.

A face says by which names it knows a module (``matches``), how the fused ops compute it (``face_fused``), and which
calls show that this is what the module computes (``calls``): names do not prove a formula, so ``accelerate`` compares
both on random input first. The module's class then becomes a subclass of the face and of the class it had, which adds
no state and keeps every other method.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..layers.feed_forward import linear_relu_dropout
from ..layers.hooks import has_hooks
from ..layers.norm import active_dropout
from ..layers.torch_modules import Embedding, LayerNorm
from ..ops.dropout import dropout as fused_dropout


class Weights:
    """An attribute in which a module leaves the weights of its last call: here computed when somebody looks.

    They are those before dropout. What is left is under ``_recall``: a function of the module, or a value.
    """

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        if "_recall" not in module.__dict__:
            raise AttributeError("no call has left weights here yet")
        recall = module.__dict__["_recall"]
        return recall(module) if isinstance(recall, types.FunctionType) else recall

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["_recall"] = value


class Face:
    """The first base of a swapped class; the second is the class that the module had."""

    face_skips: tuple[str, ...] = ()
    """Children that ``face_fused`` does not call as written: dropouts, and modules swapped before. Where one of them
    has hooks, or has become something else since, the module runs as it was written."""
    face_does: tuple[str, ...] = ()
    """Children of any class that have no parameters, whose work ``face_fused`` does."""
    face_leaves: tuple[str, ...] = ()
    """Attributes in which the module leaves its weights, each a :class:`Weights` here."""
    face_parameters: tuple[tuple[str, Any], ...] | None = None
    face_made_of: tuple[type, ...] = ()

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        """Whether the module has this face's names and shapes."""
        raise NotImplementedError

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        """Arguments to try the module with; one that the module itself refuses is not tried."""
        raise NotImplementedError

    def face_fused(self, *args: Any) -> Any:
        """What the module computes, on the fused ops."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward: ``face_fused``, unless hooks would miss it."""
        ordered = _in_order(self.face_parameters, args, kwargs) if kwargs else args
        if ordered is None or not self._face_fits():
            return super().forward(*args, **kwargs)
        return self.face_fused(*ordered)

    def _face_fits(self) -> bool:
        skipped = self._face_skipped()
        done = [self._modules[name] for name in self.face_does if name in self._modules]
        return not has_hooks(*skipped, *done) and all(map(is_known, skipped))

    def _face_skipped(self) -> list[nn.Module]:
        return [self._modules[name] for name in self.face_skips if self._modules.get(name) is not None]

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # The class is made when the program runs, so a pickle says how to make it again.
        _, _, state, *rest = super().__reduce_ex__(protocol)
        state = {key: None if key == "_recall" else value for key, value in state.items()}
        return _rebuild, type(self).face_made_of, state, *rest


@functools.cache
def fast_class(face: type[Face], original: type[nn.Module]) -> type[nn.Module]:
    """The class of ``original``'s modules with this face."""
    return type(original.__name__, (face, original), {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "forward": _signed(face.forward, original.forward),
        "face_parameters": parameters_of(original),
        "face_made_of": (face, original),
    })  # fmt: skip


def _signed(function: Any, like: Any) -> Any:
    """The same function with the signature of another, which is what torch.export reads."""
    f = function
    twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    twin.__kwdefaults__, twin.__signature__ = f.__kwdefaults__, inspect.signature(like)
    return twin


def _rebuild(face: type[Face], original: type[nn.Module]) -> nn.Module:
    made = fast_class(face, original)
    return made.__new__(made)


def parameters_of(original: type[nn.Module]) -> tuple[tuple[str, Any], ...] | None:
    """Names and defaults of forward's parameters; None where one of them is ``*``, ``**`` or keyword only."""
    parameters = list(inspect.signature(original.forward).parameters.values())[1:]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
        return None
    return tuple((p.name, p.default) for p in parameters)


def is_known(module: nn.Module) -> bool:
    """Whether a module is ``nn.Dropout``, or runs on the fused ops."""
    return type(module) is nn.Dropout or isinstance(module, Face | LayerNorm | Embedding)


def _in_order(parameters: tuple[tuple[str, Any], ...] | None, args: tuple, kwargs: dict[str, Any]) -> tuple | None:
    """Keyword arguments put in order; None where they do not fit, so that the original says so."""
    if parameters is None:
        return None
    rest, used = [], 0
    for name, default in parameters[len(args) :]:
        used += name in kwargs
        rest.append(kwargs.get(name, default))
        if rest[-1] is inspect.Parameter.empty:
            return None
    return (*args, *rest) if used == len(kwargs) else None


def children(module: nn.Module) -> set[str]:
    """The names of a module's children."""
    return {name for name, child in module._modules.items() if child is not None}


def own_parameters(module: nn.Module) -> set[str]:
    """The names of a module's own parameters."""
    return {name for name, parameter in module._parameters.items() if parameter is not None}


def takes(module: nn.Module, arguments: int) -> bool:
    """Whether a module's forward has this many parameters, none of them ``*`` or ``**``."""
    parameters = parameters_of(type(module))
    return parameters is not None and len(parameters) == arguments


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is ``nn.Dropout`` itself."""
    return type(module) is nn.Dropout


def width_of(norm: nn.Module) -> int | None:
    """The width of a norm that takes the residual addition along; None for any other module."""
    if isinstance(norm, NormFace):
        return getattr(norm, norm.face_gain).shape[0]
    return norm.normalized_shape[0] if isinstance(norm, LayerNorm) and len(norm.normalized_shape) == 1 else None


class NormFace(Face):
    """``alpha * (x - mean) / (std + eps) + bias``, the std unbiased."""

    face_gain, face_shift, face_kind = "alpha", "bias", "std"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if own_parameters(module) != {cls.face_gain, cls.face_shift} or children(module):
            return False
        shapes = {getattr(module, name).shape for name in (cls.face_gain, cls.face_shift)}
        return len(shapes) == 1 and len(*shapes) == 1 and isinstance(getattr(module, "eps", None), float)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield (torch.randn(2, 5, getattr(module, cls.face_gain).shape[0]),)

    def face_fused(self, x: Tensor, residual: Tensor | None = None, dropout_p: float = 0.0) -> Any:
        gain, shift = getattr(self, self.face_gain), getattr(self, self.face_shift)
        return ops.layer_norm(x, gain, shift, self.eps, kind=self.face_kind, residual=residual, dropout_p=dropout_p)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.face_fused(*args, **kwargs) if "residual" in kwargs else super().forward(*args, **kwargs)


class BiasedNormFace(NormFace):
    """The same names, and LayerNorm's formula."""

    face_kind = "layer"


class AnnotatedNormFace(NormFace):
    """:class:`NormFace` as ``a_2`` and ``b_2``."""

    face_gain, face_shift = "a_2", "b_2"


class FeedForwardFace(Face):
    """``linear_2(dropout(relu(linear_1(x))))``."""

    face_first, face_second = "linear_1", "linear_2"
    face_skips = ("dropout",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {cls.face_first, cls.face_second, "dropout"} or own_parameters(module):
            return False
        linears = getattr(module, cls.face_first), getattr(module, cls.face_second)
        return all(isinstance(linear, nn.Linear) for linear in linears) and is_dropout(module.dropout)

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield (torch.randn(2, 5, getattr(module, cls.face_first).in_features),)

    def face_fused(self, x: Tensor) -> Tensor:
        inner = linear_relu_dropout(getattr(self, self.face_first), x, active_dropout(self.dropout))
        return getattr(self, self.face_second)(inner)


class AnnotatedFeedForwardFace(FeedForwardFace):
    """:class:`FeedForwardFace` as ``w_1`` and ``w_2``."""

    face_first, face_second = "w_1", "w_2"


class ActivatedFeedForwardFace(FeedForwardFace):
    """``w_2(dropout(activation(w_1(x))))``, whatever the activation."""

    face_first, face_second = "w_1", "w_2"

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"w_1", "w_2", "dropout", "activation"} or own_parameters(module):
            return False
        return all(isinstance(linear, nn.Linear) for linear in (module.w_1, module.w_2)) and is_dropout(module.dropout)

    def face_fused(self, x: Tensor) -> Tensor:
        return self.w_2(fused_dropout(self.activation(self.w_1(x)), active_dropout(self.dropout)))


class D2lFeedForwardFace(Face):
    """``dense2(relu(dense1(x)))``."""

    face_does = ("relu",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"dense1", "relu", "dense2"} or own_parameters(module):
            return False
        return all(type(linear) is nn.Linear for linear in (module.dense1, module.dense2))

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield (torch.randn(2, 5, module.dense1.in_features),)

    def face_fused(self, x: Tensor) -> Tensor:
        return self.dense2(linear_relu_dropout(self.dense1, x, 0.0))


class SublayerFace(Face):
    """``x + dropout(sublayer(norm(x)))``."""

    face_skips = ("dropout",)

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"norm", "dropout"} or own_parameters(module):
            return False
        return is_dropout(module.dropout) and width_of(module.norm) is not None

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield torch.randn(2, 5, width_of(module.norm)), lambda x: torch.tanh(x) + 0.5

    def face_fused(self, x: Tensor, sublayer: Any) -> Tensor:
        return fused_dropout(sublayer(self.norm(x)), active_dropout(self.dropout), residual=x)


class PostNormSublayerFace(SublayerFace):
    """``norm(x + dropout(sublayer(x)))``."""

    face_skips = ("norm", "dropout")

    def face_fused(self, x: Tensor, sublayer: Any) -> Tensor:
        return self.norm(sublayer(x), residual=x, dropout_p=active_dropout(self.dropout))[0]


class AddNormFace(Face):
    """``ln(x + dropout(y))``."""

    face_skips = ("dropout", "ln")

    @classmethod
    def matches(cls, module: nn.Module) -> bool:
        if children(module) != {"dropout", "ln"} or own_parameters(module):
            return False
        return is_dropout(module.dropout) and width_of(module.ln) is not None

    @classmethod
    def calls(cls, module: nn.Module) -> Iterable[tuple[Any, ...]]:
        yield torch.randn(2, 5, width_of(module.ln)), torch.randn(2, 5, width_of(module.ln))

    def face_fused(self, x: Tensor, y: Tensor) -> Tensor:
        return self.ln(y, residual=x, dropout_p=active_dropout(self.dropout))[0]
