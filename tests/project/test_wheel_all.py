"""Wheel for every torch and every Python: compiled modules, refused modules, and the wheel of setup.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import wheel_all
from project import ROOT, setup_names

COMPILER = shutil.which(os.environ.get("CXX", "c++").split()[0])


def headers(folder: Path, version: str) -> wheel_all.Torch:
    return wheel_all.Torch(version, wheel_all.include_folders(folder / f"torch-{version}"), folder / "symbols")


def test_modules_are_for_each_pair_ops_for_each_torch_and_kernels_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_all, "FOLDER", tmp_path)
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "0")
    monkeypatch.setenv("TRANSFORMER_FAST_CPU_SETS", "all")
    setup = setup_names()
    plan = wheel_all.Plan(setup)
    plan.kernels(headers(tmp_path, "2.13.0"))
    ops = [plan.ops(headers(tmp_path, version)) for version in ("2.12.1", "2.13.0")]
    modules = [plan.module(headers(tmp_path, version), sys.executable) for version in ("2.12.1", "2.13.0")]
    tag = f"{sys.implementation.cache_tag}-"
    assert [path.name.partition(tag)[0] for path in modules] == ["_C.torch2.12.", "_C.torch2.13."]
    assert [path.name for path in ops] == [f"libtransformer_fast_ops.torch{minor}.so" for minor in ("2.12", "2.13")]
    kernels = [path.name for path in plan.made if path not in modules + ops]
    assert kernels == [f"libtransformer_fast_cpu_{name}.so" for name in setup["known_sets"]()]
    text = "\n".join(plan.lines)
    files = len(list((ROOT / "csrc/cpu").rglob("*.cpp"))) - sum(
        len(unit) - 1 for unit in setup["KERNEL_UNITS"].values()
    )
    assert text.count(": compile ") == len(kernels) * files + len(ops) + len(modules)
    linked_with_python = [line for line in plan.lines if "-ltorch_python" in line]
    assert len(linked_with_python) == len(modules), "only a module needs Python"
    objects = [line.split()[1] for line in plan.lines if ": compile " in line]
    assert len(objects) == len(set(objects)), "two files are compiled into one object"
    of_older = text.partition("_C.torch2.12.")[2].partition("_C.torch2.13.")[0]
    assert f"-I{tmp_path}/torch-2.12.1" in of_older and f"-I{tmp_path}/torch-2.13.0" not in of_older
    assert '"torch": "2.12.1"' in (tmp_path / "config-2.12/build_config.h").read_text()


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler and nm")
def test_a_module_that_needs_what_its_torch_has_not_is_refused(tmp_path: Path) -> None:
    source, module = tmp_path / "module.cpp", tmp_path / "module.so"
    source.write_text("namespace at { void kept(); void gone(); }\nvoid f() { at::kept(); at::gone(); }\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(module)], check=True)
    here = headers(tmp_path, "2.13.0")
    here.symbols.write_text("_ZN2at4keptEv\nPyList_New\n")
    assert wheel_all.missing_symbols(module, here) == ["_ZN2at4goneEv"]


def test_a_wheel_of_what_was_compiled_is_for_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools", "77", reason="pyproject.toml builds with setuptools>=77")
    tree, prebuilt = tmp_path / "tree", tmp_path / "prebuilt"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    (tree / "transformer_fast").mkdir()
    shutil.copy(ROOT / "transformer_fast/__init__.py", tree / "transformer_fast")
    libraries = {
        f"transformer_fast/{name}" for name in ("_C.torch2.98.cpython-39.so", "libtransformer_fast_cpu_avx2.so")
    }
    for name in libraries:
        (prebuilt / name).parent.mkdir(parents=True, exist_ok=True)
        (prebuilt / name).write_text("compiled")
    stale = tree / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/transformer_fast/_C.old.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    monkeypatch.setattr(wheel_all, "ROOT", tree)
    monkeypatch.setattr(wheel_all, "FOLDER", tmp_path)
    monkeypatch.setattr(wheel_all.shutil, "which", lambda *_, **__: None)  # auditwheel takes libraries only
    monkeypatch.setenv("TRANSFORMER_FAST_CUDA", "0")
    wheel = wheel_all.make_wheel(prebuilt, tmp_path / "dist")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.endswith(".so")} == libraries


def test_ci_builds_it_where_the_tag_is_granted() -> None:
    workflow = (ROOT / ".github/workflows/wheel.yml").read_text()
    for name in wheel_all.NOT_IN_THE_WHEEL:
        assert f"--exclude {name}" in workflow, name
    assert "manylinux_2_28" in workflow and "tools/wheel_all.py --compile-only" in workflow
