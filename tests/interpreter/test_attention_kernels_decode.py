"""tests/ops/test_attention_kernels_decode.py on the Triton kernel; also caches in any number of parts."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_kernels import TRITON, cached, distances
from test_attention_kernels_decode import *  # noqa: F403
from test_attention_kernels_decode import documents

import transformer_fast as tfast
from transformer_fast.triton.attention import decode as module

pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered"),
    pytest.mark.cover("values"),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """On CPU, use tiles of 16 rows and 16 keys and few programs, so that small caches have several parts.

    Each test divides its calls anew: another's division of the same sizes, by other numbers, is forgotten.
    """
    module.division.cache_clear()
    if device.type == "cpu":
        monkeypatch.setattr(module, "TILES", dict.fromkeys(module.TILES, (16, 16, 4, 1)))
        monkeypatch.setattr(module, "PROGRAMS", 16)
        monkeypatch.setattr(module, "REDUCED_AT_ONCE", 2)
    yield
    module.division.cache_clear()


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("kind", ["plain", "window", "all parts"])
def test_any_number_of_parts(kind, programs, dtype, monkeypatch):
    """Some parts hold only tiles of other documents; a single part is written directly, several are joined."""
    monkeypatch.setattr(module, "PROGRAMS", programs)
    lengths = [130, 64, 0]
    q, *cache = cached(TRITON, 4, 2, 2, 130, 16, lengths, dtype)
    ids = {name: t.to(TRITON.device) for name, t in documents(lengths, 130, 2).items()}
    parts = {"causal": 1, "window": -30, "distance_bias": distances(TRITON, (1, 4), 130, 2), "softcap": 3.0, **ids}
    TRITON.check_decode(q, *cache, **{"plain": {}, "window": {"window": -20}, "all parts": parts}[kind])


@pytest.mark.parametrize("programs", [1, 1000])
def test_a_sink_is_one_more_key_without_a_value(programs, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", programs)
    q, k, v, lengths = cached(TRITON, 4, 2, 2, 130, 16, [130, 77])
    sinks, found = torch.linspace(-1, 3, 4, device=TRITON.device), []
    for name in ("triton", "reference"):
        with tfast.backend(name):
            found.append(tfast.attention_decode(q, k, v, lengths, sinks=sinks))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("programs", [1, 1000])
def test_what_lies_before_the_tile_of_the_first_visible_key_is_not_read(programs, monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", programs)
    q, k, v, lengths = cached(TRITON, 4, 2, 2, 130, 16, [130, 77], torch.float16)
    run = functools.partial(TRITON.decode, q, k, v, lengths, window=-20)
    clean = run()["out"]
    for b, length in enumerate(lengths.tolist()):
        first = (length - 2 - 20) // 16 * 16
        k[b, :, :first] = v[b, :, :first] = torch.nan
    assert torch.equal(run()["out"], clean)
