"""``make pythons``: build, verify and test the package with other versions of Python and torch.

A row is one Python with one torch. The rows are: every Python from 3.11 on that this machine has (pyenv, and PATH) with
the torch that requirements.txt pins; one Python with the newest torch; one Python with the oldest torch that
pyproject.toml allows. ``make oldest`` runs the row of the oldest torch alone.

Each row has a virtual environment and a copy of the sources. Both are kept between runs and take some gigabytes,
because the registry's builds of torch come with CUDA. Only the Python module is compiled per row; kernels that this
checkout has compiled serve every Python and every torch. Then ``transformer_fast verify`` runs, the tests of TESTS, and
the tests of INTERPRETED in Triton's interpreter. No GPU is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
NEWEST_TORCH = "2.14.1"
TESTS = ("tests/ops", "tests/layers", "tests/accelerate/test_accelerate.py", "tests/accelerate/test_sdpa.py")
INTERPRETED = ("tests/interpreter/test_norm.py", "tests/interpreter/test_dropout.py")
# Each row has its own versions of torch and of these packages.
NEEDED = ("numpy", "matplotlib", "ninja", "onnx", "onnxscript", "setuptools", "expecttest", "hypothesis", "pytest",
          "pytest-benchmark", "pytest-xdist", "sacrebleu", "safetensors", "sentencepiece", "tqdm",
          "transformers")  # fmt: skip
# Older than requirements.txt pins them: needed by torch 2.11 itself, and by the interpreter of Triton 3.6.
OLDER = {"setuptools": "setuptools>=77,<82", "numpy": "numpy<2.4"}
IGNORED = (".git", ".venv*", ".*_cache", ".hypothesis", "build", "demo", "dist", "results", "*.egg-info", "*.so",
           "__pycache__")  # fmt: skip
VERSION = "import sys; print('%d.%d' % sys.version_info[:2], sys.version_info.releaselevel)"


@dataclasses.dataclass(frozen=True)
class Row:
    """One Python with one torch.

    Attributes:
        python: its version, "3.12".
        packages: the requirements of pip that differ between rows, torch first: "torch==2.13.0".
        older: True if the packages of OLDER are needed.
    """

    python: str
    packages: tuple[str, ...]
    older: bool = False

    @property
    def name(self) -> str:
        return f"python{self.python}-torch{self.packages[0].partition('==')[2].removesuffix('.*')}"


class Failed(Exception):
    """A command of a row that failed."""


def rows(pythons: list[str]) -> list[Row]:
    """The rows for these versions of Python, in order; the newest torch with the first, the oldest with the second."""
    pins = {re.split("[=;]", line)[0]: line for line in requirements()}
    pinned = (pins["torch"], pins["triton"])
    oldest = tuple(f"{name}=={version}.*" for name, version in oldest_versions().items())
    return [
        *(Row(python, pinned) for python in pythons),
        Row(pythons[0], (f"torch=={NEWEST_TORCH}",)),
        Row(pythons[min(1, len(pythons) - 1)], oldest, older=True),
    ]


def requirements() -> list[str]:
    files = (ROOT / name for name in ("requirements.txt", "requirements-dev.txt"))
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def oldest_versions() -> dict[str, str]:
    """The lower bounds of torch and Triton in pyproject.toml: name -> "2.11"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = dict(re.match(r"(\w+)>=([\d.]+)", line).groups() for line in project["dependencies"] if ">=" in line)
    return {name: found[name] for name in ("torch", "triton")}


