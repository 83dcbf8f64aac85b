"""From an attention call to the launch of one of its kernels.

What depends on shapes, strides and options alone is worked out once and kept: most of a short call would be this.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..configs import LONG, AttentionConfig, attention_config
from ..launch_cache import run_again
from ..launcher import Launch, blocks_of
from .tile_map import NO_MAP, length_order, packed_order, tile_lists
from .tiles import bounded_offset, mask_arguments, padded_head_dim, tensor_arguments, within_reach


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the sequences of a packed batch lie.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), rising from 0: sequence b has the rows from entry b to entry b + 1.
        total_queries: rows of q in all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    total_queries: int


def call_kind(keys: int, mask: dict[str, object], packed: Packed | None) -> str:
    """Which entry of the tile table a call takes."""
    if mask["bias"] is not None:
        return "biased"
    if keys <= LONG:
        return "short"
    masked = any(mask[part] is not None for part in ("keep", "key_keep", "lengths", "seed")) or packed is not None
    return "long" if masked else "plain"


def order_arguments(
    q: Tensor, k: Tensor, tile: tuple[int, int], columns: bool, mask: dict[str, object], packed: Packed | None
) -> dict[str, object]:
    """The arguments that a tile map adds, or those that say that there is none, but perhaps an order of batches.

    Args:
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        tile: queries and keys a tile.
        columns: for a program a tile of keys, which steps through queries.
        mask, packed: as given to the launcher.
    """
    keep, key_keep, lengths, causal = mask["keep"], mask["key_keep"], mask["lengths"], mask["causal"]
    B, _, queries, _ = q.shape
    keys = k.shape[2]
    # Shorter programs end together in any order.
    ordered = keys > LONG
    if keep is not None or key_keep is not None:
        causal_offset = bounded_offset(causal, queries, keys)
        call = keep, key_keep, lengths, causal_offset, B, queries, keys, tile
        return tile_lists(*call, columns=columns, ordered=ordered).arguments
    if ordered and packed is not None:
        return NO_MAP | {"batch_order": packed_order(packed.cu_seqlens_q, packed.cu_seqlens_k)}
    if ordered and lengths is not None and lengths.dim() == 1:
        return NO_MAP | {"batch_order": length_order(lengths)}
    return NO_MAP


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a launch depends on shapes, strides and options alone, and so is the same from call to call."""

    name: str
    grid: int
    arguments: dict[str, object]


PLANS = 1024
"""Plans kept; beyond that all are made anew."""
_plans: dict[tuple, Plan] = {}


def planned(key: tuple, make: Callable[[], Plan]) -> Plan:
    """`make()`, or what it gave for this key before."""
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS:
            _plans.clear()
        plan = _plans[key] = make()
    return plan


def tile_launch(
    name: str, kernel, q: Tensor, k: Tensor, arch: str, tensors: dict[str, Tensor], rows: dict[str, Tensor | None],
    mask: dict[str, object], packed: Packed | None,
) -> Launch:  # fmt: skip
    """Launch of an attention kernel with its tile from the table.

    Args:
        name: "forward", "grad_q" or "grad_kv", which has a program a tile of keys.
        kernel: the jitted function.
        q, k: (B, H, Lq, D) and (B, Hkv, Lk, D).
        arch: architecture class.
        tensors: (B, H, L, D) tensors by argument, q and k among them.
        rows: tensors with a number a row, or None, by argument.
        mask, packed: as given to the launcher.
    """
    lengths = mask["lengths"]
    bias = None if mask["bias"] is None else within_reach(mask["bias"])
    seed = mask["seed"] if mask["dropout_p"] > 0.0 else None
    kind = call_kind(k.shape[2], mask, packed)
    config = attention_config(name, arch, q.element_size() * 8, padded_head_dim(q.shape[-1]), kind)
    key = (
        name, arch, config, q.dtype, q.shape, k.shape, *[t.stride() for t in tensors.values()],
        None if lengths is None else lengths.stride(), None if bias is None else (bias.shape, bias.stride()),
        mask["keep"] is None and mask["key_keep"] is None, seed is None, packed is None, mask["causal"], mask["scale"],
        mask["dropout_p"], mask["zero_empty_rows"],
    )  # fmt: skip
    plan = planned(key, lambda: _plan(name, q, k, config, tensors, mask | {"bias": bias}, packed))
    tile = config.block_queries, config.block_keys
    return Launch(
        plan.name,
        kernel,
        plan.grid,
        {
            **plan.arguments, **order_arguments(q, k, tile, name == "grad_kv", mask, packed), **tensors, **rows,
            "lengths": lengths, "bias": bias, "seed": seed,
            "cu_seqlens_q": None if packed is None else packed.cu_seqlens_q,
            "cu_seqlens_k": None if packed is None else packed.cu_seqlens_k,
            "total_queries": q.shape[2] if packed is None else packed.total_queries,
        },
        config.num_warps,
        config.num_stages,
        config.max_registers,
    )  # fmt: skip


