"""Tile tables: tile sizes, warps and pipeline stages per kernel.

The tables are fixed, so that no call waits for tuning and a new length does not compile. Assign to an entry to override
it, e.g. ``configs.ATTENTION["forward", "sm90", 16, 64, "long"] = AttentionConfig(128, 128, 8, 2)``.
"""

from __future__ import annotations

from dataclasses import dataclass

ARCHITECTURES = {"sm80": 80, "sm90": 90, "sm100": 100}
"""Architecture classes, with the compute capability that each class is tuned and checked for."""

LONG = 512
"""Sequences of more keys than this use the "long" entry of a table."""


class Table(dict):
    """Tile table. Assigning to an entry drops the launches that were prepared with the old entry."""

    changes = 0

    def __setitem__(self, key, value) -> None:
        Table.changes += 1
        super().__setitem__(key, value)

    def __delitem__(self, key) -> None:
        Table.changes += 1
        super().__delitem__(key)


def architecture(capability: tuple[int, int]) -> str:
    """The architecture class of a CUDA compute capability.

    Consumer parts (8.6, 8.9, 12.x) have 99 KB of shared memory and no newer matrix unit that Triton uses well:
    they take the sm80 entries, which are kept below 99 KB for d <= 128.
    """
    return {9: "sm90", 10: "sm100"}.get(capability[0], "sm80")


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of one attention kernel.

    Args:
        block_queries: query rows per tile, a power of two of at least 16.
        block_keys: keys per tile, a power of two of at least 32 (the dropout contract draws 32 keys at a time).
        num_warps: warps per program.
        num_stages: depth of the software pipeline over the inner loop.
        max_registers: limit of registers per thread, so that more programs share a multiprocessor; or None.
    """

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# AttentionConfig by kernel, architecture class and padded head size, one per entry of TILES. No entry spills in its
# loop over tiles, with Triton 3.6 to 3.9 (benchmarks/results/static/spills.md), with dropout, a tile map or lengths,
# packed or not. Choice among those:
# "short" has small tiles, because the part of the last tile past a sentence is waste. The other entries have large
# tiles, which read keys and values less often. Among tiles of one size, the one with more warps at
# once is taken. On sm_80 a warp has its own 16 rows only if the tile has at least as many rows as head
# dimensions.
# On sm_90: the fastest tile in a replay of the machine code, with two or more programs per multiprocessor, so that one
# computes while another waits. "long" and "plain" keep 128 queries per tile if that is nearly as fast, because a replay
# does not model the speed of the L2 cache. With heads of 64, 8 warps and 128 registers, those spill in the loop from
# Triton 3.8 on; 64 queries with 4 warps and 168 registers took 3 % longer in the forward on an H200, and no longer in
# the gradient of q. Packed and short, 128 registers spill in the loop with 3.8. With 2 stages and no limit nothing
# spills; that was 6 % faster on the padded batch.
_TILES_16_BIT = {
    "forward": {
        "sm80": {
            32: ((64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            64: ((64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
            128: ((64, 32, 4, 2), (128, 32, 8, 2), (128, 32, 8, 2), (32, 32, 8, 2)),
        },
        "sm90": {
            32: ((64, 32, 4, 2, 128), (64, 64, 8, 2, 128), (128, 64, 8, 3, 128), (64, 32, 4, 2)),
            64: ((64, 32, 4, 3, 128), (64, 64, 4, 3, 168), (128, 64, 8, 3, 128), (64, 64, 8, 2)),
            128: ((64, 32, 4, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        },
        "sm100": {
            32: ((64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            64: ((64, 32, 4, 2, 168), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            128: ((64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        },
    },
    "grad_q": {
        "sm80": {
            32: ((64, 32, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            64: ((64, 32, 4, 2), (128, 32, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            128: ((64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 2)),
        },
        "sm90": {
            32: ((64, 32, 4, 2, 128), (64, 64, 8, 2, 128), (128, 64, 8, 2, 128), (64, 32, 4, 2)),
            64: ((64, 32, 4, 3, 128), (128, 32, 8, 3, 128), (64, 64, 4, 3, 168), (64, 32, 4, 2)),
            128: ((64, 32, 4, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        },
        "sm100": {
            32: ((64, 32, 4, 2), (64, 64, 8, 2, 128), (128, 64, 8, 2), (64, 32, 4, 2)),
            64: ((64, 32, 4, 2, 168), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
            128: ((64, 32, 4, 1), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        },
    },
    "grad_kv": {
        "sm80": {
            32: ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 1)),
            64: ((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 2), (64, 32, 8, 2)),
            128: ((64, 32, 8, 1), (64, 32, 8, 1), (64, 32, 8, 1), (32, 32, 8, 2)),
        },
        "sm90": {
            32: ((64, 64, 8, 1, 128), (64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 1)),
            64: ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (64, 32, 4, 1)),
            128: ((64, 64, 8, 3), (64, 64, 8, 3), (64, 64, 8, 3), (64, 32, 8, 1)),
        },
        "sm100": {
            32: ((64, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 1)),
            64: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
            128: ((32, 32, 4, 2), (32, 32, 4, 2), (64, 64, 8, 1), (64, 32, 8, 1)),
        },
    },
}

# By kernel, architecture class, padded head size and kind of call: exceptions for calls that would spill in the tiles
# above (documents or a tile map in "long" or "short", other parts in "biased"). With a limit of 255 registers the
# compiler does not spill to fit two programs.
_TILES_OF_PARTS = {
    ("forward", "sm80", 64, "parts"): (64, 32, 8, 2),
    ("forward", "sm80", 128, "documents"): (32, 32, 8, 2),
    ("forward", "sm90", 64, "short mapped"): (64, 32, 4, 3, 168),
    ("forward", "sm90", 64, "documents"): (128, 64, 8, 2),
    ("forward", "sm90", 128, "documents"): (128, 32, 8, 2),
    ("grad_q", "sm80", 32, "parts"): (64, 32, 4, 2, 255),
    ("grad_q", "sm80", 64, "parts"): (32, 32, 8, 2, 255),
    ("grad_kv", "sm80", 64, "documents"): (64, 32, 8, 2),
    ("grad_kv", "sm80", 64, "parts"): (32, 32, 8, 2, 255),
    ("grad_kv", "sm80", 128, "parts"): (32, 32, 8, 2, 255),
    ("grad_q", "sm90", 32, "documents"): (64, 64, 8, 2),
    ("grad_q", "sm90", 64, "documents"): (128, 64, 8, 2),
    ("grad_q", "sm90", 64, "short mapped"): (64, 32, 4, 3, 168),
    ("grad_q", "sm90", 64, "packed"): (64, 32, 4, 2),
    ("grad_q", "sm90", 64, "parts"): (64, 32, 8, 2),
    ("grad_kv", "sm90", 64, "documents"): (64, 128, 8, 2),
    ("grad_kv", "sm90", 64, "packed long"): (64, 128, 8, 2),
    ("grad_kv", "sm90", 128, "documents"): (64, 64, 8, 2),
    ("grad_q", "sm90", 128, "documents"): (64, 64, 8, 2),
    ("grad_q", "sm100", 32, "documents"): (64, 64, 8, 2),
    ("grad_q", "sm100", 32, "biased"): (64, 32, 4, 2, 255),
    ("grad_q", "sm100", 32, "parts"): (64, 32, 4, 2, 255),
    ("grad_q", "sm100", 64, "parts"): (64, 32, 8, 2, 255),
    ("grad_kv", "sm100", 32, "parts"): (64, 32, 8, 1),
    ("grad_kv", "sm100", 64, "parts"): (32, 32, 8, 2, 255),
    ("grad_kv", "sm100", 128, "parts"): (32, 32, 8, 2, 255),
}

# For fp32, on all architectures: exact fp32 products run outside the matrix units and hold whole rows in registers.
_TILES_32_BIT = {32: (32, 32, 8, 1), 64: (32, 32, 8, 1), 128: (16, 32, 16, 1), 256: (16, 32, 16, 1)}


# By kernel and architecture class, for head size 64: tiles for a "long" forward that keeps dropout bits for the
# backward (see DROPOUT_BITS). For other head sizes, keeping the bits is no faster than drawing again.
_TILES_OF_DROPOUT_BITS = {
    "forward": {"sm80": (128, 64, 8, 2), "sm90": (64, 64, 4, 3, 168), "sm100": (128, 64, 8, 2)},
    "grad_q": {"sm80": (128, 64, 8, 2), "sm90": (64, 64, 4, 3, 168), "sm100": (128, 64, 8, 2)},
    "grad_kv": {"sm80": (64, 64, 4, 1), "sm90": (64, 64, 4, 3), "sm100": (64, 64, 8, 2)},
}

ATTENTION_KERNELS = "forward", "grad_q", "grad_kv"
TILES = "short", "long", "plain", "biased"
"""Names of the four tiles per kernel, architecture class and head size in the tables above."""

TILE_OF_KIND = {
    "short": "short",  # up to LONG keys
    "long": "long",  # more
    "plain": "plain",  # more, without a mask (except causal), dropout and packing
    "biased": "biased",  # with a bias
    "documents": "long",  # with documents, and more than LONG keys
    "parts": "biased",  # with a bias by distance or capped scores
    "packed": "short",  # a packed batch, up to LONG keys, without documents or a diagonal that leaves a query no key
    "short mapped": "short",  # with a tile map, up to LONG keys
    "mapped": "long",  # with a tile map, without documents, and more than LONG keys
    "packed long": "long",  # a packed batch without documents, and more than LONG keys
}
"""Tile per kind of attention call, unless _TILES_OF_PARTS has an entry."""
ATTENTION_KINDS = tuple(TILE_OF_KIND)


def _attention_table() -> dict[tuple[str, str, int, int, str], AttentionConfig]:
    """Make the table: (kernel, architecture class, bits of the type, padded head size, one of ATTENTION_KINDS or
    "kept") -> config."""
    table = {}
    for kernel, architectures in _TILES_16_BIT.items():
        for arch, sizes in architectures.items():
            for d, tiles in sizes.items():
                named = dict(zip(TILES, tiles, strict=True))
                for kind, tile in TILE_OF_KIND.items():
                    tile = _TILES_OF_PARTS.get((kernel, arch, d, kind), named[tile])
                    table[kernel, arch, 16, d, kind] = AttentionConfig(*tile)
            for kind in ATTENTION_KINDS:
                table[kernel, arch, 16, 256, kind] = AttentionConfig(64, 32, 8, 1)
                for d, tile in _TILES_32_BIT.items():
                    table[kernel, arch, 32, d, kind] = AttentionConfig(*tile)
            table[kernel, arch, 16, 64, "kept"] = AttentionConfig(*_TILES_OF_DROPOUT_BITS[kernel][arch])
    return table


ATTENTION = Table(_attention_table())


DROPOUT_BITS = Table({"share": 1.0})
"""Memory that the attention forward may use to keep dropout bits for the backward, as a share of the memory of q, k, v
and the output. 0 keeps nothing. ``math.inf`` keeps the bits of all supported calls: padded or packed, 16-bit, head
size 64, more than LONG keys, without windows, documents, dense masks and biases. A weight takes one bit, so 4,096 keys
reach 1.0; the ends of tiles may take a quarter more. Without kept bits, each kernel draws the same mask again."""


@dataclass(frozen=True)
class NormConfig:
    """Tile of one norm kernel.

    Args:
        block_rows, block_columns: tile, powers of two; at least 8 columns (the dropout contract draws 8 at a time).
        num_warps: warps per program.
        num_stages: depth of the software pipeline over the rows or columns.
        programs_per_multiprocessor: number of programs that share the rows of the backward; each has fp32 partial sums.
        most_blocks: maximum number of column blocks per program of the backward, for wide rows.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_stages: int = 1
    programs_per_multiprocessor: int = 4
    most_blocks: int = 1