def pythons() -> dict[str, str]:
    """Programs of the released Pythons from OLDEST_PYTHON on, by version: "3.12" -> its path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [sys.executable, *sorted(map(str, pyenv.glob("3.*/bin/python")))]
    candidates += [shutil.which(f"python3.{minor}") or "" for minor in range(OLDEST_PYTHON[1], 30)]
    found: dict[str, str] = {}
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", VERSION], capture_output=True, text=True)
        version, _, level = done.stdout.strip().partition(" ")
        if done.returncode == 0 and level == "final" and tuple(map(int, version.split("."))) >= OLDEST_PYTHON:
            found.setdefault(version, candidate)
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def run_row(row: Row, program: str, folder: Path, workers: str) -> None:
    """Build and test one row.

    Raises:
        Failed: a command failed; it has said why.
    """
    python, tree = prepared(row, program, folder), folder / f"{row.name}-tree"
    copy_sources(tree)
    variables = variables_of(python)
    build = {**variables, "TRANSFORMER_FAST_CPU_SETS": "none" if copy_kernels(tree) else "host"}
    step(row, "build", [python, "setup.py", "-q", "build_ext", "--inplace"], tree, build)
    step(row, "verify", [python, "-m", "transformer_fast", "verify"], tree, variables)
    pytest = [python, "-m", "pytest", "-q", "-n", workers, "--show-capture=no"]
    step(row, "tests", [*pytest, *TESTS], tree, variables)
    step(row, "interpreter", [*pytest, *INTERPRETED], tree, {**variables, "TRITON_INTERPRET": "1"})


def prepared(row: Row, program: str, folder: Path) -> str:
    """Python of the environment of a row, which has all packages but this one.

    Raises:
        Failed: a package could not be installed.
    """
    environment = folder / row.name
    python = str(environment / "bin/python")
    if not Path(python).exists():
        step(row, "environment", [program, "-m", "venv", str(environment)])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--progress-bar", "off"]
    step(row, "packages", [*pip, *row.packages, *others(row)])
    return python


def variables_of(python: str) -> dict[str, str]:
    """Variables of a process that runs in the environment of a Python."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    return {**variables, "PATH": path, "TRANSFORMER_FAST_CUDA": "0", "OMP_NUM_THREADS": "1"}


def others(row: Row) -> list[str]:
    """The packages of NEEDED as requirements.txt pins them, or older."""
    pins = {re.split("[=;]", line)[0]: line for line in requirements()}
    return [OLDER.get(name, pins[name]) if row.older else pins[name] for name in NEEDED]


def copy_sources(tree: Path) -> None:
    """Copy this checkout; what was built in the copy stays, and files keep their times, which ninja compares."""
    for path in tree.iterdir() if tree.exists() else ():
        if path.name != "build":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(ROOT, tree, dirs_exist_ok=True, ignore=ignored)


def ignored(folder: str, names: list[str]) -> set[str]:
    """Names that are not copied: benchmarks/results is copied, the results of runs in the root are not."""
    patterns = IGNORED if Path(folder) == ROOT else ("*.so", "__pycache__")
    return shutil.ignore_patterns(*patterns)(folder, names)


def copy_kernels(tree: Path) -> int:
    """Copy the libraries of kernels that were built in this checkout of the same sources; return their number."""
    built = list((ROOT / "transformer_fast").glob("libtransformer_fast_cpu_*.so"))
    digest = setup_names(ROOT)["kernels_digest"]().encode() if built else b""
    usable = [path for path in built if digest in path.read_bytes()]
    for path in usable:
        shutil.copy2(path, tree / "transformer_fast")
    return len(usable)


def setup_names(tree: Path) -> dict[str, Any]:
    """The names that setup.py defines."""
    source = (tree / "setup.py").read_text().rpartition("\nsetup(")[0]
    names: dict[str, Any] = {"__file__": str(tree / "setup.py"), "__name__": "transformer_fast_setup"}
    exec(compile(source, "setup.py", "exec"), names)
    return names


def step(row: Row, what: str, command: list[str], cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    """Run a command of a row, and print its duration."""
    start = time.monotonic()
    code = subprocess.run(command, cwd=cwd, env=env).returncode
    say(f"{row.name}: {what}: {'done' if code == 0 else f'failed ({code})'} ({time.monotonic() - start:.0f} s)")
    if code != 0:
        raise Failed(f"{what} failed: {' '.join(command)}")


def say(text: str) -> None:
    print(f"pythons: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows to run, by parts of their names: python3.12, torch2.11")
    parser.add_argument("--list", action="store_true", help="print the names of the rows; run none")
    parser.add_argument("--oldest", action="store_true", help="run the row with the oldest torch")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv-pythons", help="folder for environments and sources"
    )
    parser.add_argument("--workers", default="2", help="number of processes of pytest-xdist (default: %(default)s)")
    options = parser.parse_args()
    programs = pythons()
    known = rows(list(programs))
    names = [known[-1].name] if options.oldest else options.names
    chosen = [row for row in known if not names or any(name in row.name for name in names)]
    if not chosen:
        sys.exit(f"pythons: no row for {' '.join(names)}; there are {', '.join(row.name for row in known)}")
    if options.list:
        print(*(row.name for row in chosen), sep="\n")
        return 0
    verdict = []
    for row in chosen:
        try:
            run_row(row, programs[row.python], options.folder, options.workers)
            verdict.append((row, "passed"))
        except Failed as failure:
            verdict.append((row, str(failure)))
    for row, result in verdict:
        say(f"{row.name}: {result}")
    return int(any(result != "passed" for _, result in verdict))


if __name__ == "__main__":
    sys.exit(main())
