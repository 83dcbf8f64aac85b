"""Compiled launches of the attention benchmark's cases, and the work of each of their programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.attention_cases import Case
from benchmarks.attention_launches import launches
from transformer_fast.masks.tile_share import FULL, PARTIAL, tile_classes
from transformer_fast.triton.configs import LONG

from .kernels import Steps, compiled
from .predictions import Launched

PRODUCTS = {"forward": 2, "grad_q": 3, "grad_kv": 4}
"""Matrix products of each kernel for a (query, key): q k^T and w v; in backward also do v^T and one sum or two more."""


def works(case: Case, kernel: str, tile: tuple[int, int], packed: bool) -> tuple[Steps, ...]:
    """Work per program of "forward", "grad_q" or "grad_kv", in the order in which programs start."""
    own = case.query_lengths(), case.key_lengths()
    over_keys = kernel == "grad_kv"
    longest = (own[1] if packed else torch.tensor([case.keys])) if over_keys else own[0] if packed else None
    rows = int(longest.max()) if longest is not None else case.queries
    blocks = -(-rows // tile[1 if over_keys else 0])
    if packed:
        of_batch = [
            _steps(_classes(1, m, n, tile, None, case.causal), over_keys)[0]
            for m, n in zip(*map(torch.Tensor.tolist, own), strict=True)
        ]
        weight = own[0].long() * own[1]
    else:
        lengths = own[1] if case.lengths != "full" else None
        of_batch = _steps(_classes(case.B, case.queries, case.keys, tile, lengths, case.causal), over_keys)
        weight = own[1].long()
    order = range(case.B)
    if int(own[1].max() if packed else case.keys) > LONG and (packed or case.lengths != "full"):
        order = torch.sort(weight, descending=True, stable=True).indices.tolist()
    found: list[Steps] = []
    for batch in order:
        steps = of_batch[batch] if over_keys else of_batch[batch][::-1]
        found += (steps + [Steps(0, 0, exits=True)] * (blocks - len(steps))) * case.H
    return tuple(found)


def _classes(B: int, m: int, n: int, tile: tuple[int, int], lengths: torch.Tensor | None, causal: bool) -> torch.Tensor:
    offset = n - m if causal else None
    return tile_classes(B, m, n, tile, lengths=lengths, causal=offset)[:, 0]


def _steps(classes: torch.Tensor, over_keys: bool) -> list[list[Steps]]:
    """Yield the steps of every batch, for each of its tiles of queries or of keys."""
    across = 1 if over_keys else 2
    full, masked = ((classes == kind).sum(across).tolist() for kind in (FULL, PARTIAL))
    return [[Steps(f, m) for f, m in zip(*rows, strict=True)] for rows in zip(full, masked, strict=True)]


def moved(case: Case, kernel: str, packed: bool) -> int:
    """Bytes that a kernel reads and writes at least once. Keys past a length are not read, their gradients written."""
    real_keys = int(case.key_lengths().sum())
    queries, keys = (
        (int(case.query_lengths().sum()), real_keys) if packed else (case.B * case.queries, case.B * case.keys)
    )
    rows = {
        "forward": 2 * queries + 2 * real_keys,  # q, out; k, v
        "grad_q": 4 * queries + 2 * real_keys,  # q and its gradient, out and its; k, v
        "grad_kv": 2 * queries + 2 * real_keys + 2 * keys,  # q, the gradient of out; k, v and theirs
    }[kernel]
    statistics = {"forward": 1, "grad_q": 2, "grad_kv": 2}[kernel] * queries
    return case.H * (rows * case.D * case.dtype.itemsize + 4 * statistics)


def launched(case: Case, packed: bool = False) -> Iterator[Launched]:
    """The launches of a case, compiled by the tile table, with their programs."""
    pairs = case.useful_pairs() if packed else case.pairs()
    for kernel, launch in launches(case, packed):
        own = works(case, kernel, (launch.arguments["BLOCK_QUERIES"], launch.arguments["BLOCK_KEYS"]), packed)
        if len(own) != launch.grid:
            raise RuntimeError(f"{case}: {kernel} has {launch.grid} programs, and the model {len(own)}")
        operations = 2.0 * PRODUCTS[kernel] * pairs * case.H * case.D
        bits = 0 if launch.arguments["kept_bits"] is None else pairs * case.H // 8
        yield Launched(compiled(launch), own, moved(case, kernel, packed) + bits, operations)
