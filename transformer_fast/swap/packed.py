"""Models that skip the padding of a batch, ``accelerate(model, packed=True)``: the walk over their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .. import huggingface
from ..huggingface.heads import logits_of_tokens
from ..huggingface.logits import TokensHead
from ..layers import torch_stacks
from ..layers.linear import Linear
from ..layers.padded_calls import WITHOUT_PADDING, layers_of
from ..layers.torch_modules import MultiheadAttention, TransformerEncoderLayer
from ..layers.torch_packed import takes_packed
from ..models.transformer import Transformer
from .form import form_of
from .output_layer import OutputLayer
from .report import Attribute, Report
from .rows import ALREADY, Row
from .swapped import is_swapped, registered_class
from .token_layer import TokenLayer, how_to, layer_of_torch, parts_of, skips_padding, token_class, token_layer_of

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
        if type(module) is nn.Transformer and "forward" not in module.__dict__:
            report._give_class(module, torch_stacks.Transformer)
        elif isinstance(module, Transformer):
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
                if layers_of(module) == [module]:
                    _note_code_between(model, path, report)
    itself = token_layer_of(model)
    registered = _token_layers(model, "", inside) if itself is None else [("", [(model, itself)])]
    for path, layers in list(registered):
        found = True
        report.rows.append(_packed_row(report, path, layers))
    unregistered = list(_unregistered(model, "", inside))
    stacks = list(_of_transformers(model, report, is_ours))
    report.rows += stacks
    if not (found or stacks):
        return {row.path: row.why for row in unregistered}
    report.rows += unregistered
    return None


def _of_transformers(model: nn.Module, report: Report, is_ours: Callable[[nn.Module], bool]) -> Iterator[Row]:
    """Rows of the stacks of transformers; the stacks, and the models around them, get their fast classes."""
    packed: set[int] = set()
    unknown: dict[int, str] = {}
    for path, module in list(model.named_modules()):
        kind = type(module)
        if reason := huggingface.reads_padding(module):
            unknown |= {id(inner): reason for inner in module.modules()}
        if issubclass(kind, huggingface.Stack):
            packed.add(id(module))
            yield Row(path, kind.__name__, None, ALREADY)
        elif (fast := huggingface.packed_class(kind)) is not None:
            if not issubclass(fast, huggingface.Stack):  # a table of positions, or a module around a stack
                _swap(report, module, fast)
            elif id(module) in unknown:
                yield Row(path, kind.__name__, None, unknown[id(module)])
            elif not any(map(is_ours, module.modules())):
                yield Row(path, kind.__name__, None, "its attention is not fused")
            else:
                packed.add(id(module))
                _swap(report, module, fast)
                yield Row(path, kind.__name__, NOW)
        elif _is_of_transformers(module) and _is_alone(module) and any(map(is_ours, module.modules())):
            yield Row(path, kind.__name__, None, huggingface.not_in_the_table(kind))
    for module in list(model.modules()):
        if id(module) not in packed and not packed.isdisjoint(map(id, module.modules())):
            if huggingface.has_code_of_a_user(type(module)):
                report.notes.append(
                    f"what the code of {type(module).__name__} reads of the stacks inside is 0 at padding"
                )
            for reader in huggingface.readers(module):
                report.notes.append(f"what {type(reader).__name__} reads of the stacks before it is 0 at padding")
            if (fast := huggingface.model_class(type(module))) is not None:
                _swap(report, module, fast)
                head: Any = huggingface.output_layer(module)
                if head is not None and fast._former.head.on_tokens and (made := tokens_head(type(head))):  # type: ignore[arg-type]
                    report._give_class(head, made)


def _is_alone(model: nn.Module) -> bool:
    """Return True for a model of transformers without a model inside and without a stack that can skip padding."""
    if any(map(_is_of_transformers, model.children())):
        return False
    return not any(huggingface.is_packed(type(module)) for module in model.modules())


def _swap(report: Report, module: nn.Module, fast: type[nn.Module]) -> None:
    report._give_class(module, fast)
    _change(report, module, WITHOUT_PADDING, report.padded_calls)


def _change(report: Report, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of a module; the report can undo the change."""
    report._changes.append(change := Attribute(module, name, value))
    change.apply()


def _is_stack(module: nn.Module) -> bool:
    """Return True for a stack of torch.nn, or for a hand-written stack or layer on the fused ops."""
    if isinstance(module, torch_stacks.TransformerEncoder | torch_stacks.TransformerDecoder):
        return True
    return (form := form_of(module)) is not None and form.padding is not None


def _note_code_between(model: nn.Module, path: str, report: Report) -> None:
    """Name the class whose own code stands between layers that skip padding one by one."""
    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        if isinstance(around, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        note = f"what the code of {type(around).__name__} reads between its layers is 0 at padding"
        if note not in report.notes:
            report.notes.append(note)
        return


def _own_row(path: str, module: nn.Module) -> Row:
    layers = layers_of(module)
    was = f"{len(layers)} {type(layers[0]).__name__}"
    if WITHOUT_PADDING in module.__dict__:
        return Row(path, was, None, ALREADY)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and not all(map(takes_packed, layers)):
        return Row(path, was, None, "a layer has a hook, or a part of another kind")
    reason = getattr(form_of(module), "padding", "")
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
            made = token_class(type(module), layer, parts_of(module))  # type: ignore[arg-type]
            report._give_class(module, made)
            _change(report, module, WITHOUT_PADDING, report.padded_calls)
    return Row(path, was, NOW if token_layer_of(modules[0]) is None else f"{NOW} (registered)")


def _unregistered(module: nn.Module, path: str, left_out: set[int]) -> Iterator[Row]:
    """Rows of the outermost lists of layers of one class, which nobody has registered, around fused attention."""
    if id(module) in left_out or _is_of_transformers(module) or token_layer_of(module) is not None:
        return
    kinds = {type(layer) for layer in module.children()}
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) == 1
    if any(id(layer) in left_out for layer in module.children()) and alike:
        return
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
    form = form_of(module)
    fused = type(module) is MultiheadAttention or (form is not None and form.attends)
    return fused or is_swapped(module)


def _is_of_transformers(module: nn.Module) -> bool:
    return hasattr(module, "config") and hasattr(module, "get_output_embeddings")


@functools.cache
def tokens_head(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Class for an output layer whose logits may be those of tokens; None for a class that is not linear, or one that
    this function has made."""
    if kind not in (nn.Linear, Linear, OutputLayer):
        return None
    made = registered_class(kind, (TokensHead, kind), (tokens_head,), _forward(kind.forward))
    made.skips_logits = kind is OutputLayer  # type: ignore[attr-defined]
    return made


def _forward(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return logits_of_tokens(plain(self, *args, **kwargs))

    return forward
