"""Loads the C++/CUDA extension ``transformer_fast._C``, or says why it cannot and what to run.

Nothing here raises: a package whose extension is missing, broken, built for another torch or for another CPU still
imports, and :func:`status` tells which it is. The text the build left in the file is read *before* the file is
loaded, since a module built for another torch can crash the interpreter instead of failing.
"""

from __future__ import annotations

import functools
import importlib
import json
import mmap
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parent.parent
_IN_A_CHECKOUT = "run `make setup`, or `pip install --no-build-isolation -e .`, in the folder of transformer_fast"
_INSTALLED = (
    "install it again from its sources, which builds it here: "
    "`pip install --force-reinstall --no-deps --no-build-isolation transformer_fast-*.tar.gz`"
)
_REMEDY = _IN_A_CHECKOUT if (_PACKAGE.parent / "setup.py").is_file() else _INSTALLED
_MEANWHILE = "until then the eager reference runs instead: the same numbers, slower"
_MARK = b"transformer_fast build: "


def load() -> bool:
    """Whether the native kernels (``torch.ops.transformer_fast_native``) are there; loads them on the first call."""
    return _outcome()[0]


def module() -> ModuleType | None:
    """``transformer_fast._C``, or None if it cannot be loaded."""
    return sys.modules["transformer_fast._C"] if load() else None


def status() -> str:
    """One line for people: loaded and with what, or what is wrong, what to run, and what runs until then."""
    return _outcome()[1] if load() else f"{obstacle()}; {_MEANWHILE}"


def obstacle() -> str:
    """Why the extension is not loaded and what to run; empty if it is."""
    return "" if load() else _outcome()[1]


def build_info() -> dict[str, Any]:
    """What the extension was built with; empty if it is not loaded.

    Keys: ``torch``, ``cuda`` and ``arch_list`` (None for a CPU build), ``native_arch``, ``compiler``, ``vector``
    ("avx512", "avx2" or "baseline"), ``cpu_features``.
    """
    return dict(_outcome()[2])


@functools.cache
def _outcome() -> tuple[bool, str, dict[str, Any]]:
    path = _find()
    if path is None:
        return False, f"the C++ extension is missing: {_REMEDY}", {}
    built = _read_build(path)
    if built is None:
        return False, f"the C++ extension {path.name} is broken (no build record in it): {_REMEDY}", {}
    if built["torch"] != torch.__version__:
        message = f"the C++ extension was built for torch {built['torch']}, but this is torch {torch.__version__}"
        return False, f"{message}: {_REMEDY}; or `pip install torch=={built['torch']}`", {}
    if lacking := _lacking(built["cpu_features"]):
        message = f"the C++ extension was built for a CPU with {', '.join(lacking)}, which this one lacks"
        return False, f"{message}: {_REMEDY} on this machine", {}
    try:
        importlib.import_module("transformer_fast._C")
    except ImportError as error:
        return False, f"the C++ extension {path.name} does not load ({error}): {_REMEDY}", {}
    device = f"CUDA {built['cuda']} for {built['arch_list']}" if built["cuda"] else "CPU only"
    return True, f"loaded: {device}, {built['vector']} vectors, torch {built['torch']}, {built['compiler']}", built


def _find() -> Path | None:
    candidates = (_PACKAGE / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _read_build(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = content.find(_MARK)
            if start < 0:
                return None
            content.seek(start + len(_MARK))
            built = json.loads(content.readline())
    except (OSError, ValueError):
        return None
    return built if {"torch", "cuda", "arch_list", "vector", "cpu_features", "compiler"} <= built.keys() else None


def _lacking(features: list[str]) -> list[str]:
    """Those of the CPU features that this machine does not have (empty where there is no /proc/cpuinfo to ask)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    present = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    return [feature for feature in features if present and feature not in present]
