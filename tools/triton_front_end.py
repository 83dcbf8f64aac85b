"""Compile the front end of every launch with another Triton than the pinned one: what pyproject.toml allows is tried.

    python tools/triton_front_end.py 3.6.0 3.9.0

Each version is installed alone into build/triton-VERSION, beside the torch of this environment, and kept between runs.
The front end turns the source of a kernel into Triton's own representation; what a version of Triton cannot read
fails there. No GPU is needed. A launch that fails is printed with its first error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from pythons import oldest_versions

ROOT = Path(__file__).resolve().parent.parent
NEWEST = "3.9.0"
"""The newest version of Triton that was tried."""
CAPABILITY = 90


def tried() -> list[str]:
    """Versions by default: the oldest that pyproject.toml allows, and the newest."""
    return [f"{oldest_versions()['triton']}.0", NEWEST]


def installed(version: str) -> Path:
    """Folder with this version of Triton and nothing else."""
    folder = ROOT / "build" / f"triton-{version}"
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def compile_all(version: str) -> int:
    """Compile the front end of every launch with the Triton that is imported; return 1 if one failed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    import triton
    from triton_kernels import cases, triton_ir

    if triton.__version__ != version:
        sys.exit(f"triton_front_end: wanted Triton {version}, and Python imports {triton.__version__}")
    start, failed = time.monotonic(), []
    launches = [launch for arch, launch in cases() if arch == CAPABILITY]
    for launch in launches:
        try:
            triton_ir(launch, CAPABILITY)
        except Exception as error:
            failed.append(launch.name)
            reason = (str(error.__cause__ or error).strip().splitlines() or [""])[-1]
            print(f"   {launch.name}: {type(error).__name__}: {reason[:200]}", flush=True)
    passed, count = len(launches) - len(failed), len(launches)
    print(f"Triton {version}: {passed} of {count} launches for sm_{CAPABILITY} ({time.monotonic() - start:.0f} s)")
    return int(bool(failed) or not count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions",
        nargs="*",
        default=tried(),
        metavar="VERSION",
        help="default: the oldest and the newest",
    )
    parser.add_argument("--imported", help=argparse.SUPPRESS)  # in the process of one version
    options = parser.parse_args()
    if options.imported:
        return compile_all(options.imported)
    codes = []
    for version in options.versions:
        path = os.pathsep.join(filter(None, (str(installed(version)), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        codes.append(subprocess.run([sys.executable, __file__, "--imported", version], env=environment).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
