"""Fill Triton's cache for an H100 on a machine without a GPU: what a run there launches is compiled here.

    python -m tools.stand_in_gpu                              # all parts, with the Triton of this environment
    python -m tools.stand_in_gpu smoke large --shard 0/2      # every second piece of two parts

Tensors on the CPU count as tensors of an H100. Triton compiles each kernel and its launcher and starts it on a stub of
the driver, which does nothing. The cache's key has no path, no machine and no GPU in it, so a GPU machine with the same
version of Triton and the same sources finds the kernels compiled. The folder of the cache must have the same absolute
path there. The last line counts kernels that were in the cache and kernels that were compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.quick import ROOT
from benchmarks.quick.record import CACHE, Kernels

STUB = Path(tempfile.gettempdir()) / "transformer_fast-stub"
MULTIPROCESSORS = 132
USED = "used.txt"
"""File in the cache that names the entries which were looked up."""
FUNCTIONS = (
    "cuInit", "cuLaunchKernelEx", "cuLaunchKernel", "cuGetErrorString", "cuPointerGetAttribute",
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute",
    "cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute",
    "cuFuncSetCacheConfig", "cuCtxSetLimit", "cuCtxGetLimit", "cuTensorMapEncodeTiled",
    "cuOccupancyMaxActiveClusters",
)  # fmt: skip
"""Functions of the driver that Triton's launchers are linked with."""

Piece = Callable[[], object]


def make_stub() -> None:
    """Compile a driver whose functions return 0, and load it for the launchers."""
    library = STUB / "libcuda.so.1"
    if not library.exists():
        STUB.mkdir(parents=True, exist_ok=True)
        source = STUB / f"stub{os.getpid()}.c"
        source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
        made = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", made, source]
        subprocess.run(command, check=True)
        made.replace(library)  # whole, whichever of several processes is first
    os.environ["TRITON_LIBCUDA_PATH"] = str(STUB)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def install() -> Kernels:
    """Make Triton and the package take this machine for one with an H100; return the counts of kernels."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE))
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    make_stub()
    from triton.backends.nvidia import driver as nvidia

    from benchmarks import host_cost

    note_used_entries()
    nvidia.CudaUtils()  # its module belongs into the cache
    host_cost.pretend_to_have_a_gpu(nvidia.CudaLauncher)
    import transformer_fast.triton.launcher as launcher  # before the kernels' modules import its names

    launcher.architecture_of = lambda _: "sm90"
    launcher.multiprocessors_of = lambda _: MULTIPROCESSORS
    return Kernels().listen()


def note_used_entries() -> None:
    """Append the folder of each entry of the cache that this process looks up to a file in the cache."""
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    used, start = Path(knobs.cache.dir) / USED, FileCacheManager.__init__
    used.parent.mkdir(parents=True, exist_ok=True)

    def noting(self: FileCacheManager, key: str, *args: Any, **kwargs: Any) -> None:
        with used.open("a") as file:
            file.write(f"{key}\n")
        start(self, key, *args, **kwargs)

    FileCacheManager.__init__ = noting


def smoke() -> Iterator[Piece]:
    """Pieces of the parity table: the smoke is part of it."""
    import torch

    from benchmarks.quick.parity import DTYPES, dropout_rows
    from transformer_fast.cli import verification
    from transformer_fast.ops.registry import op_cases

    device = torch.device("cpu")
    for dtype in DTYPES:
        for case in op_cases(device):
            yield lambda case=case, dtype=dtype: _rows(verification.check_case(case, device, dtype))
        yield lambda dtype=dtype: _rows(verification.check_transformer(device, dtype))
    yield lambda: _rows(dropout_rows(device))


def large() -> Iterator[Piece]:
    """Pieces of the parity's large cases."""
    import torch

    from benchmarks.quick.parity import DTYPES, large_cases
    from transformer_fast.cli import verification

    device = torch.device("cpu")
    for dtype in DTYPES:
        for case in large_cases(device):
            yield lambda case=case, dtype=dtype: _rows(verification.check_case(case, device, dtype))


def _rows(rows: Iterator) -> None:
    for row in rows:
        if row.note:
            print(f"FAILS {str(row)[:70]} {row.note[:300]}", flush=True)


