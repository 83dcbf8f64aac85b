"""What is handed out: the source distribution, the wheel built from it, and that a stranger can run the wheel.

The last part compiles all C++ again, so it runs only with TRANSFORMER_FAST_TEST_WHEEL=1, as it does in CI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import transformer_fast

ROOT = Path(__file__).resolve().parent.parent
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
OUTPUT = ("build", "demo", "dist", "results", "runs", "*.egg-info", "__pycache__")
NOT_SOURCES = (".git", ".venv*", ".*_cache", ".hypothesis", ".benchmarks", *OUTPUT)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this tree, made by the build backend as `pip` and `build` make it.

    From a copy: an egg-info that is already there adds its own list of files, and two may be made at once.
    """
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=lambda at, names: not_sources(Path(at), names))
    run(sys.executable, "-c", BUILD_SDIST, str(folder / "dist"), cwd=folder / "tree", TRANSFORMER_FAST_CUDA="0")
    (path,) = (folder / "dist").iterdir()
    return path


def not_sources(folder: Path, names: list[str]) -> set[str]:
    """What is not copied: folders of these names in the root, and caches anywhere. Compiled modules are."""
    patterns = NOT_SOURCES if folder == ROOT else ("__pycache__",)
    return shutil.ignore_patterns(*patterns)(str(folder), names)


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Standard output of a command; what it said where it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources(*folders: str) -> set[str]:
    """Every file under the folders that belongs to the project: not what was compiled or cached beside it."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".so", ".pyc")}


def test_the_source_distribution_is_whole_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    kinds = {Path(name).suffix for name in names if name.startswith("csrc/")}
    assert kinds == {".cpp", ".h", ".cu", ".cuh"}
    wanted = sources("csrc", "transformer_fast", "docs") | {
        "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml",
        "requirements.txt", "setup.py",
    }  # fmt: skip
    assert wanted - names == set()
    generated = {name for name in names if name.startswith("transformer_fast.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - wanted - generated == set()


def test_the_metadata_says_what_the_package_says(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        metadata = message_from_bytes(archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO").read())
    check_metadata(metadata)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"], "the version stands in __init__.py alone"
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited.group(1) == transformer_fast.__version__
    assert transformer_fast.__version__ in (ROOT / "CHANGELOG.md").read_text()


def check_metadata(metadata: Message) -> None:
    assert metadata["Version"] == transformer_fast.__version__
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Operating System :: POSIX :: Linux" in classifiers
    assert not any(kind.startswith("License ::") for kind in classifiers), "the expression says it; both are refused"
