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
from .swapped import WAY, is_swapped, registered_class
from .token_layer import TokenLayer, parts_of, skips_padding, token_class, token_layer_of

NOW = "without padding"


def pack(model: nn.Module, report: Report, is_ours: Callable[[nn.Module], bool]) -> None:
    """Let the stacks of a model skip padding. The report gets a row per stack, and a note per stack or list of layers
    that keeps its padding. ``is_ours(module)``: the attention of transformers runs on our kernels."""
    report.packed = report.padded_calls.warns = True
    rows: list[Row] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        if type(module) is nn.Transformer and "forward" not in module.__dict__:
            report._give_class(module, torch_stacks.Transformer)
        elif _is_stack(module):
            inside.update(map(id, module.modules()))
            rows.append(_pack_stack(report, path, module))
            if rows[-1].now and not isinstance(module, Transformer) and layers_of(module) == [module]:
                _note_code_between(model, path, report)
    itself = token_layer_of(model)
    registered = _token_layers(model, "", inside) if itself is None else [("", [(model, itself)])]
    rows += [_pack_registered(report, path, layers) for path, layers in list(registered)]
    unregistered = list(_unregistered(model, "", inside))
    rows += _of_transformers(model, report, is_ours)
    if rows:
        rows += unregistered
        report.rows += rows
        kept = {row.path: (row.was, row.why) for row in rows if row.why not in ("", ALREADY)}
    elif report.attention:
        kept = _lists_around(model, report.attention, {row.path: row.why for row in unregistered})
    else:
        kept = {}
        report.notes.append("packed: padding stays: no attention was found by its class or name")
    report.notes += [
        f"packed: padding stays in {path or 'the model'} ({was}): {why}" for path, (was, why) in kept.items()
    ]


def _row(path: str, was: str, why: str = "", now: str = NOW) -> Row:
    """Row of layers that skip padding, or keep it for a reason."""
    return Row(path, was, None if why else now, why, is_stack=True)


def _is_stack(module: nn.Module) -> bool:
    """Return True for a model of this package, a stack of torch.nn, or a swapped hand-written stack or layer."""
    if isinstance(module, Transformer | torch_stacks.TransformerEncoder | torch_stacks.TransformerDecoder):
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


def _pack_stack(report: Report, path: str, module: nn.Module) -> Row:
    if isinstance(module, Transformer):
        row = _row(path, type(module).__name__, ALREADY if module.packed else "")
        if row.now:
            report._apply(Attribute(module, "packed", True))
        return row
    layers = layers_of(module)
    if WITHOUT_PADDING in module.__dict__:
        why = ALREADY
    elif isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and not all(map(takes_packed, layers)):
        why = "a layer has a hook, or a part of another kind"
    else:
        why = getattr(form_of(module), "padding", "")
    row = _row(path, f"{len(layers)} {type(layers[0]).__name__}", why)
    if row.now:
        report._apply(Attribute(module, WITHOUT_PADDING, report.padded_calls))
    return row


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
            yield _row(path, kind.__name__, ALREADY)
        elif (fast := huggingface.packed_class(kind)) is not None:
            if not issubclass(fast, huggingface.Stack):  # a table of positions, or a module around a stack
                _swap(report, module, fast)
            elif id(module) in unknown:
                yield _row(path, kind.__name__, unknown[id(module)])
            elif not any(map(is_ours, module.modules())):
                yield _row(path, kind.__name__, "its attention is not fused")
            else:
                packed.add(id(module))
                _swap(report, module, fast)
                yield _row(path, kind.__name__)
        elif _is_of_transformers(module) and _is_alone(module) and any(map(is_ours, module.modules())):
            yield _row(path, kind.__name__, huggingface.not_in_the_table(kind))
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
    report._apply(Attribute(module, WITHOUT_PADDING, report.padded_calls))


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
            batch_first = child.self_attn.batch_first
            layer = TokenLayer("src_key_padding_mask", "blocked", batch_first, reads=frozenset({1}), redirects=False)
        if layer is not None:
            found.setdefault(type(child), []).append((child, layer))
        else:
            yield from _token_layers(child, f"{path}.{name}" if path else name, left_out)
    for layers in found.values():
        yield path, layers


def _pack_registered(report: Report, path: str, layers: list[tuple[nn.Module, TokenLayer]]) -> Row:
    modules = [module for module, _ in layers]
    was = f"{len(layers)} {type(modules[0]).__name__}"
    if all(map(skips_padding, modules)):
        return _row(path, was, ALREADY)
    if any("forward" in vars(module) for module in modules):
        return _row(path, was, "its forward was replaced")
    for module, layer in layers:
        if not skips_padding(module):
            _swap(report, module, token_class(type(module), layer, parts_of(module)))  # type: ignore[arg-type]
    return _row(path, was, now=NOW if token_layer_of(modules[0]) is None else f"{NOW} (registered)")


def _layers_in(module: nn.Module) -> list[nn.Module]:
    """Layers of a list whose layers have one class; [] for any other module."""
    layers = list(module.children())
    alike = isinstance(module, nn.ModuleList | nn.Sequential) and len({type(layer) for layer in layers}) == 1
    return layers if alike else []


def _unregistered(module: nn.Module, path: str, left_out: set[int]) -> Iterator[Row]:
    """Rows of the outermost lists of layers of one class, which nobody has registered, around fused attention."""
    if id(module) in left_out or _is_of_transformers(module) or token_layer_of(module) is not None:
        return
    layers = _layers_in(module)
    if any(id(layer) in left_out for layer in layers):
        return
    if layers and all(any(map(_is_fused_attention, layer.modules())) for layer in layers):
        kind = type(layers[0])
        why = f"tfast.register({kind.__name__}, mask=..., tokens=True, check=...) lets them skip padding"
        if kind.__module__.startswith(("torch.", "transformer_fast.")):
            why = "a list of these layers keeps its padding, a stack does not"
        if not any(skips_padding(layer) or token_layer_of(layer) is not None for layer in layers):
            yield _row(path, f"{len(layers)} {kind.__name__}", why)
        return
    for name, child in module.named_children():
        yield from _unregistered(child, f"{path}.{name}" if path else name, left_out)


def _lists_around(model: nn.Module, attention: list[Row], advice: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Names of layers, and the reason to keep their padding, by path: the outermost lists of layers around attention,
    or attention itself. ``advice`` says what to do about some lists."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, tuple[str, str]] = {}
    for row in attention:
        names = row.path.split(".")
        parents = (".".join(names[:count]) for count in range(len(names)))
        path = next((parent for parent in parents if len(_layers_in(modules[parent])) > 1), row.path)
        layers = _layers_in(modules[path]) or [modules[path]]
        kind = type(layers[0]).__name__
        if row.now in (None, WAY):
            why = f"the attention of {row.was} is {'not fused' if row.now is None else 'its own code'}"
        else:
            why = advice.get(path) or f"no list of layers is around it, and {kind} may read padding"
        if row.now is None or path not in found:
            found[path] = f"{len(layers)} {kind}", why
    return found


def _is_fused_attention(module: nn.Module) -> bool:
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
