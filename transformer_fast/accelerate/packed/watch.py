"""Check of a model at each call: whether all code that sees its hidden states is known to leave padding alone.

The code of a layer was tried (see trial.py). All other code in the model must be transformers' or torch's own. A user
may replace a module, a method or a loss at any time, and may add a hook. So each call compares the model with what was
seen before, and looks again only at what has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ...integrations import dispatch
from ...layers.hooks import HOOKS
from .classes import JUDGED
from .origin import (
    ANSWER,
    ROW,
    STATES,
    Head,
    adds_code,
    bare,
    head_of,
    is_held,
    is_own_code,
    library_class,
    made_by,
    variables_in,
)

WATCH, AROUND = "_packed_watch", "_packed_around"
"""Attributes of a model: its :class:`Watch`, and the name of the class around it that may read its output."""

_HARMLESS = ("torch.distributed.", "torch.utils.module_tracker", "transformers.utils.output_capturing")
"""Python modules whose hooks may see packed tokens, or rows with zeros at padding."""

_PER_POSITION = {
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Embedding, nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU,
    nn.SiLU, nn.LeakyReLU, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.CrossEntropyLoss, nn.MSELoss,
}  # fmt: skip
"""Modules of torch that compute each position by itself."""

Signature = tuple[Any, ...]


class Judged:
    """Signature of a layer at its trial. In a copy of the layer, it is that of the copy if it fitted the original."""

    def __init__(self, layer: nn.Module | None, fits: bool = True) -> None:
        self._layer, self._fits = layer, fits
        self.signature = self.signature_of(layer) if layer is not None else None

    @staticmethod
    def signature_of(layer: nn.Module) -> Signature:
        """Classes and forwards of a layer and of the modules inside it, on which its trial depends."""
        kinds = [bare(type(module)) for module in layer.modules()]
        return tuple((kind, kind.forward) for kind in kinds)

    def fits(self) -> bool:
        """Return True if the layer is as it was tried."""
        return self._fits and self._layer is not None and self.signature == self.signature_of(self._layer)

    def adopt(self, layer: nn.Module) -> None:
        """Take over the layer of a copy."""
        self._layer, self.signature = layer, self.signature_of(layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.fits())


class Watch:
    """State of a model at its last call.

    Attributes:
        head: what the model's head does, if there is no obstacle.
        calls_head: True if the model calls its output layer as a module; None if not known yet.
    """

    def __init__(self) -> None:
        self.head: Head = ROW
        self.calls_head: bool | None = None
        self._obstacle = ""
        self._model: nn.Module | None = None
        self._modules: list[tuple[nn.Module, type, tuple[Any, ...], Any]] = []
        self._forwards: list[tuple[type[nn.Module], Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()

    def obstacle(self, model: nn.Module) -> str:
        """Reason why code in a model, or around it, may read padding, or ""."""
        hooked = self._hooked()
        if hooked is None or self._model is not model:
            self._look(model)
            hooked = self._hooked() or []
        if self._obstacle:
            return self._obstacle
        if torch_module._has_any_global_hook() and any(_is_foreign(hook) for hook in _global_hooks()):
            return "a hook of all modules is set; it may read padding"
        for module in hooked:
            if module is not model and has_hooks(module):
                return f"a {type(module).__name__} has a hook, which may read padding"
        return ""

    def _hooked(self) -> list[nn.Module] | None:
        """Modules with hooks; None if a module or a method has changed."""
        if not self._modules or any(kind.forward is not forward for kind, forward in self._forwards):
            return None
        hooked = []
        for module, kind, children, forward in self._modules:
            own = module.__dict__
            if type(module) is not kind or own.get("forward") is not forward:
                return None
            if tuple(own["_modules"].values()) != children:
                return None
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                hooked.append(module)
        return hooked

    def _look(self, model: nn.Module) -> None:
        self._model = model
        layers = [m for m in model.modules() if JUDGED in m.__dict__]
        inside = {id(m) for layer in layers for m in layer.modules()}
        around = list(_around(model, layers))
        before = _embeddings(model, {id(m) for m in around})
        seen = [m for m in model.modules() if id(m) not in before and HOOKS[0] in m.__dict__]
        self._modules = [(m, type(m), tuple(m.__dict__["_modules"].values()), m.__dict__.get("forward")) for m in seen]
        kinds = {type(m) for m in seen} | {bare(type(m)) for m in seen}
        self._forwards = [(kind, kind.forward) for kind in kinds]
        self.calls_head = None
        self._obstacle = _code_of(model)
        if not self._obstacle:
            self._obstacle = next(filter(None, (_changed(layer) for layer in layers)), "")
        if not self._obstacle:
            outside = _children(model, inside | before)
            self._obstacle = next(filter(None, (_unknown(*pair) for pair in outside)), "")
        if not self._obstacle:
            base = library_class(type(model))
            head = None if base is None else head_of(base)
            heads = (bare(type(child)) for child in model.children() if child not in around)
            pools = head is STATES and any(map(_pools, around))
            reads_row = pools or (head is ANSWER and not _PER_POSITION.issuperset(heads))
            self.head = ROW if head is None or reads_row else head
            if head is None:
                self._obstacle = f"the head of {type(model).__name__} is unknown; it may read padding"


def _code_of(model: nn.Module) -> str:
    if around := model.__dict__.get(AROUND):
        return f"a {around} is around the model, and may read padding; accelerate the model of transformers alone"
    kind, own = type(model), model.__dict__.get("forward")
    known = _runs_as_packed(model) and library_class(kind) is not None and is_own_code(bare(kind).forward)
    if not known or (own is not None and not is_own_code(own)):
        return f"the code of {kind.__name__} is not transformers' own; it may read padding"
    return ""


def _runs_as_packed(module: nn.Module) -> bool:
    """Return True if no class derived from a module's packed class replaces its forward."""
    kind = _packed_kind(module)
    return kind is not None and is_own_code(type(module).forward, kind.forward)


