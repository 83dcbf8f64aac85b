"""Inputs and parameters of one call of an attention kernel, for the tests."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from transformer_fast.attention_params import AttentionParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WINDOWS = {
    "from below": (None, -7),
    "causal": (0, -40),
    "both sides": (5, -9),
    "one key a query": (0, 0),
    "ahead": (60, 20),
    "behind, first rows empty": (-12, -45),
    "last rows empty": (None, 60),
    "all rows empty": (3, 100),
    "bounds nothing": (None, -69),
}
"""(causal, window) for 70 queries and 100 keys."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers on the device, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def inputs(B: int, H: int, Hkv: int, Lq: int, Lk: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    shapes = [(B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)]
    return [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def call_of(mask: dict, D: int, **more: object) -> AttentionParams:
    """The parameters of a call, on the device; with a seed if there is dropout."""
    call = {"scale": D**-0.5} | mask | more
    if call.get("dropout_p", 0.0) > 0.0:
        call["seed"] = torch.tensor([-987654321987654321])
    return AttentionParams(**{name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in call.items()})


def window_call(name: str, D: int, mask: dict | None = None, **more: object) -> AttentionParams:
    """The parameters of a call with one of the WINDOWS."""
    causal, window = WINDOWS[name]
    return call_of({"causal": causal, "window": window} | (mask or {}), D, **more)


def reference_call(params: AttentionParams) -> dict[str, object]:
    """The same arguments as :func:`transformer_fast.reference.attention.attention` takes them, on CPU."""
    call = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    del call["packed"]
    call = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
    return call | {"empty_rows": "zero" if call.pop("zero_empty_rows") else "uniform"}
