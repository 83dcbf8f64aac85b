"""Walk over a model that finds the modules that can skip padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...integrations import dispatch
from ...layers import torch_stacks
from ...layers.padded_calls import WITHOUT_PADDING, layers_of
from ...layers.torch_modules import MultiheadAttention, TransformerEncoderLayer
from ...layers.torch_packed import takes_packed
from ...models.transformer import Transformer
from ..patterns.base import pattern_of
from ..registered import is_swapped
from ..report import ALREADY, Attribute, Report, Row
from .classes import JUDGED, packed_class
from .layer import LAYER
from .model import HEAD, MODEL, output_layer
from .token_layer import TokenLayer, how_to, layer_of_torch, parts_of, skips_padding, token_class, token_layer_of
from .trial import Stack, judge
from .watch import AROUND, WATCH, Judged, Watch, around_of, is_packed

NOW = "without padding"


def pack(model: nn.Module, report: Report, is_ours: Callable[[nn.Module], bool]) -> dict[str, str] | None:
    """Let the stacks of a model skip padding, and add one row per stack to the report.

    Args:
        is_ours: function that returns True if a transformers attention runs on our kernels.

    Returns:
        None; or, of a model in which nothing can skip padding, what to do about lists of layers, by path.
    """
    found = False
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        if isinstance(module, Transformer):
            found = True
            already = module.packed
            inside.update(map(id, module.modules()))
            report.rows.append(Row(path, type(module).__name__, None if already else NOW, ALREADY if already else ""))
            if not already:
                _change(report, module, "packed", True)
        elif _is_stack(module):
            found = True
            inside.update(map(id, module.modules()))
            report.rows.append(_own_row(path, module))
            if report.rows[-1].now:
                _change(report, module, WITHOUT_PADDING, report.padded_calls)
    itself = token_layer_of(model)
    registered = _token_layers(model, "", inside) if itself is None else [("", [(model, itself)])]
    for path, layers in list(registered):
        found = True
        report.rows.append(_packed_row(report, path, layers))
    unregistered = list(_unregistered(model, "", inside))
    stacks = list(_stacks(model, "", None))
    for stack in stacks:
        if all(is_packed(layer, LAYER) and layer.__dict__[JUDGED].fits() for layer in stack.layers):
            stack.obstacle = ALREADY
        elif not all(is_ours(m) for layer in stack.layers for m in layer.modules() if _attends(m)):
            stack.obstacle = "its attention is not fused"
        else:
            judge(stack)
    for module, part in _parts(stacks, model):
        if not is_packed(module, part):
            made = packed_class(type(module), part)
            report._originals.append((module, type(module), made, {}))
            module.__class__ = made
            if part == MODEL:
                _change(report, module, WITHOUT_PADDING, report.padded_calls)
        if part == MODEL:
            _change(report, module, WATCH, Watch())
        elif part == LAYER:
            _change(report, module, JUDGED, Judged(module))
    for path, module in model.named_modules():
        if is_packed(module, MODEL):
            _change(report, module, AROUND, around_of(path, model))
    for stack in stacks:
        kinds = ", ".join(dict.fromkeys(type(layer).__name__ for layer in stack.layers))
        why = stack.obstacle or _obstacle_around(stack, model)
        report.rows.append(Row(stack.path, f"{len(stack.layers)} {kinds}", None if stack.obstacle else NOW, why))
    if not (found or stacks):
        return {row.path: row.why for row in unregistered}
    report.rows += unregistered
    return None


def _change(report: Report, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module; the report can undo the change."""
    report._changes.append(change := Attribute(module, name, value))
    change.put()


def _obstacle_around(stack: Stack, model: nn.Module) -> str:
    """Reason why the calls of a model keep the padding of a stack that can skip it, or ""."""
    around = (m for m in model.modules() if is_packed(m, MODEL) and any(inner is stack.owner for inner in m.modules()))
    outermost = next(around)
    return outermost.__dict__[WATCH].obstacle(outermost)


def _is_stack(module: nn.Module) -> bool:
    """Return True for a stack of torch.nn, or for a hand-written stack or layer on the fused ops."""
    if isinstance(module, torch_stacks.TransformerEncoder | torch_stacks.TransformerDecoder):
        return True
    return (pattern := pattern_of(module)) is not None and pattern.padding is not None