def _packed_kind(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in type(module).__mro__ if "packed_part" in vars(base)), None)


def _changed(layer: nn.Module) -> str:
    replaced = any("forward" in module.__dict__ for module in layer.modules())
    if replaced or not _runs_as_packed(layer) or not layer.__dict__[JUDGED].fits():
        return f"a module inside a {type(layer).__name__} was replaced since accelerate"
    return ""


def _unknown(module: nn.Module, parent: nn.Module) -> str:
    """Reason why a module outside the layers may read several positions, or ""."""
    kind, around = bare(type(module)), bare(type(parent))
    own = module.__dict__.get("forward")
    known = is_held(kind) and is_own_code(kind.forward) and (own is None or is_own_code(own))
    if known and kind not in _PER_POSITION and (kind.__module__.startswith("torch.") or _attends(kind)):
        known = is_held(around) and kind.__name__ in made_by(around)
    return "" if known else f"a {kind.__name__} outside the layers is unknown; it may read padding"


def _attends(kind: type[nn.Module]) -> bool:
    return dispatch.calls_the_interface(kind)


def _children(parent: nn.Module, left_out: set[int], maker: nn.Module | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield each module below a module, and the module whose constructor makes it; none in a module left out."""
    maker = maker if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential) and maker is not None else parent
    for child in parent.children():
        if id(child) not in left_out:
            yield child, maker
            yield from _children(child, left_out, maker)


def _around(model: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Module]:
    """Modules that hold layers."""
    wanted = set(map(id, layers))
    for module in model.modules():
        if not wanted.isdisjoint(map(id, module.modules())):
            yield module


def _embeddings(model: nn.Module, around: set[int]) -> set[int]:
    """Modules in front of the layers, by id: the embeddings of inputs, and all beside them in the same module."""
    tables = {id(table) for module in model.modules() if (table := _table(module)) is not None}
    return {
        id(inner)
        for module in model.modules()
        if id(module) not in around and any(id(m) in tables for m in module.modules())
        for inner in module.modules()
    }


def _pools(module: nn.Module) -> bool:
    """Return True if the code of a model of transformers makes a pooled output of its text."""
    reads_text = getattr(module, "main_input_name", "input_ids") == "input_ids"
    if not reads_text or getattr(module, "pooler", module) is None:
        return False
    return not {"pooler_output", "pooled_output"}.isdisjoint(variables_in(bare(type(module)).forward))


def _table(module: nn.Module) -> nn.Module | None:
    try:
        return module.get_input_embeddings()  # type: ignore[operator]
    except Exception:  # models without one raise different errors
        return None


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has a hook that may read padding, or that is not made for packed tokens."""
    return any(_is_foreign(hook) for name in HOOKS for hook in module.__dict__[name].values())


def _is_foreign(hook: Any) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith(_HARMLESS)


def _global_hooks() -> Iterator[Any]:
    for name in HOOKS:
        yield from getattr(torch_module, f"_global{name}").values()


def around_of(path: str, model: nn.Module) -> str:
    """Name of the first class around a module whose own code may read the module's output, or ""."""
    module = model
    for name in path.split(".") if path else ():
        kind = bare(type(module))
        reads_on = isinstance(module, nn.Sequential) and len(module) > 1
        if reads_on or adds_code(kind):
            return kind.__name__
        module = getattr(module, name)
    return ""


def is_packed(module: nn.Module, part: str) -> bool:
    """Return True for a module with this part."""
    kind = _packed_kind(module)
    return kind is not None and vars(kind)["packed_part"] == part
