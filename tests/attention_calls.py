"""Inputs and keyword arguments of one call of an attention kernel, for the tests."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers on the device, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def inputs(B: int, H: int, Hkv: int, Lq: int, Lk: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    shapes = [(B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D), (B, H, Lq, D)]
    return [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def call_of(mask: dict, D: int, **more: object) -> dict[str, object]:
    """Every keyword argument of the launchers, on the device."""
    call = dict.fromkeys(("keep", "key_keep", "lengths", "bias", "causal", "seed"))
    call |= {"scale": D**-0.5, "dropout_p": 0.0, "zero_empty_rows": False} | mask | more
    if call["dropout_p"] > 0.0:
        call["seed"] = torch.tensor([-987654321987654321])
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in call.items()}


def reference_call(call: dict[str, object]) -> dict[str, object]:
    """The same arguments as :func:`transformer_fast.reference.attention.attention` takes them, on CPU."""
    call = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items()}
    return call | {"empty_rows": "zero" if call.pop("zero_empty_rows") else "uniform"}
