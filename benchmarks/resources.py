"""Resources that each config of the attention kernels takes on a multiprocessor, on three architectures, without a GPU.

    python -m benchmarks.resources --out benchmarks/results/static

Every config is compiled (tools/triton_kernels.py). The number of programs that fit on a multiprocessor follows from
registers, shared memory and warps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from tools.multiprocessors import MULTIPROCESSORS
from tools.triton_kernels import cases, compile_launch

RESULTS = Path(__file__).resolve().parent / "results" / "static"


def resources() -> Iterable[dict[str, object]]:
    """Return a row per config of every attention kernel and architecture."""
    for arch, launch in cases():
        if not launch.name.startswith("attention"):
            continue
        compiled = compile_launch(launch, arch)
        programs, share, scarce = MULTIPROCESSORS[arch].occupancy(compiled.registers, compiled.shared, compiled.warps)
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


def markdown(kernels: list[dict[str, object]]) -> str:
    """Return the record as a table."""
    text = "# Resources of the attention kernels\n\nMade by `python -m benchmarks.resources`. "
    text += "programs: how many fit on a multiprocessor; occupancy: the share of its warps they fill.\n\n"
    head = list(kernels[0])
    lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in kernels)]
    return text + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the record")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    kernels = sorted(resources(), key=lambda row: (row["kernel"], row["arch"]))
    (out / "resources.md").write_text(markdown(kernels))
    print(f"{len(kernels)} compilations in {out}")


if __name__ == "__main__":
    main()
