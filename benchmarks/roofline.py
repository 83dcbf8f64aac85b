"""What is known of the attention kernels without a GPU: a table of resources, and the least time each case could take.

    python benchmarks/roofline.py --out benchmarks/results/static

Every config is compiled for three architectures (tools/triton_kernels.py), and how many programs fit on a
multiprocessor follows from its registers, shared memory and warps. For every case of attention_cases.py the tiles that
hold work are counted, and so the operations and bytes; the floor is what an H100 needs for them at the rates published
for it: a copy at 3.0 TB/s, a bf16 matmul at 798 TFLOP/s, fp32 outside the tensor cores at 67 TFLOP/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parent / place) for place in (".", "..", "../tools"))

import torch
from attention_cases import CUDA, Case
from triton_kernels import Compiled, cases, compile_launch

from transformer_fast.attention_params import AttentionParams, PackedBatch
from transformer_fast.tile_share import WorkShare, packed_work_share, work_share
from transformer_fast.triton.attention.launches import call_kind
from transformer_fast.triton.configs import attention_config

RESULTS = Path(__file__).resolve().parent / "results" / "static"
COPY = 3.0e12
MATMUL = {torch.bfloat16: 798e12, torch.float16: 798e12, torch.float32: 67e12}
PRODUCTS = {"forward": 2, "grad_q": 3, "grad_kv": 4}
"""Matrix products of each kernel for one tile: q k^T and w v; for grad_q also do v^T; for grad_kv two sums more."""


@dataclasses.dataclass(frozen=True)
class Multiprocessor:
    """What programs share on one multiprocessor (CUDA programming guide, table of limits by compute capability)."""

    shared: int
    warps: int = 64
    registers: int = 65536
    programs: int = 32

    def occupancy(self, compiled: Compiled) -> tuple[int, float, str]:
        """(programs that fit, share of the warps they fill, what there is too little of for one more)."""
        a_warp = -(-compiled.registers * 32 // 256) * 256  # registers are given out 256 to a warp
        a_program = -(-(compiled.shared + 1024) // 128) * 128  # 1 KB is the system's own, in every program
        fits = {
            "registers": self.registers // (a_warp * compiled.warps),
            "shared memory": self.shared // a_program,
            "warps": self.warps // compiled.warps,
            "programs": self.programs,
        }
        scarce = min(fits, key=fits.get)
        return fits[scarce], fits[scarce] * compiled.warps / self.warps, scarce


MULTIPROCESSORS = {80: Multiprocessor(164 * 1024), 90: Multiprocessor(228 * 1024), 100: Multiprocessor(228 * 1024)}


def resources() -> Iterable[dict[str, object]]:
    """A row for every config of every attention kernel on every architecture."""
    for arch, launch in cases():
        if not launch.name.startswith("attention"):
            continue
        compiled = compile_launch(launch, arch)
        programs, share, scarce = MULTIPROCESSORS[arch].occupancy(compiled)
        yield {
            "arch": f"sm_{arch}",
            "kernel": compiled.name.removeprefix("attention "),
            "registers": compiled.registers,
            "spilled": compiled.spill_bytes,
            "shared": compiled.shared,
            "warps": compiled.warps,
            "programs": programs,
            "occupancy": round(share, 3),
            "limited by": scarce,
            "wgmma": compiled.wgmma,
        }


def estimates(arch: str = "sm90") -> Iterable[dict[str, object]]:
    """Two rows for every benchmark case: padded, and (where there is padding) packed."""
    for case in CUDA:
        yield estimate(case, arch, packed=False)
        if case.lengths != "full":
            yield estimate(case, arch, packed=True)


def estimate(case: Case, arch: str, packed: bool) -> dict[str, object]:
    queries, keys = case.query_lengths(), case.key_lengths()
    masked = case.lengths != "full"
    params = AttentionParams(lengths=keys if masked and not packed else None, dropout_p=case.dropout_p)
    if packed:
        params = dataclasses.replace(params, packed=PackedBatch(queries, keys, case.queries, case.keys))
    kind = call_kind(case.keys, params)
    operations, shares, tiles = 0, {}, {}
    for kernel in ("forward", "grad_q", "grad_kv") if case.backward else ("forward",):
        config = attention_config(kernel, arch, case.dtype.itemsize * 8, max(32, case.D), kind)
        tile = (config.block_queries, config.block_keys)
        found = count(case, tile, packed)
        tiles[kernel], shares[kernel] = "x".join(map(str, tile)), round(found.share, 3)
        operations += (found.full + found.partial) * tile[0] * tile[1] * 2 * case.D * PRODUCTS[kernel] * case.H
    rows = (int(queries.sum()), int(keys.sum())) if packed else (case.B * case.queries, case.B * case.keys)
    useful = case.operations(case.useful_pairs() if packed else case.pairs())
    moved = case.bytes_moved(*rows)
    memory, matrix = moved / COPY, MATMUL[case.dtype]
    return {
        "case": f"{case}{' packed' if packed else ''}",
        "tiles": tiles,
        "tiles kept": shares,
        "bytes": moved,
        "operations needed": useful,
        "operations in tiles": operations,
        "floor": max(memory, useful / matrix),
        "floor in tiles": max(memory, operations / matrix),
        "bound by": "memory" if memory > operations / matrix else "matrix products",
    }


def count(case: Case, tile: tuple[int, int], packed: bool) -> WorkShare:
    if packed:
        return packed_work_share(case.query_lengths(), case.key_lengths(), tile, causal=case.causal)
    lengths = case.key_lengths() if case.lengths != "full" else None
    return work_share(case.B, case.queries, case.keys, tile, lengths=lengths, causal=case.causal_offset)


def markdown(kernels: list[dict[str, object]], floors: list[dict[str, object]]) -> str:
    text = "# Attention without a GPU\n\nMade by `python benchmarks/roofline.py`, which says what the columns mean.\n\n"
    text += "## The least an H100 needs\n\nTiles are those of sm_90; kept: the share of them that holds work. "
    text += "The floor in tiles counts whole tiles, the other floor single pairs.\n\n"
    head = ["case", "tile", "kept", "MB", "GFLOP needed", "in tiles", "floor us", "in tiles us", "bound by"]
    text += table(head, (floor_cells(row) for row in floors))
    text += (
        "\n## Resources\n\nprograms: how many fit on a multiprocessor; occupancy: the share of its warps they fill.\n\n"
    )
    head = list(kernels[0])
    text += table(head, ([str(row[key]) for key in head] for row in kernels))
    return text


def floor_cells(row: dict[str, object]) -> list[str]:
    return [
        row["case"],
        " / ".join(dict.fromkeys(row["tiles"].values())),
        " / ".join(dict.fromkeys(f"{share:.1%}" for share in row["tiles kept"].values())),
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['operations needed'] / 1e9:.1f}",
        f"{row['operations in tiles'] / 1e9:.1f}",
        f"{row['floor'] * 1e6:.1f}",
        f"{row['floor in tiles'] * 1e6:.1f}",
        row["bound by"],
    ]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    floors = list(estimates())
    kernels = sorted(resources(), key=lambda row: (row["kernel"], row["arch"]))
    record = {"cases": floors, "kernels": kernels}
    (out / "attention.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "attention.md").write_text(markdown(kernels, floors))
    print(f"{len(kernels)} compilations, {len(floors)} estimates in {out}")


if __name__ == "__main__":
    main()