def _own_row(path: str, module: nn.Module) -> Row:
    layers = layers_of(module)
    was = f"{len(layers)} {type(layers[0]).__name__}"
    if WITHOUT_PADDING in module.__dict__:
        return Row(path, was, None, ALREADY)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and not all(map(takes_packed, layers)):
        return Row(path, was, None, "a layer has a hook, or a part of another kind")
    reason = getattr(pattern_of(module), "padding", "")
    return Row(path, was, None if reason else NOW, reason)


def _token_layers(
    module: nn.Module, path: str, left_out: set[int]
) -> Iterator[tuple[str, list[tuple[nn.Module, TokenLayer]]]]:
    """Layers of registered classes, with the statements about their classes, by the path of the module that holds
    them; and lists of the encoder layers of ``torch.nn`` in a loop of the author's."""
    if id(module) in left_out or _is_of_transformers(module):
        return
    found: dict[type, list[tuple[nn.Module, TokenLayer]]] = {}
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        layer = token_layer_of(child)
        if layer is None and is_list and type(child) is TransformerEncoderLayer:
            layer = layer_of_torch(child)
        if layer is not None:
            found.setdefault(type(child), []).append((child, layer))
        else:
            yield from _token_layers(child, f"{path}.{name}" if path else name, left_out)
    for layers in found.values():
        yield path, layers


def _packed_row(report: Report, path: str, layers: list[tuple[nn.Module, TokenLayer]]) -> Row:
    """Let registered layers skip padding."""
    modules = [module for module, _ in layers]
    was = f"{len(layers)} {type(modules[0]).__name__}"
    if all(map(skips_padding, modules)):
        return Row(path, was, None, ALREADY)
    if any("forward" in vars(module) for module in modules):
        return Row(path, was, None, "its forward was replaced")
    for module, layer in layers:
        if not skips_padding(module):
            made = token_class(type(module), layer, parts_of(module))
            report._originals.append((module, type(module), made, {}))
            module.__class__ = made
            _change(report, module, WITHOUT_PADDING, report.padded_calls)
    return Row(path, was, NOW if token_layer_of(modules[0]) is None else f"{NOW} (registered)")


def _unregistered(module: nn.Module, path: str, left_out: set[int]) -> Iterator[Row]:
    """Rows of the outermost lists of layers of one class, which nobody has registered, around fused attention."""
    if id(module) in left_out or _is_of_transformers(module) or token_layer_of(module) is not None:
        return
    kinds = {type(layer) for layer in module.children()}
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) == 1
    if alike and all(any(map(_is_swapped, layer.modules())) for layer in module.children()):
        kind, layers = kinds.pop(), list(module.children())
        of_torch = kind.__module__.startswith(("torch.", "transformer_fast."))
        if not any(skips_padding(layer) or token_layer_of(layer) is not None for layer in layers):
            why = "a list of these layers keeps its padding, a stack does not" if of_torch else how_to(kind.__name__)
            yield Row(path, f"{len(layers)} {kind.__name__}", None, why)
        return
    for name, child in module.named_children():
        yield from _unregistered(child, f"{path}.{name}" if path else name, left_out)


def _is_swapped(module: nn.Module) -> bool:
    """Return True for attention that runs on the kernels."""
    pattern = pattern_of(module)
    fused = type(module) is MultiheadAttention or (pattern is not None and pattern.attends)
    return fused or is_swapped(module)


def _stacks(module: nn.Module, path: str, model: nn.Module | None) -> Iterator[Stack]:
    """Outermost lists of layers whose attention uses transformers' interface."""
    model = module if _is_of_transformers(module) else model
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        if model is not None and isinstance(child, nn.ModuleList) and any(map(_attends, child.modules())):
            yield Stack(place, list(child), model, module)
        else:
            yield from _stacks(child, place, model)


def _is_of_transformers(module: nn.Module) -> bool:
    return hasattr(module, "config") and hasattr(module, "get_output_embeddings")


def _attends(module: nn.Module) -> bool:
    return dispatch.calls_the_interface(type(module))


def _parts(stacks: list[Stack], model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, part) for each module that skips padding."""
    layers = {id(layer): layer for stack in stacks if not stack.obstacle for layer in stack.layers}
    inside = {id(stack.model) for stack in stacks if stack.obstacle in ("", ALREADY)}
    models = {
        id(module): module
        for module in model.modules()
        if hasattr(module, "get_output_embeddings") and not inside.isdisjoint(map(id, module.modules()))
    }
    heads = {id(head): head for head in map(output_layer, models.values()) if head is not None}
    for modules, part in ((layers, LAYER), (heads, HEAD), (models, MODEL)):
        yield from ((module, part) for module in modules.values())
