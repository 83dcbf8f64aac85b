"""Load the C++/CUDA extension, or report why loading failed and which command helps.

The extension has two parts. The library of the ops (``libtransformer_fast_ops.torch2.13.so``) serves one minor version
of torch, and every Python: it needs none. The module ``transformer_fast._C``
(``_C.torch2.13.cpython-311-x86_64-linux-gnu.so``) serves one minor version of torch and one of Python. There are the
eager doors of the ops, which leave out PyTorch's dispatcher, and what calls Python, the launches of Triton kernels. A
file's name says what it serves. A package may have several; those that fit are loaded. Where no module fits, the
dispatcher calls the native kernels.

The package imports even if its extension is missing, broken, built for another torch, or lacks kernels for this CPU;
:func:`status` names the problem. The build record is read from a file *before* the file is loaded, because an
extension built for another torch can crash the interpreter.

The CPU kernels are separate libraries, one per instruction set (``libtransformer_fast_cpu_avx2.so``,
``libtransformer_fast_cpu_avx512.so``, ...). Each serves every torch and every Python. The best library that the
processor can run is loaded, or the one that the environment variable ``TRANSFORMER_FAST_CPU`` names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import logging
import mmap
import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .function_mode import FunctionalMode

_LOG = logging.getLogger("transformer_fast")
_PACKAGE = Path(__file__).resolve().parent
_IN_A_CHECKOUT = "run `make setup`, or `pip install --no-build-isolation -e .`, in the folder of transformer_fast"
_INSTALLED = (
    "install it again from its sources, which builds it here: "
    "`pip install --force-reinstall --no-deps --no-build-isolation transformer_fast-*.tar.gz`"
)
_REMEDY = _IN_A_CHECKOUT if (_PACKAGE.parent / "setup.py").is_file() else _INSTALLED
_MEANWHILE = "the eager reference runs instead: the same numbers, slower"
_WITHOUT_MODULE = (
    "the dispatcher calls the same kernels, 5 to 40 microseconds slower per call, and Triton kernels are not launched"
)
_MARK = b"transformer_fast build: "
INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "generic")
"""Instruction sets with kernels: AVX-512 with and without bfloat16 products, AVX2 with FMA, any CPU that is not x86."""


def load() -> bool:
    """Load ops (``torch.ops.transformer_fast``) and native kernels on the first call; return True if they are loaded.

    Raises:
        ValueError: if ``TRANSFORMER_FAST_CPU`` names kernels that do not exist or that this CPU cannot run.
    """
    return _outcome().loaded


@functools.cache
def module() -> ModuleType | None:
    """``transformer_fast._C``, the eager doors; None if it cannot be loaded, while the ops may be there."""
    return _outcome().module if load() else None


def library() -> ctypes.CDLL | None:
    """The library of the ops, with the C functions of csrc/ops/library.cpp; None if it cannot be loaded."""
    return _outcome().library if load() else None


def status() -> str:
    """State of the extension in one line: its build, or the problem, the command that helps, and the fallback."""
    if not load():
        return f"{obstacle()}; {_MEANWHILE}"
    missing = module_obstacle()
    return _outcome().message + (f"; but {missing}; {_WITHOUT_MODULE}" if missing else "")


def obstacle() -> str:
    """Reason why the extension is not loaded, and the command to run; empty if it is loaded."""
    return "" if load() else _outcome().message


def module_obstacle() -> str:
    """Reason why :func:`module` is None; empty if it is not."""
    return _outcome().module_message if load() else obstacle()


def build_info() -> dict[str, Any]:
    """Record of the extension's build; empty if it is not loaded.

    Keys: ``torch``, ``cuda`` and ``arch_list`` (None for a CPU build), ``compiler``; ``instruction_set``, the entry of
        :data:`INSTRUCTION_SETS` whose kernels are in use; ``file``, the name of the library's file; and ``module``,
        that of the module of eager doors, None if it is not loaded.
    """
    return dict(_outcome().record or {})


def config() -> dict[str, Any]:
    """Return the extension and the kernels that run here, with the versions of their build.

    Returns:
        The keys of :func:`build_info`, None if the extension is not loaded; and ``status``, the text of :func:`status`.

    Example:
        >>> sorted(tfast.__config__())
        ['arch_list', 'compiler', 'cuda', 'file', 'instruction_set', 'module', 'status', 'torch']
    """
    keys = ("file", "module", "instruction_set", "torch", "cuda", "arch_list", "compiler")
    return {**dict.fromkeys(keys), **build_info(), "status": status()}


def usable_instruction_sets() -> list[str]:
    """Instruction sets that this CPU runs and that were built, best first: the values of ``TRANSFORMER_FAST_CPU``."""
    if not load():
        return []
    return [name for name in supported_instruction_sets() if _library(name)]


def supported_instruction_sets() -> list[str]:
    """Instruction sets with kernels that this CPU runs, built or not, best first; empty if no extension is loaded."""
    return _supported(_outcome().library) if load() else []


class _Outcome(NamedTuple):
    """Result of loading: success, a message, and the build record."""

    loaded: bool
    message: str
    record: dict[str, Any] | None = None
    library: ctypes.CDLL | None = None
    module: ModuleType | None = None
    module_message: str = ""


@functools.cache
def _outcome() -> _Outcome:
    """Load the extension once and log the outcome."""
    outcome = _load_and_describe()
    _LOG.info(
        "the C++ extension is %s", outcome.message if outcome.loaded else f"not loaded: {outcome.message}; {_MEANWHILE}"
    )
    return outcome


def _load_and_describe() -> _Outcome:
    path = _PACKAGE / f"libtransformer_fast_ops.torch{_minor(torch.__version__)}.so"
    if not path.is_file():
        return _Outcome(False, f"{_missing_library()}: {_REMEDY}")
    built = _read_build(path)
    if reason := _unfit(path, built):
        return _Outcome(False, reason)
    try:
        torch.ops.load_library(str(path))
        library = _declared(ctypes.CDLL(str(path)))
    except OSError as error:
        return _Outcome(False, f"the C++ extension {path.name} does not load ({error}): {_REMEDY}")
    except AttributeError:
        return _Outcome(False, f"the C++ extension {path.name} is older than the package: {_REMEDY}")
    chosen, reason = _choose_kernels(_supported(library), os.environ.get("TRANSFORMER_FAST_CPU", ""))
    if chosen is None:
        return _Outcome(False, reason)
    if error := load_kernels(library, _library(chosen)):
        return _Outcome(False, f"the kernels for {chosen} do not load ({error.splitlines()[0]}): {_REMEDY}")
    device = f"CUDA {built['cuda']} for {built['arch_list']}" if built["cuda"] else "CPU only"
    message = f"loaded: {device}, {chosen} kernels{reason}, torch {built['torch']}, {built['compiler']}, {path.name}"
    module, missing = _load_module(path, built.pop("sources"))
    file = Path(module.__file__).name if module else None
    record = {**built, "instruction_set": chosen, "file": path.name, "module": file}
    return _Outcome(True, message, record, library, module, missing)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the C functions of the library of the ops; AttributeError if one is missing."""
    library.transformer_fast_instruction_sets.restype = ctypes.c_char_p
    library.transformer_fast_load_kernels.restype = ctypes.c_char_p
    library.transformer_fast_onednn_is_faster.argtypes = [ctypes.c_int64] * 3
    library.transformer_fast_onednn_is_faster.restype = ctypes.c_bool
    _ = library.transformer_fast_send_products_to_onednn, library.transformer_fast_library
    return library


