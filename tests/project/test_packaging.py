"""Distributions: the source distribution, the wheel built from it, and the wheel in a new environment.

The last part compiles C++ again, so it runs only where TRANSFORMER_FAST_TEST_WHEEL names the instruction sets that the
wheel gets, as TRANSFORMER_FAST_CPU_SETS does (setup.py). In CI it does.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import torch

import transformer_fast

ROOT = Path(__file__).resolve().parents[2]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
SETS_OF_THE_WHEEL = os.environ.get("TRANSFORMER_FAST_TEST_WHEEL", "")
KERNELS = ("avx2", "avx512", "avx512_bf16") if platform.machine() in ("x86_64", "AMD64") else ("generic",)
OUTPUT = ("build", "demo", "dist", "results", "runs", "site", "*.egg-info", "__pycache__")
NOT_SOURCES = (".git", ".venv*", ".*_cache", ".hypothesis", ".benchmarks", *OUTPUT)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this tree, because an existing egg-info adds its own files, and two tests may build at once."""
    pytest.importorskip("setuptools", "77", reason="pyproject.toml builds with setuptools>=77")
    folder = tmp_path_factory.mktemp("sdist") / "tree"
    shutil.copytree(ROOT, folder, ignore=lambda at, names: not_sources(Path(at), names))
    return folder


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    """Build the source distribution of this tree with the build backend, as `pip` and `build` do."""
    run(sys.executable, "-c", BUILD_SDIST, "../dist", cwd=tree, TRANSFORMER_FAST_CUDA="0", TRANSFORMER_FAST_URL="")
    (path,) = (tree.parent / "dist").iterdir()
    return path