def _plan(
    name: str, q: Tensor, k: Tensor, config: AttentionConfig, tensors: dict[str, Tensor], mask: dict[str, object],
    packed: Packed | None,
) -> Plan:  # fmt: skip
    arguments = mask_arguments(q, k, **mask) | tensor_arguments(**tensors)
    arguments |= {"BLOCK_QUERIES": config.block_queries, "BLOCK_KEYS": config.block_keys}
    kinds = {
        "mapped": mask["keep"] is not None or mask["key_keep"] is not None, "biased": mask["bias"] is not None,
        "packed": packed is not None, "dropout": arguments["seed"] is not None,
    }  # fmt: skip
    over, block = (k, config.block_keys) if name == "grad_kv" else (q, config.block_queries)
    return Plan(
        f"attention {name} {str(q.dtype)[6:]} d{arguments['BLOCK_D']} {config.block_queries}x{config.block_keys}"
        f" {config.num_warps} warps {config.num_stages} stages"
        f"{'' if config.max_registers is None else f' {config.max_registers} registers'}"
        f"{''.join(f' {kind}' for kind, true in kinds.items() if true)}",
        blocks_of(over.shape[2], block) * over.shape[0] * over.shape[1],
        {
            name: value for name, value in arguments.items()
            if not isinstance(value, Tensor) and name not in NO_MAP
        },
    )  # fmt: skip


PARTS = ("keep", "key_keep", "lengths", "bias", "seed")
MAP_TENSORS = frozenset(("keep", "key_keep", "tile_list", "tile_counts", "tile_order", "batch_order"))


def run_call(
    scalars: tuple, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...], keys: int,
    mask: dict[str, object], packed: Packed | None, prepare: Callable[..., list[Launch]],
) -> None:  # fmt: skip
    """Run the launches of an attention call, or those of an earlier call like it, with its pointers.

    Args:
        scalars: hashable, what tells this launcher and its own options apart.
        inputs, outputs: see :func:`..launch_cache.run_again`.
        keys: keys of the call, which decide whether there is an order to derive.
        mask, packed: as given to the launcher.
        prepare: the launches from (inputs, outputs, mask, packed).
    """
    keep, key_keep, lengths = mask["keep"], mask["key_keep"], mask["lengths"]
    sources: tuple[Tensor, ...] = ()
    if keep is not None or key_keep is not None:
        sources = tuple([t for t in (keep, key_keep, lengths) if t is not None])
    elif keys > LONG and packed is not None:
        sources = packed.cu_seqlens_k, packed.cu_seqlens_q
    elif keys > LONG and lengths is not None and lengths.dim() == 1:
        sources = (lengths,)
    places = () if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
    own, parts = len(inputs), len(inputs) + len(PARTS)

    def launches(*tensors: Tensor | None) -> list[Launch]:
        rest = tensors[parts + len(places) :]
        where = None if packed is None else Packed(*tensors[parts : parts + 2], packed.total_queries)
        return prepare(tensors[:own], rest, mask | dict(zip(PARTS, tensors[own:parts], strict=True)), where)

    options = mask["causal"], mask["scale"], mask["dropout_p"], mask["zero_empty_rows"]
    inputs = (*inputs, *[mask[part] for part in PARTS], *places)
    run_again((*scalars, *options), inputs, outputs, launches, sources, MAP_TENSORS)


def packed_view(t: Tensor, batches: int, longest: int) -> Tensor:
    """(T, H, D) as a (B, H, longest, D) of which every batch is the whole: a sequence's first row is added in the
    kernel."""
    return within_reach(t.transpose(0, 1))[:, :longest].expand(batches, -1, -1, -1)


def packed_mask(
    causal: bool, scale: float, dropout_p: float, seed: Tensor | None, zero_empty_rows: bool
) -> dict[str, object]:
    """The mask keywords of a packed call."""
    return dict.fromkeys(("keep", "key_keep", "lengths", "bias")) | {
        "causal": 0 if causal else None, "scale": scale, "dropout_p": dropout_p, "seed": seed,
        "zero_empty_rows": zero_empty_rows,
    }  # fmt: skip
