"""Fixtures of the tests of the Triton attention kernels, in the interpreter or on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from attention_kernels import TRITON, Kernels

import transformer_fast as tfast
from transformer_fast.triton import configs
from transformer_fast.triton.attention import (
    backward_kv,
    backward_q,
    forward,
    grad_bias,
    grad_distance_bias,
)


@pytest.fixture
def kernels() -> Kernels:
    """The Triton kernels."""
    return TRITON


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Parametrize with every dtype of the Triton kernels. In the interpreter the launchers read bf16 as fp32, and
    round."""
    return request.param


@pytest.fixture(
    params=[torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])], ids=str
)
def dtype_of_rows(request: pytest.FixtureRequest) -> torch.dtype:
    """Parametrize with every dtype of the norm and dropout kernels that the interpreter can compute in."""
    return request.param


@pytest.fixture
def on_triton() -> Iterator[None]:
    with tfast.backend("triton"):
        yield


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Use tiles of 32 x 32 and few programs on CPU, so that small shapes have several of both."""
    if device.type != "cpu":
        return
    for key in configs.ATTENTION:
        monkeypatch.setitem(configs.ATTENTION, key, configs.AttentionConfig(32, 32, 4, 1))
    for module in (grad_bias, grad_distance_bias):
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, (32, 32, 4)))
        monkeypatch.setattr(module, "PROGRAMS", 12)


@pytest.fixture(params=[32, 64])
def tiles_of_distances(
    monkeypatch: pytest.MonkeyPatch, small_tiles: None, request: pytest.FixtureRequest, device: torch.device
) -> None:
    """Parametrize with both tile shapes of the distance-bias gradient, on CPU."""
    if device.type == "cpu":
        tiles = dict.fromkeys(grad_distance_bias.TILES, (request.param, 32, 4))
        monkeypatch.setattr(grad_distance_bias, "TILES", tiles)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Counter:
    """Count the tiles that kernels load: by kernel ("out", "q" and "kv") and rows of the tile."""
    if device.type != "cpu":
        pytest.skip("loads are watched in the interpreter")
    counts: Counter = Counter()
    for name, module in (("out", forward), ("q", backward_q), ("kv", backward_kv)):

        def load_rows(base, start, end, stride, ROWS, *more, original=module.load_rows, name=name):
            counts[name, int(getattr(ROWS, "value", ROWS))] += 1
            return original(base, start, end, stride, ROWS, *more)

        monkeypatch.setattr(module, "load_rows", load_rows)
    return counts
