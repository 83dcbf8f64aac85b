"""Launches of the Triton kernels for the cases of attention_cases.py, without contents or on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.attention_cases import Case
from benchmarks.launch_tensors import META, number, results, values
from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.triton.attention import backward, forward
from transformer_fast.triton.attention.dropout_bits import empty_dropout_bits
from transformer_fast.triton.attention.launches import call_kind
from transformer_fast.triton.configs import ATTENTION, AttentionConfig
from transformer_fast.triton.launcher import Launch, architecture_of

ARCHITECTURE = "sm90"


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
    dropout_bits = empty_dropout_bits(q, k, params, arch) if case.backward else None
    outputs = out, logsumexp, dropout_bits
    found = [("forward", launch) for launch in forward.forward_launches((q, k, v), outputs, params, arch)]
    if case.backward:
        inputs = tensor(values, of_queries), q, k, v, out, logsumexp, None, dropout_bits
        gradients = (tensor(results, shape) for shape in (of_queries, of_keys, of_keys))
        outputs = (*gradients, None, None, *backward.row_buffers(q, logsumexp, params))
        names = ("grad_q", "grad_kv")
        found += zip(names, backward.backward_launches(inputs, outputs, params, arch), strict=True)
    return found


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
