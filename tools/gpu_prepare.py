"""``make gpu-prepare``: compile here, without a GPU, what a GPU machine that is there for minutes takes along.

An environment with that machine's versions builds the extension for sm_90 in place, and tools/stand_in_gpu.py fills
Triton's cache for an H100. The results are ``.gpu/cache.tgz`` and the libraries in transformer_fast/, all ignored by
git: copy them with the tree. nvcc is needed, and some 20 minutes of two cores. The commands to run there are printed
last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from tools.cuda_check import cuda_home, environment
from tools.stand_in_gpu import CACHE, ROOT, USED

PACKAGES = ("torch==2.11.0", "triton==3.6.0", "numpy==2.5.*", "setuptools", "ninja", "pytest", "pytest-benchmark",
            "pytest-xdist", "hypothesis", "transformers==5.17.0", "matplotlib", "safetensors", "sacrebleu",
            "sentencepiece", "tqdm")  # fmt: skip
"""Versions of the GPU machine; the Python of the environment must be that machine's too (3.12)."""
ARCHIVE = ROOT / ".gpu" / "cache.tgz"
COMMANDS = """\
python3 benchmarks/gpu.py --cache .gpu/cache.tgz --archive build/results.tgz --budget 330
python3 benchmarks/gpu.py --cache .gpu/cache.tgz --archive build/results.tgz --budget 420 --resume"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-gpu", help="environment (default: .venv-gpu)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: one per core)")
    options = parser.parse_args()
    start = time.monotonic()
    python = environment(options.venv, PACKAGES, "the GPU machine's packages")
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "CUDA_HOME": str(cuda_home()), "TRANSFORMER_FAST_CUDA": "1",
                 "TORCH_CUDA_ARCH_LIST": "9.0", "TRANSFORMER_FAST_CPU_SETS": "baseline"}  # fmt: skip
    subprocess.run([python, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=variables, check=True)
    command = [python, "-m", "tools.stand_in_gpu", "--processes", str(options.processes)]
    variables |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(CACHE)}
    (CACHE / USED).unlink(missing_ok=True)
    compiled = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    ARCHIVE.parent.mkdir(exist_ok=True)
    pack(CACHE, ARCHIVE)
    libraries = sorted(path.name for path in (ROOT / "transformer_fast").glob("*.so"))
    size = ARCHIVE.stat().st_size / 1e6
    print(f"{ARCHIVE.relative_to(ROOT)} ({size:.0f} MB) and transformer_fast/: {', '.join(libraries)}")
    print(f"made in {time.monotonic() - start:.0f} s. There, and build/results.tgz comes back:\n{COMMANDS}")
    if compiled.returncode:
        sys.exit("some pieces failed, as said above: their kernels are compiled there, or fail there too")


def pack(cache: Path, archive: Path) -> None:
    """Archive the entries of a cache that were looked up, without those of earlier kernels, and without .source files:
    kernels run without them, and they are three quarters of the cache."""
    with tarfile.open(archive, "w:gz") as tar:
        for entry in sorted(set((cache / USED).read_text().split())):
            if (cache / entry).is_dir():
                tar.add(
                    cache / entry,
                    f"{cache.name}/{entry}",
                    filter=lambda file: None if file.name.endswith(".source") else file,
                )


if __name__ == "__main__":
    sys.exit(main())
