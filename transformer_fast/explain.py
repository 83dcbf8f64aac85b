"""``explain``: backend, mask and share of work of an attention call on this machine, as text."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backends, extension
from .attention_params import AttentionParams
from .masks import AttentionMask, and_causal, as_attention_mask
from .masks.arguments import parts_beside
from .masks.parts import of_queries
from .ops.attention import attention, padded_params
from .ops.attention_call import check_head_dim, differentiates_weights
from .ops.attention_checks import refuse_keep_as_lengths
from .ops.unknown_names import known_names, unknown_names
from .triton.configs import ATTENTION
from .triton.versions import limits

NATIVE_TILE = (64, 128)
"""Queries and keys per tile in csrc/cpu/attention/attention_params.h."""

EMPTY, PARTIAL, FULL = 0, 1, 2
"""Classes of a tile: no pair (query, key) is allowed, some pairs, all pairs."""

_PATHS = {
    "native": "the C++ kernel of the extension (scores of one tile at a time; nothing of size Lq x Lk is stored)",
    "triton": "the fused Triton kernel (forward, and backward from the stored logsumexp)",
    "reference": "the eager reference (scores and weights are materialised)",
}


def explain(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask | Tensor | None = None, **options: Any) -> str:
    """Describe which kernels ``attention(q, k, v, mask, **options)`` would use here, and why; attention is not
    computed.

    Args:
        q, k, v, mask, options: as for :func:`transformer_fast.attention`.

    Returns:
        A few lines of text.

    Raises:
        BackendError, TypeError, ValueError: as ``attention`` itself: if the requested backend cannot run the call, or
            an option is none of its arguments.

    Example:
        >>> q = torch.zeros(2, 4, 10, 64)
        >>> print(tfast.explain(q, q, q, tfast.AttentionMask.lengths(torch.tensor([10, 7]))))
        attention (2, 4, 10, 64) x (2, 4, 10, 64) torch.float32 on cpu
        ...
        mask: lengths(int64 (2,))
        ...
    """
    known = known_names(attention)
    if unknown := [name for name in options if name not in known]:
        raise unknown_names(attention, unknown, "explain")
    mask = as_attention_mask(mask)
    if options.get("bias") is not None:
        mask = mask & AttentionMask.bias(options["bias"])
    backend, reason = backends.choose("attention", q.device, q.dtype)
    refuse_keep_as_lengths(mask, k.shape[2])
    causal = and_causal(mask.causal_offset, options.get("causal", False))
    p, sinks = options.get("dropout_p", 0.0), options.get("sinks")
    if by_reference := differentiates_weights(q, k, mask, sinks, options.get("return_weights", False)):
        chosen = backends.for_gradient_of_weights("attention", backend)
        reason = f"the gradient of the weights: {extension.module_obstacle()}" if chosen != backend else reason
        backend = chosen
    check_head_dim("attention", backend, q, v)
    lines = [
        f"attention {tuple(q.shape)} x {tuple(k.shape)} {q.dtype} on {q.device}",
        f"backend: {backend}, {_PATHS[backend]}",
        f"why: {reason}",
        f"mask: {replace(mask, causal_offset=causal) if causal is not None or parts_beside(mask) else 'none'}",
    ]
    if options.get("softcap") is not None:
        lines.append(f"softcap: {options['softcap']}, applied to the scores before any bias")
    if sinks is not None:
        lines.append(f"sinks: {tuple(sinks.shape)}, one extra key without a value per head")
    if backend != "reference" and by_reference:
        lines.append("weights: computed apart; their gradient is computed by the eager reference")
    stored = 0
    if backend != "reference" and q.numel() > 0 and k.shape[2] > 0:
        call: dict[str, Any] = {"causal": causal, "dropout_p": p, "softcap": options.get("softcap"), "sinks": sinks}
        params = padded_params(q, k, mask, scale=options.get("scale"), seed=None, **call)
        if mask.has_ranges:
            lines.append(f"intervals and unions: {_describe_read(mask, params)}")
        lines.append(_describe_tiles(q, k, replace(mask, causal_offset=causal), params, backend))
        stored = _bytes_for_backward(q, k, params) if backend == "triton" else 0
    if backend == "triton" and (lacking := limits(version := metadata.version("triton"))):
        lines.append(f"triton: {version}; {lacking}")
    if p > 0.0:
        kept = f"training stores one bit per weight, {stored / 2**20:,.1f} MiB" if stored else "no mask is stored"
        lines.append(f"dropout: {p} on the weights, drawn from one seed (Philox 4x32-10); {kept}")
    return "\n".join(lines)


def tile_classes(
    mask: AttentionMask, B: int, Lq: int, Lk: int, tile: tuple[int, int], device: torch.device | None = None
) -> Tensor:
    """Class of each tile by the definition of the mask, biases left out: int8 (B, H|1, query tiles, key tiles).

    One row of tiles is evaluated at a time, each pair of query and key once per batch entry and head with its own mask.

    Args:
        mask: the mask; its tensors are on one device.
        B, Lq, Lk: batch size, queries, keys; at least one of each.
        tile: queries and keys per tile.
        device: device of the result, for a mask without tensors.
    """
    queries, keys = tile
    device = next((t.device for t in mask.tensors().values()), device)
    rows = []
    for first in range(0, Lq, queries):
        end = min(first + queries, Lq)
        allowed = of_queries(mask, first, end).visible(end - first, Lk, device)
        seen = allowed.view(torch.uint8)  # any and all of bools take PyTorch many times as long
        some, every = (F.pad(t, (0, -Lk % keys)).unflatten(2, (-1, keys)) for t in (seen.amax(2), seen.amin(2)))
        rows.append((some.amax(3) + every.amin(3)).to(torch.int8))
    return torch.stack(rows, 2).expand(B, -1, -1, -1)


def _describe_tiles(q: Tensor, k: Tensor, mask: AttentionMask, params: AttentionParams, backend: str) -> str:
    """Text on the forward tiles that hold work. Reads the mask; on a GPU this waits for the device."""
    (B, _, Lq, _), Lk = q.shape, k.shape[2]
    tile = NATIVE_TILE
    if backend == "triton":
        from .triton.attention.launches import call_kind
        from .triton.attention.tiles import padded_head_dim
        from .triton.launcher import architecture_of

        kind = call_kind(Lk, params)
        config = ATTENTION["forward", architecture_of(q), q.element_size() * 8, padded_head_dim(q.shape[-1]), kind]
        tile = config.block_queries, config.block_keys
    classes = tile_classes(mask, B, Lq, Lk, tile, q.device)
    full, partial, tiles = int((classes == FULL).sum()), int((classes == PARTIAL).sum()), classes.numel()
    return (
        f"work: {(full + partial) / max(tiles, 1):.1%} of {tiles} tiles of {tile[0]} queries x {tile[1]} keys are "
        f"computed ({full} full, {partial} partly masked)"
    )


def _bytes_for_backward(q: Tensor, k: Tensor, params: AttentionParams) -> int:
    """Bytes of dropout that the forward of the Triton kernels stores in training."""
    from .triton.attention.dropout_bits import empty_dropout_bits
    from .triton.launcher import architecture_of

    bits = empty_dropout_bits(q.to("meta"), k.to("meta"), params, architecture_of(q))
    return 0 if bits is None else bits.nbytes


def _describe_read(mask: AttentionMask, params: AttentionParams) -> str:
    """Text on what the kernels read for intervals and unions."""
    lengths, keep = params.lengths, params.keep
    read = ["lengths per query"] if lengths is not None and lengths.dim() == 2 else []
    if keep is not None and keep is not mask.keep_mask:
        read.append(f"a keep mask {tuple(keep.shape)} of {keep.nbytes / 2**20:,.1f} MiB")
    return f"read as {' and '.join(read)}" if read else "all keys"
