"""Trial of a transformers layer: compare its results on packed tokens and on padded rows."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ...integrations.lazy_mask import LazyMask
from ...integrations.transformers import mask_dtype
from ...integrations.unpadded import Unpadded
from ...layers.padded_calls import GAPS, PaddedCalls
from ...masks import AttentionMask
from ..probe import first_line, no_hooks
from .classes import packed_class, positional_names
from .layer import LAYER, MASK, MEMORY, MEMORY_MASK, POSITIONS

ROWS = ("xxxxxx", "xxx...", "..xxx.", "xx.xx.")
"""Tokens and padding of the trial batch."""
_LENGTH = len(ROWS[0])


@dataclasses.dataclass
class Stack:
    """Layers of transformers that run in sequence.

    Attributes:
        path: path of the list of layers in the model.
        layers: the layers, in order.
        model: the transformers model around the layers.
        owner: module that holds the list.
        obstacle: reason why the layers keep the padding, or "".
    """

    path: str
    layers: list[nn.Module]
    model: nn.Module
    owner: nn.Module
    obstacle: str = ""


def judge(stack: Stack) -> None:
    """Set the obstacle of a stack: compare its layers with and without padding on random input."""
    seen: set[Any] = set()
    for layer in stack.layers:
        kind = shapes_of(layer)
        if kind not in seen and not stack.obstacle:
            stack.obstacle = _layer_obstacle(layer, stack)
        seen.add(kind)


def shapes_of(layer: nn.Module) -> Any:
    """Class and shapes of a layer; one trial stands for all layers that share them."""
    return type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _layer_obstacle(layer: nn.Module, stack: Stack) -> str:
    """Reason why a layer cannot run on packed tokens, or ""."""
    name, names = type(layer).__name__, positional_names(type(layer).forward)
    if not names or MASK not in names:
        return f"{name}.forward has no argument {MASK}"
    try:
        trial, given = copy_of(layer).eval(), _arguments(layer, stack, names)
        dtype = mask_dtype(stack.model.config, given[names[0]].dtype)
        for rows in (ROWS[:-1], ROWS):
            if reason := _difference_on_packed(trial, given, names, rows, dtype):
                return f"{name}: {reason}"
    except Exception as error:
        return f"a trial call of {name} failed: {first_line(error)}"
    return ""


def _difference_on_packed(
    trial: nn.Module, given: dict[str, Any], names: tuple[str, ...], rows: tuple[str, ...], dtype: torch.dtype
) -> str:
    """Compare a layer with and without padding on the first rows of its arguments."""
    count, calls = len(rows), PaddedCalls()
    kind: type[nn.Module] = type(trial)
    if "packed_part" in vars(kind):  # a layer that is tried again
        kind = trial.__class__ = kind.former  # type: ignore[attr-defined]
    cut = {name: value[:count] if isinstance(value, Tensor) else value for name, value in given.items()}
    keep = keep_of(given[names[0]].device, rows)
    with torch.no_grad():
        expected = first(trial(**_masked(cut, keep, dtype, None)))
        trial.__class__ = packed_class(kind, LAYER)
        try:
            actual = first(trial(**_masked(cut, keep, dtype, Unpadded(calls))))
        finally:
            trial.__class__ = kind
    if calls.reasons:
        (reason,) = calls.reasons
        return "" if reason == GAPS else reason
    same = not bool(actual[~keep].any()) and close(actual[keep], expected[keep])
    return "" if same else "its output for a token depends on padding"


def _arguments(layer: nn.Module, stack: Stack, names: tuple[str, ...]) -> dict[str, Any]:
    """Random arguments of a layer, without masks."""
    parameter = next(p for p in layer.parameters() if p.is_floating_point())
    width = stack.model.config.hidden_size
    options: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
    generator = torch.Generator(parameter.device).manual_seed(0)
    hidden = torch.randn(len(ROWS), _LENGTH, width, generator=generator, **options)
    given: dict[str, Any] = {names[0]: hidden}
    if POSITIONS[0] in names or POSITIONS[1] in names:
        positions = torch.arange(_LENGTH, device=parameter.device)[None]
        given[POSITIONS[0]] = positions
        if POSITIONS[1] in names and (rotary := getattr(stack.owner, "rotary_emb", None)) is not None:
            kinds = [kind for kind in (getattr(layer, "attention_type", None),) if kind is not None]
            more = kinds if "layer_type" in positional_names(type(rotary).forward) else []
            given[POSITIONS[1]] = rotary(hidden, positions, *more)
    if MEMORY in names and any("cross" in n.lower() or "enc" in n.lower() for n, _ in layer.named_modules()):
        given[MEMORY] = torch.randn(len(ROWS), _LENGTH, width, generator=generator, **options)
    return given


def _masked(given: dict[str, Any], keep: Tensor, dtype: torch.dtype, call: Unpadded | None) -> dict[str, Any]:
    """Return the arguments with masks: padding (True in `keep`) and look-ahead, of the call if one is given."""
    padding = AttentionMask.keep(keep[:, None, None])
    masks = {MASK: padding & AttentionMask.causal()}
    if MEMORY in given:
        masks[MEMORY_MASK] = padding
    made = dict(given)
    for name, mask in masks.items():
        made[name] = LazyMask(mask, (len(keep), 1, _LENGTH, _LENGTH), keep.device, dtype)
        made[name].call = call
    return made


def keep_of(device: torch.device, rows: tuple[str, ...] = ROWS) -> Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows], device=device)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def close(actual: Tensor, expected: Tensor) -> bool:
    narrow = actual.dtype in (torch.float16, torch.bfloat16)
    tolerance = (5e-2 if narrow else 1e-4) * expected.abs().max()
    return bool(((actual - expected).abs() <= tolerance).all())


def copy_of(layer: nn.Module) -> nn.Module:
    """Copy of a layer without hooks, sharing parameters and buffers."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        memo |= no_hooks(module)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                memo[id(tensor)] = tensor
    return copy.deepcopy(layer, memo)
