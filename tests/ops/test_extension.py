"""Building and loading the extension, and what is said when it is missing, broken or built for something else."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import torch
from setuptools import Distribution
from subprocesses import ROOT, program, python

from transformer_fast import extension

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import transformer_fast as tfast
    from transformer_fast import extension
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
BUILD = {"torch": torch.__version__, "cuda": None, "arch_list": None, "compiler": "c++"}
STUBS = {
    "missing": (None, "is missing"),
    "empty": (b"", "is broken (no build record in it)"),
    "not a build of ours": (b"\x7fELF" + bytes(1000), "is broken (no build record in it)"),
    "cut off": (b'transformer_fast build: {"torch": "2.1', "is broken (no build record in it)"),
    "another torch": (
        {**BUILD, "torch": "2.9.9+cu999"},
        f"was built for torch 2.9.9+cu999, but this is torch {torch.__version__}",
    ),
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
@pytest.mark.cover(1)
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
    assert status.endswith("; the eager reference runs instead: the same numbers, slower")
    assert warning.startswith("transformer_fast: embedding on cpu in torch.float32 runs on the eager reference: the ")


def useless_extension(package: Path, content: bytes | dict[str, object] | None) -> tuple[str, str, str]:
    """With this as the extension: its status, the one warning of two calls, and what asking for it raises."""
    file = package / "transformer_fast" / f"_C{EXTENSION_SUFFIXES[0]}"
    file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else record(content))
    output = program(PROGRAM, cwd=package, PYTHONPATH=str(package), TRANSFORMER_FAST_BACKEND="auto")
    loaded, warned, status, warning, as_the_reference, refused = output.strip().split("\n")
    assert loaded == "False" and warned == "1" and as_the_reference == "True"
    return status, warning, refused


def record(build: dict[str, object]) -> bytes:
    return b"\x7fELF" + bytes(100) + b"transformer_fast build: " + json.dumps(build).encode() + b"\n" + bytes(100)


needs_extension = pytest.mark.skipif(not extension.load(), reason=extension.status())


@needs_extension
def test_the_loaded_extension_tells_what_it_is() -> None:
    info = extension.build_info()
    chosen = info.pop("instruction_set")
    assert info == extension.module().build_info()
    assert info.keys() == BUILD.keys() and info["torch"] == torch.__version__
    assert chosen in extension.module().supported_instruction_sets()
    assert re.match(r"\S+ \d+\.\d+", info["compiler"])
    info["torch"] = "changed"
    assert extension.build_info()["torch"] == torch.__version__
    assert extension.status().startswith("loaded: ") and f"{chosen} kernels" in extension.status()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch was built with CUDA")
def test_asking_for_cuda_without_it_is_a_clear_error_and_auto_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    want_cuda = setup_names()["want_cuda"]
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "1")
    with pytest.raises(SystemExit, match=f"cannot be built here: torch {re.escape(torch.__version__)} is a CPU build"):
        want_cuda()
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "auto")
    assert want_cuda() is False
    expected = f"transformer_fast: CPU kernels only (torch {torch.__version__} is a CPU build)"
    assert expected in capsys.readouterr().err


def test_a_wrong_cuda_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "yes")
    with pytest.raises(SystemExit, match="TRANSFORMER_FAST_CUDA: expected auto, 0 or 1, got 'yes'"):
        setup_names()["want_cuda"]()


def test_setup_without_torch_says_what_to_install() -> None:
    result = python("-c", "import sys; sys.modules['torch'] = None; exec(open('setup.py').read())")
    assert result.returncode != 0
    assert "Run `pip install torch`" in result.stderr and "Traceback" not in result.stderr


TOOLKIT = ("include/cuda_runtime.h", "lib64/libcudart.so")


@pytest.mark.parametrize(
    "choice,nvcc_release,files,expected",
    [
        ("auto", "13.0", TOOLKIT, ""),
        ("auto", "13.2", TOOLKIT, ""),
        ("auto", "12.8", TOOLKIT, "nvcc is 12.8, but torch .* was built with CUDA 13.0"),
        ("auto", None, TOOLKIT, "there is no nvcc; put it on PATH or set CUDA_HOME"),
        ("auto", "13.0", TOOLKIT[:1], "/bin/nvcc has no libcudart.so; set CUDA_HOME to the toolkit's folder"),
        ("auto", "13.0", TOOLKIT[1:], "/bin/nvcc has no cuda_runtime.h; set CUDA_HOME"),
        ("auto", "13.0", (), "/bin/nvcc has no cuda_runtime.h and no libcudart.so; set CUDA_HOME"),
        ("0", "13.0", TOOLKIT, "TRANSFORMER_FAST_CUDA=0"),
        ("1", "13.0", TOOLKIT, ""),
        ("1", "12.8", TOOLKIT, "nvcc is 12.8, but torch .* was built with CUDA 13.0"),
        ("1", None, TOOLKIT, "there is no nvcc; put it on PATH or set CUDA_HOME"),
        ("1", "13.0", TOOLKIT[:1], "the CUDA kernels cannot be built here: .*/bin/nvcc has no libcudart.so"),
    ],
)
def test_choice_of_cuda(
    choice: str,
    nvcc_release: str | None,
    files: tuple[str, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An obstacle is one line, and with the choice of 1 the end of the build."""
    from torch.utils import cpp_extension

    names = setup_names()
    for file in files:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    if nvcc_release:
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin/nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc_release}, V{nvcc_release}.1'\n")
        nvcc.chmod(0o755)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", choice)
    if choice == "1" and expected:
        with pytest.raises(SystemExit, match=expected):
            names["want_cuda"]()
        return
    assert names["want_cuda"]() is (not expected)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"CPU kernels only .*{expected}" if expected else "CPU and CUDA kernels", line)