def _norm_table() -> dict[tuple[str, int], NormConfig]:
    """Make the table (kernel, padded width) -> config; width 0 is for any width, in blocks of columns. For "sum" the
    key is the number of partial sums instead of the width.

    The forward has about 16 elements per thread: enough 128-bit loads in flight, and few enough registers for several
    programs. The backward has 8, because it keeps two sums per pair of elements; from 4096 columns on it has 16,
    because more warps would all wait for one row. The sum of partials takes one step if possible, because each step
    waits for memory.
    """
    table = {
        ("forward", 0): NormConfig(1, 4096, 8),
        ("backward", 0): NormConfig(1, 4096, 16, 3, 1, 4),
        ("sum", 0): NormConfig(1024, 8, 8),
        ("sum", 512): NormConfig(512, 8, 4),
    }
    for columns in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        table["forward", columns] = NormConfig(max(1, 2048 // columns), columns, max(4, columns // 512))
    for columns, warps, programs in ((1024, 4, 6), (2048, 8, 3), (4096, 8, 2), (8192, 16, 1)):
        table["backward", columns] = NormConfig(1, columns, warps, 1, programs)
    for columns in (64, 128, 256, 512):
        table["backward", columns] = NormConfig(1024 // columns, columns, 4, 1, 6)
    for programs in (64, 128, 256):
        table["sum", programs] = NormConfig(256, 8, 2)
    return table


NORM = Table(_norm_table())


def norm_config(kernel: str, d: int) -> NormConfig:
    """The config of a norm kernel ("forward", "backward") for rows of d columns, or ("sum") for d partial sums."""
    columns = max(64, 1 << (d - 1).bit_length())
    return NORM.get((kernel, columns)) or NORM[kernel, 0]


EMBEDDING_GRADIENT = "sorted"
"""Method by which CUDA sums the gradient of an embedding. "sorted" gives the same bits on every run, even for frequent
ids. "atomic" takes one pass without a sort; the order of additions varies. ``torch.use_deterministic_algorithms(True)``
always selects "sorted"."""


@dataclass(frozen=True)
class DropoutConfig:
    """Tile of a dropout kernel: block_columns at least 8 (the contract draws 8 at a time); 16 elements per thread.

    For the gradient of a bias, at most ``programs_per_multiprocessor`` programs share the rows, with fp32 partial sums.
    """

    block_rows: int
    block_columns: int
    num_warps: int = 4
    num_stages: int = 1
    programs_per_multiprocessor: int = 8


DROPOUT = Table({64: DropoutConfig(32, 64), 512: DropoutConfig(4, 512), 2048: DropoutConfig(1, 2048)})
"""Tile by maximum row width. Wider rows are cut into blocks of the last tile's columns."""


def dropout_config(d: int) -> DropoutConfig:
    """The config of the dropout kernels for rows of d columns."""
    return next((config for widest, config in DROPOUT.items() if d <= widest), DROPOUT[2048])


@dataclass(frozen=True)
class CrossEntropyConfig:
    """Tile of the cross-entropy kernel: columns of a row at a time, about 8 elements per thread."""

    block_columns: int
    num_warps: int
    num_stages: int = 1


CROSS_ENTROPY = {1024: CrossEntropyConfig(1024, 4), 65536: CrossEntropyConfig(4096, 8)}
"""Tile by maximum vocabulary. Larger vocabularies take the last tile."""
