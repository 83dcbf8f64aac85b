"""Obstacles to quantised or kept weights, and encoders with such weights; see `GenerationConfig`."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from .. import extension
from ..ops.weight_layout import AS_IT_IS, WeightLayout
from .forms import Form
from .weights import prepack


def apply(form: Form, layout: WeightLayout) -> Form:
    """Return the form with its encoder's weights quantised or kept, if the encoder is one of `transformer_fast`;
    else the form itself. The decoder's weights and those of `out` are prepared in `CachedDecoding`.

    Raises:
        ValueError: if quantising is not possible; the message has the reason.
    """
    if layout == AS_IT_IS:
        return form
    reason = obstacle(form.model)
    if reason is not None and layout.quantize is not None:
        raise ValueError(f"quantize={layout.quantize!r} is not possible: {reason}")
    if reason is not None or not form.has_own_encoder():
        return form
    model = copy.copy(form.model)
    encoder: Any = form.model.encoder
    model.__dict__["_modules"] = {**form.model._modules, "encoder": prepack(encoder, 0, layout)}
    return dataclasses.replace(form, model=model)


def obstacle(model: nn.Module) -> str | None:
    """Reason why a model's weights can be neither quantised nor kept in a layout for steps, or None."""
    given = next(((p.device.type, p.dtype) for p in model.parameters()), ("cpu", torch.float32))
    if given != ("cpu", torch.float32):
        return f"it needs fp32 weights on a CPU, got {given[1]} on {given[0]}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on, which chooses another dtype"
    return extension.obstacle() or None