SETS = ["avx512_bf16", "avx512", "avx2"]


@pytest.mark.parametrize(
    "supported,built,asked,expected",
    [
        (SETS, SETS, "", "avx512_bf16"),
        (SETS, ["avx512", "avx2"], "", "avx512"),
        (["avx2"], SETS, "", "avx2"),
        (SETS, SETS, "avx2", "avx2"),
        (["generic"], ["generic"], "", "generic"),
        ([], SETS, "", "this CPU is older than the kernels: they need AVX2 and FMA"),
        (["avx2"], ["avx512"], "", "no kernels for avx2 were built, only for avx512: run `make setup`"),
        (["avx2"], [], "", "no kernels for avx2 were built, only for nothing: run `make setup`"),
    ],
)
def test_choice_of_kernels(
    supported: list[str], built: list[str], asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "_library", lambda name: Path(name) if name in built else None)
    chosen, reason = extension._choose_kernels(supported, asked)
    assert chosen == expected or (chosen is None and reason.startswith(expected))


@pytest.mark.parametrize(
    "asked,expected",
    [
        ("avx1024", "TRANSFORMER_FAST_CPU: expected one of avx512_bf16, avx512, avx2, generic, got 'avx1024'"),
        ("avx512", "TRANSFORMER_FAST_CPU=avx512, but this CPU does not run them; there are avx2"),
        ("generic", "TRANSFORMER_FAST_CPU=generic, but this CPU does not run them; there are avx2"),
    ],
)
def test_kernels_that_cannot_run_are_refused(asked: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_library", lambda name: Path(name))
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        extension._choose_kernels(["avx2"], asked)


CHOICES = """
import os, sys, torch
os.environ["TRANSFORMER_FAST_CPU"] = "mmx"
import transformer_fast as tfast
from transformer_fast import extension
for name in ("mmx", sys.argv[1]):
    os.environ["TRANSFORMER_FAST_CPU"] = name
    try:
        tfast.embed(torch.tensor([0]), torch.ones(1, 4))
        print(extension.status())
        print(open("/proc/self/maps").read() if sys.platform == "linux" else "")
    except ValueError as error:
        print("ValueError:", error)
"""


@needs_extension
@pytest.mark.cover(1)
@pytest.mark.parametrize("name", extension.module().supported_instruction_sets() if extension.load() else [])
def test_the_environment_chooses_the_kernels(name: str) -> None:
    """At the first op; a wrong name is an error there. A process of its own: other libraries bring OpenMP runtimes."""
    done = python("-c", CHOICES, name)
    assert done.returncode == 0, done.stderr
    unknown, known, *maps = done.stdout.splitlines()
    assert unknown.startswith("ValueError: TRANSFORMER_FAST_CPU: expected one of")
    if extension._library(name) is None:
        assert f"TRANSFORMER_FAST_CPU={name}, but they were not built" in known
        return
    assert f", {name} kernels (as TRANSFORMER_FAST_CPU asks), " in known
    runtimes = {line.split()[-1] for line in maps if re.search(r"/lib(gomp|iomp5|omp)[-.]", line)}
    assert len(runtimes) <= 1, "the extension must run on the OpenMP runtime of torch"


@needs_extension
def test_kernels_of_another_build_are_refused(tmp_path: Path) -> None:
    path = extension._library(extension.build_info()["instruction_set"])
    other = tmp_path / path.name
    other.write_bytes(path.read_bytes().replace(b'"torch": "', b'"troch": "'))
    with pytest.raises(RuntimeError, match="comes from another build"):
        extension.module().load_kernels(str(other))
    empty = tmp_path / f"empty_{path.name}"
    empty.write_bytes(b"")
    with pytest.raises(RuntimeError, match="file too short"):
        extension.module().load_kernels(str(empty))


def setup_names() -> dict[str, Any]:
    """What setup.py defines."""
    source = (ROOT / "setup.py").read_text().rpartition("\nsetup(")[0]
    names: dict[str, Any] = {"__file__": str(ROOT / "setup.py"), "__name__": "transformer_fast_setup"}
    exec(compile(source, "setup.py", "exec"), names)
    return names


def test_the_module_is_built_without_the_kernels() -> None:
    """They are in the libraries of the instruction sets."""
    files = setup_names()["module_extension"]().sources
    assert "csrc/ops/norm.cpp" in files and len(files) == len(set(files))
    assert not [file for file in files if file.startswith("csrc/cpu/")]


def test_sets_to_build() -> None:
    names = setup_names()
    choose, known = names["instruction_sets"], list(names["known_sets"]())
    assert choose("all") == known and set(choose("host")) <= set(known)
    assert choose("baseline") == known[:1] and choose(",".join(known[:2])) == known[:2]
    assert choose("none") == []
    with pytest.raises(SystemExit, match=r"expected baseline, host, all, none, or names of .*, got 'mmx'"):
        choose("mmx")
    if extension.load():
        best = extension.module().supported_instruction_sets()[0]
        assert set(choose("host")) == {best, known[0]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "fma", "bmi2"}, ["avx2"]),
        ({"sse2"}, ["avx2"]),  # nothing runs there; what is built does elsewhere
        ({"avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}, ["avx2", "avx512"]),
        ({"avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16"},
         ["avx2", "avx512_bf16"]),
        (set(), ["avx2", "avx512", "avx512_bf16"]),  # not known
    ],
)  # fmt: skip
def test_sets_of_a_machine(flags: set[str], expected: list[str]) -> None:
    names = setup_names()
    names["known_sets"] = lambda: names["X86_SETS"]
    names["cpu_flags"] = lambda: flags
    assert names["instruction_sets"]("host") == expected


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("asked", "expected"), [(None, "host"), ("all", "all"), ("none", "none")])
def test_an_install_builds_for_this_machine(
    asked: str | None, expected: str, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All instruction sets are only for a wheel that other machines get: `make wheel` asks for them."""
    monkeypatch.delenv("TRANSFORMER_FAST_CPU_SETS", raising=False)
    if asked:
        monkeypatch.setenv("TRANSFORMER_FAST_CPU_SETS", asked)
    names = setup_names()
    extensions = [names["kernels_extension"](name, []) for name in names["known_sets"]()]
    build = names["Build"](Distribution({"ext_modules": extensions}))
    build.inplace = in_place
    build.ensure_finalized()
    wanted = [names["kernels_name"](name) for name in names["instruction_sets"](expected)]
    assert [extension.name for extension in build.extensions] == wanted


def test_make_wheel_builds_every_set() -> None:
    command = ["make", "-n", "-o", "setup", "wheel"]
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMER_FAST_CPU_SETS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "TRANSFORMER_FAST_CPU_SETS=${TRANSFORMER_FAST_CPU_SETS:-all}" in done.stdout


@pytest.mark.parametrize(("age", "stays"), [(10, False), (-10, True)])
def test_kernels_older_than_their_sources_do_not_stay(age: int, stays: bool, tmp_path: Path) -> None:
    names = setup_names()
    newest = max(file.stat().st_mtime for file in (ROOT / "csrc").rglob("*"))
    library = tmp_path / "old.so"
    library.touch()
    os.utime(library, (newest - age, newest - age))
    names["Build"].remove_older(None, [library, tmp_path / "missing.so"])
    assert library.exists() == stays


def test_explain_names_the_tile_of_the_kernels() -> None:
    assert extension.load(), extension.status()
    explain = importlib.import_module("transformer_fast.explain")  # the package has its function under this name
    assert extension.module().attention_tile == explain.NATIVE_TILE