def metadata_of(sdist: Path) -> Message:
    with tarfile.open(sdist) as archive:
        return message_from_bytes(archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO").read())


def not_sources(folder: Path, names: list[str]) -> set[str]:
    """Return names that are not copied: some root folders, and caches anywhere. Compiled modules are copied."""
    patterns = NOT_SOURCES if folder == ROOT else ("__pycache__",)
    return shutil.ignore_patterns(*patterns)(str(folder), names)


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Return the standard output of a command; fail with its errors."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def sources(*folders: str) -> set[str]:
    """Return every file of the project under the folders, without compiled and cached files."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".so", ".pyc")}


def test_the_source_distribution_is_whole_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    kinds = {Path(name).suffix for name in names if name.startswith("csrc/")}
    assert kinds == {".cpp", ".h", ".cu", ".cuh"}
    wanted = sources("csrc", "transformer_fast", "docs", "examples") - {"csrc/.clang-format"} | {
        "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml",
        "requirements.txt", "setup.py",
    }  # fmt: skip
    assert wanted - names == set()
    generated = {name for name in names if name.startswith("transformer_fast.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - wanted - generated == set()


def test_the_metadata_says_what_the_package_says(sdist: Path) -> None:
    check_metadata(metadata_of(sdist))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"][0] == "version", "the version stands in __init__.py alone"
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited.group(1) == transformer_fast.__version__
    assert transformer_fast.__version__ in (ROOT / "CHANGELOG.md").read_text()


METADATA = BUILD_SDIST.replace("build_sdist", "prepare_metadata_for_build_wheel")


def test_links_of_the_description_lead_somewhere_from_a_package_index(sdist: Path, tree: Path, tmp_path: Path) -> None:
    """Links cannot be relative there; the builder of the package knows the URL of the repository."""
    url = "https://example.org/someone/transformer_fast"
    run(sys.executable, "-c", METADATA, str(tmp_path), cwd=tree, TRANSFORMER_FAST_CUDA="0", TRANSFORMER_FAST_URL=url)
    (path,) = tmp_path.glob("*.dist-info/METADATA")
    nowhere, somewhere = metadata_of(sdist), message_from_bytes(path.read_bytes())
    for metadata in (nowhere, somewhere):
        assert len(links_of(metadata)) > 5 and metadata["Description-Content-Type"].startswith("text/markdown")
    assert not nowhere.get_all("Project-URL", []) and not any(link.startswith("http") for link in links_of(nowhere))
    pages, links = somewhere.get_all("Project-URL", []), links_of(somewhere)
    assert f"Homepage, {url}" in pages and all(f", {url}" in page for page in pages)
    assert f"{url}/raw/HEAD/docs/images/packed.svg" in links and all(link.startswith(f"{url}/") for link in links)
    assert all((ROOT / link.partition("/HEAD/")[2].partition("#")[0]).exists() for link in links)


def links_of(metadata: Message) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)]+)\)", metadata.get_payload()) if not link.startswith("#")]


def check_metadata(metadata: Message) -> None:
    assert metadata["Version"] == transformer_fast.__version__
    needed = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
    assert needed == ["torch>=2.11", "numpy>=1.26"], "a laptop needs nothing else"
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11"
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Operating System :: POSIX :: Linux" in classifiers
    assert not any(kind.startswith("License ::") for kind in classifiers), "the expression says it; both are refused"


@pytest.mark.skipif(not SETS_OF_THE_WHEEL, reason="compiles C++ again: `make test WHEEL=all` runs it")
def test_a_stranger_can_use_the_wheel(sdist: Path, tmp_path: Path) -> None:
    """One test, because its parts share a setup of minutes."""
    for name in ("wheel", "environment", "program", "command", "types"):
        (tmp_path / name).mkdir()
    wheel = built(sdist, tmp_path / "wheel")
    check_wheel(wheel)
    python = new_environment(wheel, tmp_path / "environment")
    minor = ".".join(torch.__version__.split(".")[:2])
    for option in ((), ("--without-module",)):
        run(str(python), str(ROOT / "tools/use_wheel.py"), minor, *option, cwd=tmp_path / "program")
    check_command(python.parent / "transformer-fast", tmp_path / "command")
    check_types(python, tmp_path / "types")


def new_environment(wheel: Path, environment: Path) -> Path:
    """Python of an environment with the wheel; all else comes from this environment by a path alone, through which no
    `.pth` file is read, such as that of the editable install."""
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=ROOT)
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "borrowed.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    python = environment / "bin/python"
    pip = ("-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed")
    run(sys.executable, *pip, str(wheel), cwd=ROOT)
    return python


def built(sdist: Path, folder: Path) -> Path:
    """The wheel that pip builds from the source distribution only."""
    variables = {"TRANSFORMER_FAST_CUDA": "0", "TRANSFORMER_FAST_CPU_SETS": SETS_OF_THE_WHEEL}
    build = ("-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder), str(sdist))
    run(sys.executable, *build, cwd=folder, **variables)
    (path,) = folder.iterdir()
    return path


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    check_metadata(message_from_bytes(metadata))
    files = {name for name in names if name.startswith("transformer_fast/")}
    assert sources("transformer_fast") == {name for name in files if not name.endswith(".so")}
    kernels = KERNELS[:1] if SETS_OF_THE_WHEEL == "baseline" else KERNELS
    for module in (
        "_C.torch",
        "libtransformer_fast_ops.torch",
        *(f"libtransformer_fast_cpu_{name}.so" for name in kernels),
    ):
        assert any(name.startswith(f"transformer_fast/{module}") for name in files), module
    assert {name.split("/")[0] for name in names - files} == {wheel.name.split("-cp")[0] + ".dist-info"}
    assert "none-any" not in wheel.name, "it is of one Python and one machine"


def check_command(command: Path, folder: Path) -> None:
    """Run the command from an empty folder, to which only `demo` writes."""
    assert run(str(command), "--version", cwd=folder) == f"transformer_fast {transformer_fast.__version__}\n"
    assert "C++ extension: loaded: " in run(str(command), "info", cwd=folder)
    assert list(folder.iterdir()) == []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    demo = [str(command), "demo", "--max-steps", "2"]
    done = subprocess.run(demo, cwd=folder, env=environment, capture_output=True, text=True)
    # Two updates are too few, which the demo reports; all its files are in the folder.
    assert done.returncode == 1 and "below the goal of 98%" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "FAILED" not in done.stdout
    made = {path.name for path in (folder / "demo").iterdir()}
    assert made == {"attention.png", "data", "positional_encoding.png", "run"}


def check_types(python: Path, folder: Path) -> None:
    """Check that a user's program sees the types of the installed package; `make lint` checks those of the tree."""
    shutil.copy(ROOT / "tests/typing/public_api.py", folder)
    options = ("--python-executable", str(python), "--cache-dir", "cache", "--warn-unused-ignores")
    assert "Success" in run(sys.executable, "-m", "mypy", *options, "public_api.py", cwd=folder)
