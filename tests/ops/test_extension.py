"""Loading of the extension, and messages if it is missing, broken or built for another torch."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from project import setup_names
from subprocesses import ROOT, program, python

import transformer_fast as tfast
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
assert tfast.__config__()["status"] == extension.status() and tfast.__config__()["file"] is None
print(extension.load(), len(ours), extension.status(), *ours, same, sep="\\n")
try:
    with tfast.backend("native"):
        tfast.embed(torch.tensor([0]), torch.ones(1, 4))
except tfast.BackendError as error:
    print(error)
"""
BUILD = {"torch": torch.__version__, "cuda": None, "arch_list": None, "compiler": "c++", "sources": "0"}
MINOR = ".".join(torch.__version__.split(".")[:2])
STUBS = {
    "missing": (None, "is missing"),
    "empty": (b"", "is broken (no build record in it)"),
    "not a build of ours": (b"\x7fELF" + bytes(1000), "is broken (no build record in it)"),
    "cut off": (b'transformer_fast build: {"torch": "2.1', "is broken (no build record in it)"),
    "another torch": (
        {**BUILD, "torch": "2.9.9+cu999"},
        f"was built for torch 2.9.9+cu999, but this is torch {torch.__version__}",
    ),
    "CUDA of another torch": (
        {**BUILD, "torch": f"{MINOR}.99+cu999", "cuda": "99.9"},
        f"was built for torch {MINOR}.99+cu999, but this is torch {torch.__version__}",
    ),
    "does not load": (BUILD, "does not load ("),
}


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the package without its extension, in a checkout with a setup.py."""
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
    assert ("; or `pip install torch==" in status) == ("another torch" in stub)


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
    """Return, for this file as the extension: its status, the one warning of two calls, and the error of a request."""
    for old in (package / "transformer_fast").glob("*.so"):
        old.unlink()
    file = package / "transformer_fast" / f"libtransformer_fast_ops.torch{MINOR}.so"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else record(content))
    output = program(PROGRAM, cwd=package, PYTHONPATH=str(package), TRANSFORMER_FAST_BACKEND="auto")
    loaded, warned, status, warning, as_the_reference, refused = output.strip().split("\n")
    assert loaded == "False" and warned == "1" and as_the_reference == "True"
    return status, warning, refused


@pytest.mark.skipif(sys.platform != "linux", reason="names of files as Linux has them")
def test_without_an_extension_for_this_torch_the_others_are_named(package: Path) -> None:
    (package / "setup.py").touch()
    useless_extension(package, None)
    for version in ("2.98", "2.101"):
        (package / f"transformer_fast/libtransformer_fast_ops.torch{version}.so").touch()
    status = program(PROGRAM, cwd=package, PYTHONPATH=str(package), TRANSFORMER_FAST_BACKEND="auto").split("\n")[2]
    assert status.startswith(
        f"there is no C++ extension for torch {MINOR}, only for torch 2.98, 2.101: run `make setup`"
    )


@pytest.mark.parametrize(
    ("built", "here", "fits"),
    [
        ({"torch": "2.13.0+cpu", "cuda": None}, "2.13.0+cpu", True),
        ({"torch": "2.13.0+cpu", "cuda": None}, "2.13.1", True),
        ({"torch": "2.13.0", "cuda": None}, "2.13.0+cu130", True),
        ({"torch": "2.13.0", "cuda": None}, "2.14.0", False),
        ({"torch": "2.13.0", "cuda": None}, "2.13.0a0+git123", False),
        ({"torch": "2.13.0.dev20260101", "cuda": None}, "2.13.0", False),
        ({"torch": "2.13.0.dev20260101", "cuda": None}, "2.13.0.dev20260101", True),
        ({"torch": "2.13.0+cu130", "cuda": "13.0"}, "2.13.0+cu130", True),
        ({"torch": "2.13.0+cu130", "cuda": "13.0"}, "2.13.0+cpu", False),
    ],
)
def test_an_extension_fits_the_releases_of_one_minor_version(
    built: dict[str, str | None], here: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", here)
    assert extension._fits(built) is fits


def record(build: dict[str, object]) -> bytes:
    return b"\x7fELF" + bytes(100) + b"transformer_fast build: " + json.dumps(build).encode() + b"\n" + bytes(100)


needs_extension = pytest.mark.skipif(not extension.load(), reason=extension.status())


@needs_extension
def test_the_loaded_extension_tells_what_it_is() -> None:
    info = extension.build_info()
    chosen, file, module = info.pop("instruction_set"), info.pop("file"), info.pop("module")
    assert Path(extension.module().__file__).name == module and f"_C.torch{MINOR}." in module
    assert file == Path(extension.library()._name).name == f"libtransformer_fast_ops.torch{MINOR}.so"
    assert tfast.__config__() == {**extension.build_info(), "status": extension.status()}
    assert info.keys() == BUILD.keys() - {"sources"} and info["torch"] == torch.__version__
    assert chosen in extension.supported_instruction_sets()
    assert re.match(r"\S+ \d+\.\d+", info["compiler"])
    info["torch"] = "changed"
    assert extension.build_info()["torch"] == torch.__version__
    assert extension.status().startswith("loaded: ") and f"{chosen} kernels" in extension.status()
    assert extension.status().endswith(file)


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
@pytest.mark.parametrize("name", extension.supported_instruction_sets())
def test_the_environment_chooses_the_kernels(name: str) -> None:
    """The variable is read at the first op, where a wrong name is an error. The op runs in a new process, because
    other libraries bring OpenMP runtimes."""
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
def test_kernels_of_other_sources_are_refused(tmp_path: Path) -> None:
    path = extension._library(extension.build_info()["instruction_set"])
    other = tmp_path / path.name
    digest = setup_names()["kernels_digest"]()
    assert path.read_bytes().count(digest.encode()) == 1
    other.write_bytes(path.read_bytes().replace(digest.encode(), digest[::-1].encode()))
    library = extension.library()
    said = extension.load_kernels(library, other)
    assert f"comes from other sources: {digest[::-1]}, where this library expects" in said
    empty = tmp_path / f"empty_{path.name}"
    empty.write_bytes(b"")
    assert "file too short" in extension.load_kernels(library, empty)


THREADS = """
import os, sys, threading, torch
import transformer_fast as tfast
torch.set_num_threads(int(sys.argv[1]))
x = torch.randn(4096, 64)
tfast.embed(torch.tensor([0]), torch.ones(1, 4))  # loads the extension
def call():
    before = len(os.listdir("/proc/self/task"))
    tfast.layer_norm(x, None, None)
    print(1 + len(os.listdir("/proc/self/task")) - before)
thread = threading.Thread(target=call)
thread.start(), thread.join()
"""


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("count", [1, 3])
def test_kernels_use_as_many_threads_as_torch_in_a_new_thread_too(count: int) -> None:
    """OpenMP would otherwise take the number of the environment in a new thread."""
    done = python("-c", THREADS, str(count), OMP_NUM_THREADS="2")
    assert done.returncode == 0 and int(done.stdout) == count, done.stdout + done.stderr


def test_explain_names_the_tile_of_the_kernels() -> None:
    assert extension.load(), extension.status()
    explain = importlib.import_module("transformer_fast.explain")  # the package has its function under this name
    assert extension.module().attention_tile == explain.NATIVE_TILE
