"""The C++ of ``make mutants``: one build with all faults that a switch can turn on, and one for each other fault."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mutant_rows.fault import ROOT, Fault, Unfit
from mutant_switches import HEADER, switched
from pythons import setup_names

FLAGS = ("-O0", "-w", "-fPIC")  # a third of the compiler's time with -O3, and the same numbers


class Libraries:
    """The module of a tree, and its kernels for this machine's best instruction set.

    Attributes:
        tree: the sources.
        folder: for the sources with switches, and for what is made of them.
        switched: the rows that need no build of their own.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree, self.folder, self.sources = tree, folder, folder / "sources"
        self.objects, self.faulty, self.kept = folder / "objects", folder / "faulty", folder / "libraries"
        self.compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        self.switched: list[Fault] = []
        os.environ["TRANSFORMER_FAST_CUDA"] = "0"

    def prepare(self, rows: Sequence[Fault]) -> None:
        """Compile libraries that are older than their sources, and copy them to the tree."""
        self._write_sources(rows)
        # Once: the kernels of a faulty build must fit the module, which is told by a digest of their sources.
        setup = setup_names(self.sources)
        setup["write_records"](self.folder, setup["torch"].__version__)
        for extension in _extensions(self.sources):
            stale = [source for source in extension.sources if self._is_stale(extension, source)]
            self._compile(self.sources, extension, stale, self.objects)
            if stale or not (self.kept / _library(extension)).exists():
                self._link(extension, self.kept / _library(extension))
        self.take_out()

    def plant(self, name: str) -> None:
        """Compile the libraries that contain a file of the tree, and copy them to the tree.

        Raises:
            Unfit: the compiler refuses the file.
        """
        for extension in _extensions(self.tree):
            concerned = [
                source for source in extension.sources if self.sources / name in self._parts(extension, source)
            ]
            self._compile(self.tree, extension, concerned, self.faulty)
            if concerned:
                self._link(extension, self.tree / _library(extension))

    def take_out(self) -> None:
        """Put the libraries into the tree in which no fault is on."""
        shutil.rmtree(self.faulty, ignore_errors=True)
        for extension in _extensions(self.sources):
            shutil.copy2(self.kept / _library(extension), self.tree / _library(extension))

    def _write_sources(self, faults: Sequence[Fault]) -> None:
        """Write the sources with switches that have changed."""
        files = [self.tree / "setup.py", *(file for file in (self.tree / "csrc").rglob("*") if file.is_file())]
        names = [str(file.relative_to(self.tree)) for file in files]
        for name in names:
            text, own = switched((self.tree / name).read_text(), [fault for fault in faults if fault.path == name])
            self.switched += own
            _write(self.sources / name, text)
        for file in set((self.sources / "csrc").rglob("*.*")) - {self.sources / name for name in names}:
            file.unlink()
        _write(self.folder / "planted.h", HEADER)

    def _is_stale(self, extension: Any, source: str) -> bool:
        compiled = _object(self.objects, extension, source)
        if not compiled.exists():
            return True
        parts = self._parts(extension, source)
        return any(not file.exists() or file.stat().st_mtime > compiled.stat().st_mtime for file in parts)

    def _parts(self, extension: Any, source: str) -> set[Path]:
        """Return the files from which an object was compiled."""
        text = _object(self.objects, extension, source).with_suffix(".d").read_text()
        names = text.replace("\\\n", " ").partition(":")[2].split()
        return {Path(os.path.normpath(self.sources / name)) for name in names}

    def _compile(self, root: Path, extension: Any, sources: list[str], folder: Path) -> None:
        folders = [*extension.include_dirs, self.folder, sysconfig.get_paths()["include"]]
        names = ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-DTORCH_EXTENSION_NAME={extension.name.rpartition('.')[2]}"]
        options = [*extension.extra_compile_args["cxx"], *FLAGS, *names, *(f"-I{folder}" for folder in folders)]
        for source in sources:
            compiled = _object(folder, extension, source)
            compiled.parent.mkdir(parents=True, exist_ok=True)
            ahead = ["-include", str(self.folder / "planted.h"), "-MMD"]
            self._run([*self.compiler, *options, *ahead, "-c", source, "-o", str(compiled)], root)

    def _link(self, extension: Any, library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        folders = self.faulty, self.objects
        both = [[_object(folder, extension, source) for folder in folders] for source in extension.sources]
        objects = [str(faulty if faulty.exists() else sound) for faulty, sound in both]
        libraries = [*(f"-L{name}" for name in extension.library_dirs), *(f"-l{name}" for name in extension.libraries)]
        self._run(
            [*self.compiler, "-shared", *objects, *extension.extra_link_args, *libraries, "-o", str(library)], self.tree
        )

    def _run(self, command: list[str], folder: Path) -> None:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            (self.folder / "build.log").write_bytes(done.stdout)
            raise Unfit(f"it does not build; see {self.folder / 'build.log'}")


@cache
def _extensions(root: Path) -> list[Any]:
    """The module and the kernels as setup.py describes them; their sources are named from `root`."""
    setup = setup_names(root)
    best = setup["instruction_sets"]("host")[-1]
    module, kernels = setup["module_extension"](), setup["kernels_extension"](best, setup["known_sets"]()[best][0])
    unit = setup["write_unit"](module.sources, root / "units")
    module.sources = [os.path.relpath(root / source, root) for source in unit]
    return [module, kernels]


def _object(folder: Path, extension: Any, source: str) -> Path:
    return (folder / extension.name / source).with_suffix(".o")


def _library(extension: Any) -> str:
    """The file of a library in a tree."""
    setup = setup_names(ROOT)
    package, _, name = extension.name.rpartition(".")
    if name != "_C":
        return f"{package}/{setup['kernels_file'](name)}"
    minor = ".".join(setup["torch"].__version__.split(".")[:2])
    return f"{package}/_C.torch{minor}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _write(file: Path, text: str) -> None:
    """Write a file, which keeps its time if it is as it was."""
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
