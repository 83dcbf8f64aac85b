"""Versions of Triton, each in a folder of its own, for the tools that compile with more than one.

No GPU is needed: a process imports such a version beside the torch of this environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Versions that are tried, from the oldest that pyproject.toml allows to the newest; one of them is the pinned one."""


def folder_of(version: str) -> Path:
    """Folder with this version of Triton and nothing else, which is kept between runs."""
    folder = ROOT / "build" / f"triton-{version}"
    if not (folder / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={version}"], check=True)
    return folder


def start_with(version: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a script of this folder that imports this version of Triton, and this checkout; what it prints can be
    read."""
    places = [] if version == installed_version("triton") else [str(folder_of(version))]
    path = os.pathsep.join(filter(None, (*places, str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.Popen([sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def check_imported(version: str) -> None:
    """Leave the process unless this version of Triton is imported in it."""
    import triton

    if triton.__version__ != version:
        sys.exit(f"wanted Triton {version}, and Python imports {triton.__version__}")