def headline() -> Iterator[Piece]:
    """Our calls in the headline's cases; attention with a small batch, which changes no kernel."""
    import bench_attention
    import bench_cross_entropy
    import bench_norm
    import torch

    from benchmarks.quick.headline import cases

    def versus(make_inputs: Callable, calls: dict[str, Callable], **_: object) -> None:
        inputs = make_inputs()
        for name in ("ours", "ours packed"):
            if name in calls:
                calls[name](inputs)

    def attention(versus: Callable, on: str, device: str, case: Any) -> None:
        setting = bench_attention.Setting(replace(case, B=min(case.B, 4)), "cpu")
        versus(setting.make_inputs, setting.calls())

    def loss(versus: Callable, on: str, device: str, shape: tuple[int, int, int], backward: bool) -> None:
        bench_cross_entropy_run(versus, on, device, (64, *shape[1:]), backward)

    def run(case: Callable) -> None:
        with (
            mock.patch.object(bench_attention, "test_attention", attention),
            mock.patch.object(bench_cross_entropy, "test_linear_cross_entropy", loss),
            mock.patch.dict(bench_norm.DTYPES, cpu=torch.bfloat16),
        ):
            case(versus, "cpu", False)

    bench_cross_entropy_run = bench_cross_entropy.test_linear_cross_entropy
    for name, case in cases().items():
        if not name.startswith("embed"):  # by the CUDA extension
            yield partial(run, case)


def step() -> Iterator[Piece]:
    """A step of our ways of the whole models, at their widths, with a small batch."""
    import torch

    from benchmarks.quick import step as quick

    def run(what: str, way: str) -> None:
        base, bert = quick.BASE["cuda"], quick.BERT["cuda"]
        small = {"BASE": {"cpu": (*base[:4], 4, *base[5:])}, "BERT": {"cpu": (*bert[:4], 4, bert[5])}}
        with mock.patch.multiple(quick, **small):
            model, loss_of, *_ = quick.MODELS[what](way, "cpu")
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of()
        loss.backward()

    for what, ways in quick.WAYS.items():
        for way in ways:
            if way in ("ours", "ours packed"):
                yield partial(run, what, way)


def tiles() -> Iterator[Piece]:
    """Tiles of the comparison, launched as there, with a small batch. Tiles that it refuses are left out."""
    import torch
    from triton.runtime.errors import OutOfResources

    from benchmarks.quick.tiles import CASES, candidates, launches_of, on_meta, run, with_tensors
    from transformer_fast.triton.configs import ATTENTION_KERNELS

    def launch(case: Any, packed: bool, kernel: str, config: object) -> None:
        given = dict(launches_of(case, packed, "cpu"))[kernel]
        with suppress(ValueError, OutOfResources):
            run([with_tensors(on_meta(case, packed, kernel, config), given)], torch.empty(0))

    for case, packed in CASES.values():
        for kernel in ATTENTION_KERNELS if case.backward else ("forward",):
            for config in (None, *candidates(kernel)):
                yield partial(launch, replace(case, B=4), packed, kernel, config)


PARTS = {part.__name__: part for part in (smoke, large, headline, step, tiles)}
"""In order of worth."""


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th piece from the i-th on (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="share the pieces among so many processes")
    options = parser.parse_args(given)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.processes:
        command = [sys.executable, "-m", "tools.stand_in_gpu", *options.parts]
        shares = [f"{number}/{options.processes}" for number in range(options.processes)]
        running = [subprocess.Popen([*command, "--shard", share], cwd=ROOT) for share in shares]
        codes = [process.wait() for process in running]
        return int(any(codes))
    shard, shards = map(int, options.shard.split("/"))
    kernels = install()
    import transformer_fast as tfast

    failed = 0
    with tfast.backend("triton"):
        for name in options.parts or PARTS:
            start = time.monotonic()
            for number, piece in enumerate(PARTS[name]()):
                if number % shards == shard:
                    try:
                        piece()
                    except Exception as error:
                        failed += 1
                        print(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", flush=True)
            print(f"{name}: {time.monotonic() - start:.0f} s, {kernels}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
