"""The project as other tools read it: its folder, its pinned packages, the names of setup.py, and copies of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from python_discovery import get_interpreter

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")


def search_path() -> str:
    """PATH, and behind it every Python of pyenv, which otherwise finds those that are switched on alone."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    return os.pathsep.join([os.environ["PATH"], *sorted(map(str, pyenv.glob("3.*/bin")))])


def pythons() -> dict[str, str]:
    """Programs of the Pythons of PYTHONS that this machine has, by version: "3.12" -> its path."""
    found = {version: get_interpreter(version, env={**os.environ, "PATH": search_path()}) for version in PYTHONS}
    return {version: str(info.system_executable) for version, info in found.items() if info}


def pinned() -> dict[str, str]:
    """The lines of requirements.txt and requirements-dev.txt by the name of the package."""
    files = (ROOT / name for name in ("requirements.txt", "requirements-dev.txt"))
    lines = [line.partition("#")[0].strip() for file in files for line in file.read_text().splitlines()]
    return {Requirement(line).name: line for line in lines if line and not line.startswith("-")}


def oldest_versions() -> dict[str, str]:
    """The lower bounds in pyproject.toml of the dependencies and of the extra for a GPU: {"torch": "2.11", ...}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    return {one.name: next(bound.version for bound in one.specifier if bound.operator == ">=") for one in needed}


def setup_names(tree: Path = ROOT) -> dict[str, Any]:
    """The names that setup.py defines."""
    source = (tree / "setup.py").read_text().rpartition("\nsetup(")[0]
    names: dict[str, Any] = {"__file__": str(tree / "setup.py"), "__name__": "transformer_fast_setup"}
    exec(compile(source, "setup.py", "exec"), names)
    return names


def copy_sources(tree: Path) -> None:
    """Copy what git does not ignore; what was built in the copy stays, and files keep their times, which ninja
    compares."""
    for path in tree.iterdir() if tree.exists() else ():
        if path.name != "build":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
        if (ROOT / name).exists():  # git lists a deleted file until it is staged
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def copy_kernels(tree: Path) -> bool:
    """Copy the libraries of kernels that were built in this checkout from the same sources; return True if any were."""
    built = list((ROOT / "transformer_fast").glob("libtransformer_fast_cpu_*.so"))
    digest = setup_names()["kernels_digest"]().encode() if built else b""
    usable = [path for path in built if digest in path.read_bytes()]
    for path in usable:
        shutil.copy2(path, tree / "transformer_fast")
    return bool(usable)
