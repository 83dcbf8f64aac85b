"""Building and loading the extension, and what is said when it is missing, broken or built for something else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from transformer_fast.kernels import extension

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import transformer_fast as tfast
    from transformer_fast.kernels import extension
    tfast.embed(torch.tensor([0]), torch.ones(1, 4))
    tfast.embed(torch.tensor([0]), torch.ones(1, 4))
    warnings.simplefilter("ignore")
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    out = tfast.attention(q, k, v, causal=True)
    with tfast.backend("reference"):
        same = torch.equal(out, tfast.attention(q, k, v, causal=True))
    ours = [str(w.message) for w in caught if "transformer_fast" in str(w.message)]
print(extension.load(), len(ours), extension.status(), *ours, same, sep="\\n")
try:
    with tfast.backend("native"):
        tfast.embed(torch.tensor([0]), torch.ones(1, 4))
except tfast.BackendError as error:
    print(error)
"""
BUILD = {
    "torch": torch.__version__,
    "cuda": None,
    "arch_list": None,
    "native_arch": True,
    "compiler": "c++",
    "vector": "avx2",
    "cpu_features": [],
}
STUBS = {
    "missing": (None, "is missing"),
    "empty": (b"", "is broken (no build record in it)"),
    "not a build of ours": (b"\x7fELF" + bytes(1000), "is broken (no build record in it)"),
    "cut off": (b'transformer_fast build: {"torch": "2.1', "is broken (no build record in it)"),
    "another torch": (
        {**BUILD, "torch": "2.9.9+cu999"},
        f"was built for torch 2.9.9+cu999, but this is torch {torch.__version__}",
    ),
    "another CPU": ({**BUILD, "cpu_features": ["avx2", "amx-future"]}, "was built for a CPU with amx-future, which"),
    "does not load": (BUILD, "does not load ("),
}


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without its extension, in a checkout's place: beside a setup.py."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "transformer_fast", folder / "transformer_fast", ignore=ignored)
    (folder / "setup.py").touch()
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo and ELF files")
@pytest.mark.parametrize("stub", STUBS)
def test_a_useless_extension_still_imports_and_says_what_to_run(package: Path, stub: str) -> None:
    content, expected = STUBS[stub]
    (package / "setup.py").touch()
    status, warning, refused = useless_extension(package, content)
    for text in (status, warning, refused):
        assert expected in text and "run `make setup`" in text
    assert ("; or `pip install torch==2.9.9+cu999`" in status) == (stub == "another torch")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo and ELF files")
def test_installed_for_another_torch_names_both_ways_out_and_what_runs(package: Path) -> None:
    (package / "setup.py").unlink(missing_ok=True)
    status, warning, refused = useless_extension(package, STUBS["another torch"][0])
    for text in (status, warning, refused):
        assert STUBS["another torch"][1] in text and "make setup" not in text
        assert "--no-build-isolation transformer_fast-*.tar.gz`; or `pip install torch==2.9.9+cu999`" in text
    assert status.endswith("; until then the eager reference runs instead: the same numbers, slower")
    assert warning.startswith("transformer_fast: embedding on cpu in torch.float32 runs on the eager reference: the ")


def useless_extension(package: Path, content: bytes | dict[str, object] | None) -> tuple[str, str, str]:
    """With this as the extension: its status, the one warning of two calls, and what asking for it raises."""
    file = package / "transformer_fast" / f"_C{EXTENSION_SUFFIXES[0]}"
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else record(content))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "TRANSFORMER_FAST_BACKEND": "auto"},
    )
    assert result.returncode == 0, result.stderr
    loaded, warned, status, warning, as_the_reference, refused = result.stdout.strip().split("\n")
    assert loaded == "False" and warned == "1" and as_the_reference == "True"
    return status, warning, refused


def record(build: dict[str, object]) -> bytes:
    return b"\x7fELF" + bytes(100) + b"transformer_fast build: " + json.dumps(build).encode() + b"\n" + bytes(100)


