"""Decisions of setup.py: CUDA, instruction sets, and removal of older libraries."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from project import setup_names
from setuptools import Distribution
from subprocesses import ROOT, python

from transformer_fast import extension


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
    """An obstacle gives one line; if CUDA was requested, it ends the build."""
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


@pytest.mark.parametrize(("installed", "asked", "used"), [(True, "", True), (True, "g++", False), (False, "", False)])
def test_ccache_is_used_where_it_is_and_no_compiler_is_asked_for(
    installed: bool, asked: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        (tmp_path / "ccache").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", asked)
    setup_names()["use_ccache"](tmp_path / "build")
    link = tmp_path / "build/ccache/c++"
    assert os.environ["CXX"] == (str(link) if used else asked)
    assert not used or link.resolve() == tmp_path / "ccache"


def test_each_source_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are in the libraries of the instruction sets, and what needs Python is in the module."""
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "0")
    names = setup_names()
    ops, module = (names[f"{part}_extension"]().sources for part in ("ops", "module"))
    kernels = names["kernels_extension"]("avx2", []).sources
    assert "csrc/ops/norm.cpp" in ops and "csrc/python/doors.cpp" in module
    assert all(file.startswith("csrc/cpu/") for file in kernels)
    built = sorted([*kernels, *ops, *module])
    assert built == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp"))


def test_sets_to_build() -> None:
    names = setup_names()
    choose, known = names["instruction_sets"], list(names["known_sets"]())
    assert choose("all") == known and set(choose("host")) <= set(known)
    assert choose("baseline") == known[:1] and choose(",".join(known[:2])) == known[:2]
    assert choose("none") == []
    with pytest.raises(SystemExit, match=r"expected baseline, host, all, none, or names of .*, got 'mmx'"):
        choose("mmx")
    if extension.load():
        best = extension.supported_instruction_sets()[0]
        assert set(choose("host")) == {best, known[0]}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "fma", "bmi2"}, ["avx2"]),
        ({"sse2"}, ["avx2"]),  # the build machine runs nothing; the built kernels run elsewhere
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
    """Only `make wheel` builds all instruction sets, for wheels of other machines."""
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


def test_libraries_are_built_where_they_are_looked_for() -> None:
    """distutils writes a library by the last part of its name; setuptools copies it by the whole name."""
    names = setup_names()
    name = names["kernels_name"]("avx2")
    build = names["Build"](Distribution({"ext_modules": [names["kernels_extension"]("avx2", [])]}))
    build.ensure_finalized()
    written, copied = build.get_ext_fullpath(name), Path(build.build_lib, build.get_ext_filename(name))
    assert Path(written) == copied and copied.name == "libtransformer_fast_cpu_avx2.so"


NINJA = """
import os, subprocess, sys
print("before", flush=True)
lines = [
    "[1/3] /x/ccache/c++ -MMD -MF /t/build/transformer_fast.cpu_avx2/csrc/cpu/norm/forward.o.d -I/x -c -c "
    "/x/csrc/cpu/norm/forward.cpp -o /t/build/transformer_fast.cpu_avx2/csrc/cpu/norm/forward.o -O3",
    "/x/csrc/cpu/a.cpp:1:2: warning: a whole [1/3] line",
    "[2/3] c++ -MMD -c -c /t/build/units/module.cpp -o /t/build/transformer_fast._C/t/units/module.o -O3",
    "FAILED: [code=1] /t/b.o ",
    "c++ -MMD -MF /t/b.o.d -c -c /x/csrc/cpu/b.cpp -o /t/b.o",
    "/x/csrc/cpu/b.cpp:7:1: error: expected ';'",
]
names = {"__file__": "setup.py", "__name__": "names"}
exec(open("setup.py").read().rpartition("\\nsetup(")[0], names)
with names["one_line_per_unit"]():
    subprocess.run(["printf", "%s\\\\n", *lines], stdout=1, check=True)
print("after")
"""


def test_a_file_is_one_line_and_what_a_compiler_says_is_whole() -> None:
    result = python("-c", NINJA)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "before",
        "transformer_fast: cpu_avx2 [1/3] norm/forward.cpp",
        "/x/csrc/cpu/a.cpp:1:2: warning: a whole [1/3] line",
        "transformer_fast: _C [2/3] units/module.cpp",
        "FAILED: [code=1] /t/b.o ",
        "c++ -MMD -MF /t/b.o.d -c -c /x/csrc/cpu/b.cpp -o /t/b.o",
        "/x/csrc/cpu/b.cpp:7:1: error: expected ';'",
        "after",
    ]
