"""Compile, link and import the CUDA extension against a CUDA build of torch. Needs nvcc, no GPU.

    python tools/cuda_check.py

A separate virtual environment (``.venv-cuda``, kept between runs) gets the CUDA build of torch. The extension is built
in a copy of the sources, so that the installed extension is not changed. The kernels are not run;
tests/ops/test_embedding_cuda.py tests their results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.14.1"
PACKAGES = (f"torch=={TORCH}", "setuptools", "ninja", "numpy")
CHECK = """
import torch
from transformer_fast import extension
assert extension.load(), extension.status()
for op in ("embed", "embed_backward", "add_positional", "fill_positional_table"):
    name = f"transformer_fast::{op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"), f"{name} has no CUDA kernel"
print(extension.status())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="9.0", help="TORCH_CUDA_ARCH_LIST of the build (default: 9.0)")
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-cuda", help="environment for the CUDA build of torch"
    )
    options = parser.parse_args()
    home = cuda_home()
    python = environment(options.venv, PACKAGES, f"torch {TORCH} with CUDA")
    sources = copy_sources(ROOT / "build/cuda_check")
    variables = {
        **os.environ,
        "CUDA_HOME": str(home),
        "TRANSFORMER_FAST_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": options.arch,
    }
    timed("built", [python, "setup.py", "-q", "build_ext", "--inplace"], cwd=sources, env=variables)
    timed("imported", [python, "-c", CHECK], cwd=sources, env=variables)


def cuda_home() -> Path:
    """Folder of the CUDA toolkit: CUDA_HOME, the default location, or the folder of nvcc on PATH."""
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for candidate in candidates:
        if candidate and Path(candidate, "bin/nvcc").exists() and Path(candidate, "include/cuda_runtime.h").exists():
            return Path(candidate)
    sys.exit("cuda-check needs the CUDA toolkit (nvcc and its headers), and finds none; set CUDA_HOME")


def environment(folder: Path, packages: tuple[str, ...], what: str) -> str:
    """Create a virtual environment with these packages and return its Python; `what` names the packages in the
    output."""
    python = str(folder / "bin/python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    timed(f"{what} in {folder.name}", [*pip, *packages])
    return python


def copy_sources(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "transformer_fast"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    return folder


def timed(what: str, command: list[str], **options: object) -> None:
    """Run a command and print its duration; exit if it fails."""
    check = Path(sys.argv[0]).stem.replace("_", "-")
    start = time.monotonic()
    if subprocess.run(command, **options).returncode != 0:
        sys.exit(f"{check}: failed after {time.monotonic() - start:.0f} s: {' '.join(command)}")
    print(f"{check}: {what} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
