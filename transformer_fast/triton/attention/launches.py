"""Preparation of the kernel launches of an attention call."""

from collections.abc import Iterable

from torch import Tensor

from ...attention_params import AttentionParams
from ..configs import ATTENTION, LONG
from ..launcher import Launch, blocks_of
from .tile_map import NO_MAP, length_order, packed_order, tile_lists
from .tiles import mask_arguments, sequence_arguments, tensor_arguments, with_32_bit_offsets


def call_kind(keys: int, params: AttentionParams) -> str:
    """Name of the tile-table entry for a call."""
    if params.distance_bias is not None or params.softcap is not None:
        return "parts"
    if params.bias is not None:
        return "biased"
    if keys <= LONG:
        diagonal = params.window is not None or (params.causal is not None and params.causal < 0)
        diagonal = diagonal or (params.packed is not None and params.packed.bottom_right)
        if params.packed is not None and params.query_ids is None and not diagonal:
            return "packed"
        return "short mapped" if is_mapped(params) else "short"
    if params.query_ids is not None:
        return "documents"
    if is_mapped(params):
        return "mapped"
    if params.packed is not None:
        return "packed long"
    masked = params.lengths is not None or params.window is not None
    return "long" if masked or params.dropout_p > 0.0 else "plain"


def is_empty(q: Tensor, k: Tensor, params: AttentionParams) -> bool:
    """Return True if a call has no queries, no keys, or no sequence: nothing is launched."""
    return q.numel() == 0 or k.numel() == 0 or (params.packed is not None and len(params.packed.cu_seqlens_q) == 1)


def is_mapped(params: AttentionParams) -> bool:
    """Return True if a call steps through the lists of a tile map."""
    parts = (params.keep, params.key_keep, params.query_ids)
    return params.packed is None and any(part is not None for part in parts)


def order_arguments(
    q: Tensor, k: Tensor, tile: tuple[int, int], columns: bool, params: AttentionParams
) -> dict[str, object]:
    """Kernel arguments of the tile map; without a map, empty arguments and perhaps an order of batches.

    Args:
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        tile: queries and keys per tile.
        columns: True for kernels with one program per tile of keys, which steps through queries.
        params: as given to the launcher.
    """
    lengths, packed = params.lengths, params.packed
    B, _, queries, _ = q.shape
    keys = k.shape[2]
    # Short programs need no order.
    ordered = keys > LONG
    if is_mapped(params):
        return tile_lists(params, B, queries, keys, tile, columns=columns, ordered=ordered)
    if ordered and packed is not None:
        return NO_MAP | {"batch_order": packed_order(packed.cu_seqlens_q, packed.cu_seqlens_k)}
    if ordered and lengths is not None and lengths.dim() == 1:
        return NO_MAP | {"batch_order": length_order(lengths)}
    return NO_MAP


def score_kinds(params: AttentionParams) -> str:
    """Suffix of a launch's name: a letter per feature of the scores, besides a dense mask, that changes the kernel."""
    kinds = {"documents": params.query_ids, "by distance": params.distance_bias, "capped": params.softcap}
    kinds["sinks"] = params.sinks
    return "".join(f" {kind}" for kind, part in kinds.items() if part is not None)


def tile_launch(
    name: str, kernel, q: Tensor, k: Tensor, arch: str, tensors: dict[str, Tensor], rows: dict[str, Tensor | None],
    params: AttentionParams, stored: Tensor, dropout_bits: Tensor | None,
) -> Launch:  # fmt: skip
    """Launch of an attention kernel, with the tile from the table.

    Args:
        name: "forward", "grad_q" or "grad_kv"; "grad_kv" has one program per tile of keys.
        kernel: the jitted function.
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        arch: architecture class.
        tensors: (B, H, L, D) tensors by argument, q and k among them.
        rows: tensors with one number per row, or None, by argument; logsumexp among them.
        params: as given to the launcher.
        stored: the keys as given to the launcher.
        dropout_bits: see :mod:`.dropout_bits`.
    """
    arguments = mask_arguments(q, k, params) | tensor_arguments(**tensors)
    kind = call_kind(k.shape[2], params) if dropout_bits is None else "kept"
    config = ATTENTION[name, arch, q.element_size() * 8, arguments["BLOCK_D"], kind]
    tile = config.block_queries, config.block_keys
    kinds = {
        "mapped": is_mapped(params), "biased": params.bias is not None,
        "packed": params.packed is not None, "window": arguments["window"] is not None,
        "dropout": arguments["seed"] is not None, "kept": dropout_bits is not None,
    }  # fmt: skip
    over, block = (k, config.block_keys) if name == "grad_kv" else (q, config.block_queries)
    return Launch(
        f"attention {name} {str(q.dtype)[6:]} d{arguments['BLOCK_D']} {config.block_queries}x{config.block_keys}"
        f" {config.num_warps} warps {config.num_stages} stages"
        f"{'' if config.max_registers is None else f' {config.max_registers} registers'}"
        f"{''.join(f' {kind}' for kind, true in kinds.items() if true)}{score_kinds(params)}",
        kernel,
        blocks_of(over.shape[2], block) * over.shape[0] * over.shape[1],
        {
            **arguments, "dropout_bits": dropout_bits, **order_arguments(q, k, tile, name == "grad_kv", params), **rows,
            **sequence_arguments(params, rows["logsumexp"], stored),
            "BLOCK_QUERIES": config.block_queries, "BLOCK_KEYS": config.block_keys,
        },
        config.num_warps,
        config.num_stages,
        config.max_registers,
    )  # fmt: skip


MAP_TENSORS = frozenset(("keep", "key_keep", "tile_list", "tile_counts", "tile_order", "batch_order"))
"""Arguments that are derived from the contents of a mask or of lengths."""


def _as_rows(t: Tensor) -> Tensor:
    return with_32_bit_offsets(t if t.stride(-1) == 1 else t.contiguous())


def _packed_view(t: Tensor, batches: int, longest: int) -> Tensor:
    """View (T, H, D) as (B, H, longest, D) in which every batch entry is the whole tensor; the kernel adds the first
    row of a sequence."""
    return _as_rows(t.transpose(0, 1))[:, :longest].expand(batches, -1, -1, -1)


def kernel_views(
    params: AttentionParams, queries: Iterable[Tensor], keys: Iterable[Tensor], *, written: bool = False
) -> list[Tensor]:
    """Convert the tensors of a call to (B, H, L, D) for the kernels: tensors like q, then tensors like k.

    Args:
        params: as given to the launcher.
        queries, keys: (B, H, L, D), or of a packed batch (T, H, D).
        written: True if the kernels write to the tensors, which then must not be copied.
    """
    if params.packed is None:
        return [t if written else _as_rows(t) for t in (*queries, *keys)]
    packed, B = params.packed, params.packed.cu_seqlens_q.shape[0] - 1
    return [_packed_view(t, B, packed.max_seqlen_q) for t in queries] + [
        _packed_view(t, B, packed.max_seqlen_k) for t in keys
    ]
