"""Compiled launches of the attention benchmark's cases, and the work of each of their programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from attention_cases import Case

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.masks.tile_share import FULL, PARTIAL, tile_classes
from transformer_fast.triton.attention import backward, forward
from transformer_fast.triton.attention.kept_bits import empty_kept_bits
from transformer_fast.triton.attention.launches import call_kind
from transformer_fast.triton.configs import ATTENTION, LONG, AttentionConfig
from transformer_fast.triton.launcher import Launch, architecture_of

from .kernels import Steps, compiled
from .predictions import Launched
from .tensors import META, number, results, values

ARCHITECTURE = "sm90"
PRODUCTS = {"forward": 2, "grad_q": 3, "grad_kv": 4}
"""Matrix products of each kernel for a (query, key): q k^T and w v; in backward also do v^T and one sum or two more."""


def parameters(case: Case, packed: bool, device: str = META) -> AttentionParams:
    """Return the arguments of a case for the launchers."""
    params = AttentionParams(scale=case.D**-0.5)
    if case.dropout_p:
        params = replace(params, dropout_p=case.dropout_p, seed=number(7, device))
    if case.causal:
        params = replace(params, causal=case.causal_offset)
    if packed:
        lengths = case.query_lengths(), case.key_lengths()
        starts = (torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(device, torch.int32) for n in lengths)
        return replace(params, packed=PackedBatch(*starts, *(int(n.max()) for n in lengths)))
    if case.lengths != "full":
        params = replace(params, lengths=case.key_lengths().to(device))
    return params


def launches(case: Case, packed: bool, device: str = META) -> list[tuple[str, Launch]]:
    """(kernel, launch) of a case in order: forward; grad_q, grad_kv. On META they are those of an H100."""
    params, arch = (
        parameters(case, packed, device),
        ARCHITECTURE if device == META else architecture_of(torch.empty(0, device=device)),
    )
    if packed:
        of_queries, of_keys = ((int(n.sum()), case.H, case.D) for n in (case.query_lengths(), case.key_lengths()))
    else:
        of_queries, of_keys = ((case.B, n, case.H, case.D) for n in (case.queries, case.keys))

    def tensor(make: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        made = make(*shape, dtype=case.dtype, device=device)
        return made if packed else made.transpose(1, 2)

    q, k, v, out = (
        tensor(make, shape)
        for make, shape in ((values, of_queries), (values, of_keys), (values, of_keys), (results, of_queries))
    )
    rows = (case.H, of_queries[0]) if packed else (case.B, case.H, case.queries)
    logsumexp = results(*rows, dtype=torch.float32, device=device)
    kept_bits = empty_kept_bits(q, k, params, arch) if case.backward else None
    outputs = out, logsumexp, kept_bits
    found = [("forward", launch) for launch in forward.forward_launches((q, k, v), outputs, params, arch)]
    if case.backward:
        inputs = tensor(values, of_queries), q, k, v, out, logsumexp, None, kept_bits
        gradients = (tensor(results, shape) for shape in (of_queries, of_keys, of_keys))
        outputs = (*gradients, *backward.row_buffers(q, logsumexp, params))
        names = ("grad_q", "grad_kv")
        found += zip(names, backward.backward_launches(inputs, outputs, params, arch), strict=True)
    return found


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


@contextmanager
def tiles(case: Case, packed: bool, overrides: Mapping[str, AttentionConfig]) -> Iterator[None]:
    """Context with other tile-table entries for the kernels of a case, with and without kept dropout bits."""
    keys = {
        (kernel, ARCHITECTURE, case.dtype.itemsize * 8, max(32, case.D), kind): c
        for kernel, c in overrides.items()
        for kind in (call_kind(case.keys, parameters(case, packed)), "kept")
    }
    before = {key: ATTENTION[key] for key in keys if key in ATTENTION}  # dropout bits are kept for one head size
    ATTENTION.update({key: keys[key] for key in before})
    try:
        yield
    finally:
        ATTENTION.update(before)


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