def _supported(library: ctypes.CDLL) -> list[str]:
    return [name for name in library.transformer_fast_instruction_sets().decode().split(",") if name]


def load_kernels(library: ctypes.CDLL, path: Path) -> str:
    """Use the library of kernels at a path from now on; return what went wrong, or ""."""
    return (library.transformer_fast_load_kernels(os.fsencode(path)) or b"").decode()


def _load_module(library: Path, sources: str) -> tuple[ModuleType | None, str]:
    """The module of eager doors for the library of the ops at a path, of these sources; or the reason for none."""
    path = _module_file()
    if path is None:
        return None, _missing_module()
    built = _read_build(path)
    if reason := _unfit(path, built):
        return None, reason
    if built["sources"] != sources:
        return None, f"the C++ extension {path.name} comes from other sources than {library.name}: {_REMEDY}"
    try:
        module = _imported(path)
        module.connect(str(library))
        module.launch_on_cpu(os.environ.get("TRITON_INTERPRET") == "1")
        module.choose_triton(os.environ.get("TRANSFORMER_FAST_BACKEND") == "triton")
        module.set_functional_mode(FunctionalMode)
    except (ImportError, RuntimeError) as error:
        return None, f"the C++ extension {path.name} does not load ({str(error).splitlines()[0]}): {_REMEDY}"
    except AttributeError:
        return None, f"the C++ extension {path.name} is older than the package: {_REMEDY}"
    return module, ""