needs_extension = pytest.mark.skipif(not extension.load(), reason=extension.status())


@needs_extension
def test_the_loaded_extension_tells_what_it_is() -> None:
    from transformer_fast import _C

    info = extension.build_info()
    assert info == _C.build_info()
    assert info.keys() == BUILD.keys()
    assert info["torch"] == torch.__version__ and info["vector"] in ("avx512", "avx2", "baseline")
    assert re.match(r"\S+ \d+\.\d+", info["compiler"])
    assert extension.status().startswith("loaded: ") and info["vector"] in extension.status()


@needs_extension
def test_build_info_cannot_be_changed_from_outside() -> None:
    extension.build_info()["torch"] = "changed"
    assert extension.build_info()["torch"] == torch.__version__


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_extension_runs_on_the_openmp_runtime_of_torch() -> None:
    """In a process of its own: other libraries bring runtimes of their own."""
    code = (
        "from transformer_fast.kernels import extension; assert extension.load(); print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"/lib(gomp|iomp5|omp)[-.]", line)}
    assert len(runtimes) <= 1, runtimes


def run_setup(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )


def test_a_wrong_cuda_choice_is_named() -> None:
    result = run_setup("--name", TRANSFORMER_FAST_CUDA="yes")
    assert result.returncode != 0 and "TRANSFORMER_FAST_CUDA: expected auto, 0 or 1, got 'yes'" in result.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_asking_for_cuda_without_it_is_a_clear_error_and_auto_says_so_in_a_line() -> None:
    result = run_setup("--name", TRANSFORMER_FAST_CUDA="1")
    expected = f"the CUDA kernels cannot be built here: torch {torch.__version__} is a CPU build"
    assert result.returncode != 0 and expected in result.stderr
    result = run_setup("--name", TRANSFORMER_FAST_CUDA="auto")
    assert result.returncode == 0, result.stderr
    assert f"transformer_fast: CPU kernels only (torch {torch.__version__} is a CPU build)" in result.stderr


def test_setup_without_torch_says_what_to_install() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['torch'] = None; exec(open('setup.py').read())"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode != 0
    assert "Run `pip install torch`" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "choice,nvcc_release,torch_cuda,expected",
    [
        ("auto", "13.0", "13.0", True),
        ("auto", "13.2", "13.0", True),
        ("auto", "12.8", "13.0", False),
        ("auto", None, "13.0", False),
        ("0", "13.0", "13.0", False),
        ("1", "13.0", "13.0", True),
        ("1", "12.8", "13.0", "nvcc is 12.8, but torch .* was built with CUDA 13.0"),
        ("1", None, "13.0", "there is no nvcc; put it on PATH or set CUDA_HOME"),
    ],
)
def test_choice_of_cuda(
    choice: str,
    nvcc_release: str | None,
    torch_cuda: str,
    expected: bool | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils import cpp_extension

    source = (ROOT / "setup.py").read_text().rpartition("\nsetup(")[0]
    names: dict = {"__file__": str(ROOT / "setup.py"), "__name__": "transformer_fast_setup"}
    exec(compile(source, "setup.py", "exec"), names)
    if nvcc_release:
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin/nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc_release}, V{nvcc_release}.1'\n")
        nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", choice)
    if isinstance(expected, str):
        with pytest.raises(SystemExit, match=expected):
            names["want_cuda"]()
    else:
        assert names["want_cuda"]() is expected


def test_the_compiler_is_asked_what_it_will_use() -> None:
    source = (ROOT / "setup.py").read_text().rpartition("\nsetup(")[0]
    names: dict = {"__file__": str(ROOT / "setup.py"), "__name__": "transformer_fast_setup"}
    exec(compile(source, "setup.py", "exec"), names)
    facts = names["compiler_facts"](["c++"], names["cpu_flags"](native=False))
    if "-mavx2" in names["cpu_flags"](native=False):
        assert facts["vector"] == "avx2" and facts["cpu_features"] == ["avx2", "fma", "f16c"]
    else:
        assert facts["vector"] == "baseline"
