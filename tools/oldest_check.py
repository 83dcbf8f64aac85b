"""``make oldest``: the extension and the whole suite with the oldest torch and Triton that pyproject.toml allows.

A virtual environment of its own (``.venv-oldest``, kept between runs; some gigabytes, since such a torch comes from the
registry with CUDA) gets them and the pins of requirements.txt. Build and tests run in a copy of the sources, so that
the extension in use is left alone. No GPU is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

from cuda_check import ROOT, environment, timed

RANGED = ("torch", "triton")
# What they need older than requirements.txt pins it: torch 2.11 itself, and the interpreter of Triton 3.6.
OLDER = {"setuptools": "setuptools>=77,<82", "numpy": "numpy<2.4"}
IGNORED = (".git", ".venv*", ".*_cache", ".hypothesis", "build", "demo", "results", "*.egg-info", "*.so", "__pycache__")


def main() -> None:
    packages = [f"{name}=={version}.*" for name, version in oldest().items()]
    python = environment(ROOT / ".venv-oldest", (*packages, *pins()), ", ".join(packages))
    sources = ROOT / "build/oldest_check"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(ROOT, sources, ignore=ignored)
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "TRANSFORMER_FAST_CUDA": "0", "OMP_NUM_THREADS": "1"}
    timed("built", [python, "setup.py", "-q", "build_ext", "--inplace"], cwd=sources, env=variables)
    tests = [python, "-m", "pytest", "-q", "-n", "2"]
    timed("tests passed", [*tests, "tests", "--ignore", "tests/interpreter"], cwd=sources, env=variables)
    interpreted = {**variables, "TRITON_INTERPRET": "1"}
    timed("tests passed in the interpreter", [*tests, "tests/interpreter"], cwd=sources, env=interpreted)


def oldest() -> dict[str, str]:
    """The lower bounds of the packages with a range: name -> "2.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict(re.match(r"(\w+)>=([\d.]+)", line).groups() for line in project["dependencies"] if ">=" in line)
    return {name: found[name] for name in RANGED}


def pins() -> list[str]:
    """What goes with them, as requirements.txt pins it where it can."""
    lines = [line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    names = [re.split("[=;]", line)[0] for line in lines]
    return [OLDER.get(name, line) for name, line in zip(names, lines, strict=True) if name not in RANGED]


def ignored(folder: str, names: list[str]) -> set[str]:
    """What is not copied: benchmarks/results is, results of runs in the root are not."""
    patterns = IGNORED if Path(folder) == ROOT else ("*.so", "__pycache__")
    return shutil.ignore_patterns(*patterns)(folder, names)


if __name__ == "__main__":
    sys.exit(main())