def _choose_kernels(supported: list[str], asked: str) -> tuple[str | None, str]:
    """Instruction set to load, or None, and the reason. `supported`: the instruction sets of the CPU, best first."""
    built = [name for name in INSTRUCTION_SETS if _library(name)]
    usable = [name for name in supported if name in built]
    if asked:
        if asked not in INSTRUCTION_SETS:
            raise ValueError(f"TRANSFORMER_FAST_CPU: expected one of {', '.join(INSTRUCTION_SETS)}, got {asked!r}")
        if asked not in usable:
            lack = "this CPU does not run them" if asked not in supported else "they were not built"
            rest = f"; there are {', '.join(usable)}" if usable else ""
            raise ValueError(f"TRANSFORMER_FAST_CPU={asked}, but {lack}{rest}")
        return asked, " (as TRANSFORMER_FAST_CPU asks)"
    if usable:
        return usable[0], ""
    if not supported:
        return None, "this CPU is older than the kernels: they need AVX2 and FMA"
    lack = f"no kernels for {' or '.join(supported)} were built, only for {', '.join(built) or 'nothing'}"
    return None, f"{lack}: {_REMEDY}"


def _library(instruction_set: str) -> Path | None:
    path = _PACKAGE / f"libtransformer_fast_cpu_{instruction_set}.so"
    return path if path.is_file() else None


def _module_file() -> Path | None:
    candidates = (_PACKAGE / f"_C.torch{_minor(torch.__version__)}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _missing_library() -> str:
    """Say what is missing: every extension, or the extension for this torch."""
    names = (re.match(r"libtransformer_fast_ops\.torch([\d.]+)\.so", path.name) for path in _PACKAGE.glob("*.so"))
    there = sorted((name[1] for name in names if name), key=lambda version: [int(part) for part in version.split(".")])
    if not there:
        return "the C++ extension is missing"
    return f"there is no C++ extension for torch {_minor(torch.__version__)}, only for torch {', '.join(there)}"


def _missing_module() -> str:
    """Say which Pythons have a module of eager doors for this torch."""
    minor = _minor(torch.__version__)
    names = (re.match(r"_C\.torch([\d.]+)\.cpython-(\d)(\d+)-", path.name) for path in _PACKAGE.glob("_C.torch*"))
    there = sorted((int(name[2]), int(name[3])) for name in names if name and name[1] == minor)
    pythons = ", ".join(f"{major}.{number}" for major, number in there)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"there is no module of eager calls for Python {here}" + (f", only for Python {pythons}" if pythons else "")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _unfit(path: Path, built: dict[str, Any] | None) -> str:
    """Reason why a file of this build record must not be loaded, or ""."""
    if built is None:
        return f"the C++ extension {path.name} is broken (no build record in it): {_REMEDY}"
    if not _fits(built):
        message = f"the C++ extension was built for torch {built['torch']}, but this is torch {torch.__version__}"
        return f"{message}: {_REMEDY}; or `pip install torch=={built['torch']}`"
    return ""


def _fits(built: dict[str, Any]) -> bool:
    """Return True if an extension of this record runs with the torch here: it is the same, or both are releases of one
    minor version, of which a CPU build runs with all.
    """
    if built["cuda"] is not None or built["torch"] == str(torch.__version__):
        return built["torch"] == str(torch.__version__)
    release = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+))?")
    there, here = release.fullmatch(built["torch"]), release.fullmatch(torch.__version__)
    return bool(there and here) and there[1] == here[1]


def _imported(path: Path) -> ModuleType:
    """The module in a file of any name."""
    name = "transformer_fast._C"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


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
    return built if {"torch", "cuda", "arch_list", "compiler", "sources"} <= built.keys() else None
