"""Build one wheel for every torch of TORCHES and every Python of tools/project.py that this machine has.

    python tools/wheel_all.py            # of this checkout, into dist
    python tools/wheel_all.py --clone    # of a clean clone, into build/release/dist

The ops are compiled once per torch, the module of eager calls once per pair of torch and Python, the kernels once per
instruction set. A Python without a module, such as one that this machine does not have, calls the ops by the
dispatcher. Only the headers of torch are needed: those of the installed torch, or those of a wheel from the registry
(half a gigabyte, of which only the headers are kept). Ninja runs one compiler at a time (``MAX_JOBS``: more) and keeps
object files, so the command continues an interrupted run.

A library that needs a symbol which its torch does not have is refused. setup.py makes the wheel from the compiled files
(``TRANSFORMER_FAST_PREBUILT``). If auditwheel and patchelf are installed, the wheel gets the tag of auditwheel.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from project import ROOT, pythons, setup_names

TORCHES = ("2.11", "2.12", "2.13", "2.14", "2.15")
FOLDER = ROOT / "build/wheel"
LIBRARIES = ("libc10", "libtorch_cpu", "libtorch_python")  # the last for the module only
WHERE = "import sysconfig; print(sysconfig.get_path('include'), sysconfig.get_config_var('EXT_SUFFIX'), sep='\\n')"
# auditwheel: these come with torch, and are loaded before the extension is.
NOT_IN_THE_WHEEL = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
MEGABYTES = 25
RULES = """
rule compile
  command = $compiler -MMD -MF $out.d -DNDEBUG -fwrapv -fPIC $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = $compiler -shared $in $flags -o $out
"""


@dataclasses.dataclass(frozen=True)
class Torch:
    """The headers of a torch.

    Attributes:
        version: of the torch that they came with, "2.12.1".
        includes: their folders.
        symbols: a file with the names that its libraries export, one per line.
    """

    version: str
    includes: tuple[Path, ...]
    symbols: Path

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


def headers_of(minor: str, python: str) -> Torch:
    """The headers of the newest torch of a minor version; they are the same for every Python."""
    folder = FOLDER / f"torch{minor}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
            fetched = Path(temporary)
            say(f"torch {minor}: downloading a wheel, for its headers")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            run([*pip, "--python-version", python, "--dest", str(fetched), f"torch=={minor}.*"])
            (wheel,) = fetched.glob("torch-*.whl")
            (fetched / "kept").mkdir()
            unpack(wheel, fetched / "kept")
            (fetched / "kept").rename(folder)
    return Torch((folder / "version").read_text(), include_folders(folder / "torch/include"), folder / "symbols")


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel of torch: return its headers, the names in its libraries, and its version."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as temporary:
        headers = [name for name in archive.namelist() if name.startswith("torch/include/")]
        archive.extractall(folder, headers)
        libraries = [archive.extract(f"torch/lib/{name}.so", temporary) for name in LIBRARIES]
        write_symbols(libraries, folder / "symbols")
    (folder / "version").write_text(wheel.name.split("-")[1])


def headers_in_use() -> Torch:
    home = Path(torch.__file__).parent
    symbols = FOLDER / f"symbols-{torch.__version__}"
    if not symbols.exists():
        write_symbols([str(home / f"lib/{name}.so") for name in LIBRARIES], symbols)
    return Torch(str(torch.__version__), include_folders(home / "include"), symbols)


def include_folders(folder: Path) -> tuple[Path, ...]:
    return folder, folder / "torch/csrc/api/include"


def write_symbols(libraries: list[str], file: Path) -> None:
    listed = output(["nm", "--dynamic", "--defined-only", "--format=just-symbols", *libraries])
    file.write_text("".join(sorted({f"{line.partition('@')[0]}\n" for line in listed.splitlines() if line})))


class Plan:
    """Work of ninja: the text of its build file, and the libraries that it makes."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup, self.made = setup, []
        self.ops_extension, self.module_extension = setup["ops_extension"](), setup["module_extension"]()
        self.lines = [f"builddir = {FOLDER}", f"compiler = {os.environ.get('CXX', 'c++')}{RULES}"]

    def library(self, name: str, sources: list[str], flags: list[str], link: list[str]) -> Path:
        """Add a library that is compiled from these sources."""
        objects = []
        for source in sources:
            path = ROOT / source  # that of a unit is absolute
            objects.append(f"{FOLDER}/objects/{name}/{path.parent.name}/{path.stem}.o")
            self.lines += [f"build {objects[-1]}: compile {path}", f"  flags = {shlex.join(flags)}"]
        target = FOLDER / "libraries" / name
        self.lines += [f"build {target}: link {' '.join(objects)}", f"  flags = {shlex.join(link)}"]
        self.made.append(target)
        return target

    def kernels(self, headers: Torch) -> None:
        """Add the kernels of every instruction set, or of those in TRANSFORMER_FAST_CPU_SETS."""
        config = self._config(headers)
        for name in self.setup["instruction_sets"](os.environ.get("TRANSFORMER_FAST_CPU_SETS", "all")):
            flags, _ = self.setup["known_sets"]()[name]
            built = self.setup["kernels_extension"](name, flags)
            flags = [*built.extra_compile_args["cxx"], *included(ROOT / "csrc", config, *headers.includes)]
            self.library(
                self.setup["kernels_file"](built.name.rpartition(".")[2]),
                self.setup["in_units"](FOLDER / "units", built.sources),
                flags,
                [*built.extra_link_args, *library_folders()],
            )

    def _config(self, headers: Torch) -> Path:
        folder = FOLDER / f"config-{headers.minor}"
        self.setup["write_records"](folder, headers.version)
        return folder

    def ops(self, headers: Torch) -> Path:
        """Add the library of the ops for a torch; return its file."""
        return self._unit(self.setup["ops_file"](headers.minor), self.ops_extension, headers, [], LIBRARIES[:2])

    def _unit(self, file: str, built: Any, headers: Torch, further: list[str], libraries: tuple[str, ...]) -> Path:
        """Add a library that is one unit of C++."""
        unit = self.setup["in_units"](FOLDER / "units", built.sources)
        folders = included(ROOT / "csrc", self._config(headers), *headers.includes)
        flags = [*built.extra_compile_args["cxx"], *folders, "-DTORCH_API_INCLUDE_EXTENSION_H", *further]
        link = [*built.extra_link_args, *library_folders(), *(f"-l{name[3:]}" for name in libraries)]
        return self.library(file, unit, flags, link)

    def module(self, headers: Torch, program: str) -> Path:
        """Add the module for a torch and a Python; return its file."""
        python_headers, suffix = output([program, "-c", WHERE]).split()
        further = [*included(Path(python_headers)), "-DTORCH_EXTENSION_NAME=_C"]
        file = f"_C.torch{headers.minor}{suffix}"
        return self._unit(file, self.module_extension, headers, further, LIBRARIES)


def included(*folders: Path) -> list[str]:
    return [f"-I{folder}" for folder in folders]


def library_folders() -> list[str]:
    """The folder in which the linker finds torch's libraries: those in use, of which it takes the names alone."""
    return [f"-L{Path(torch.__file__).parent / 'lib'}"]


def missing_symbols(library: Path, headers: Torch) -> list[str]:
    """Names that a library needs of torch and that its torch has not."""
    needed = output(["nm", "--dynamic", "--undefined-only", "--format=just-symbols", str(library)]).split()
    exported = set(headers.symbols.read_text().split())
    of_torch = re.compile(r"_ZN?K?(T[IVS]N?)?(2at|3c10|5torch)|THP|torch")
    return [name for name in needed if of_torch.match(name) and name not in exported]


def make_wheel(prebuilt: Path, folder: Path) -> Path:
    """The wheel of what was compiled, with the tag that auditwheel grants where it is installed."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        variables = {**os.environ, "TRANSFORMER_FAST_PREBUILT": str(prebuilt)}
        # In a folder of its own: build/lib may have files of older builds.
        build = ["setup.py", "-q", "build", "--build-base", f"{temporary}/build"]
        run([sys.executable, *build, "bdist_wheel", "--dist-dir", temporary], cwd=ROOT, env=variables)
        (wheel,) = Path(temporary).glob("*.whl")
        folder.mkdir(exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if importlib.util.find_spec("auditwheel") and shutil.which("patchelf", path=path):
            excluded = [f"--exclude={name}" for name in NOT_IN_THE_WHEEL]
            repair = [sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", temporary, str(wheel)]
            run(repair, env={**os.environ, "PATH": path})
            wheel.unlink()
            (wheel,) = Path(temporary).glob("*.whl")
        else:
            say("auditwheel or patchelf is not installed: the wheel is for Linux like this one")
        return Path(shutil.copy2(wheel, folder))


def in_a_clone(arguments: list[str]) -> None:
    """Run this tool in a clone of the last commit, whose compiled objects are kept between runs."""
    clone = ROOT / "build/release"
    if not clone.exists():
        run(["git", "clone", "--quiet", str(ROOT), str(clone)])
    run(["git", "fetch", "--quiet", "origin", "HEAD"], cwd=clone)
    run(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], cwd=clone)
    run(["git", "clean", "--quiet", "-xdff", "--exclude=build/wheel"], cwd=clone)
    run([sys.executable, "tools/wheel_all.py", *arguments], cwd=clone)


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(command: list[str], **options: Any) -> None:
    """Run a command; stop where it fails."""
    code = subprocess.run(command, **options).returncode
    if code != 0:
        sys.exit(f"wheel-all: failed ({code}): {shlex.join(command)}")


def say(text: str) -> None:
    print(f"wheel-all: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="minor versions of torch (default: %(default)s)")
    parser.add_argument("--python", nargs="+", help="versions of Python, such as 3.12 (default: all installed ones)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheel (default: dist)")
    parser.add_argument("--clone", action="store_true", help="of a clone of the last commit, in build/release")
    parser.add_argument("--compile-only", action="store_true", help="make no wheel; print the paths of the libraries")
    options = parser.parse_args()
    os.environ["TRANSFORMER_FAST_CUDA"] = "0"
    if options.clone:
        in_a_clone([argument for argument in sys.argv[1:] if argument != "--clone"])
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    programs = pythons()
    unknown = set(options.python or ()) - programs.keys()
    if unknown:
        sys.exit(f"wheel-all: no Python {', '.join(unknown)} here; there are {', '.join(programs)}")
    chosen = {version: program for version, program in programs.items() if version in (options.python or programs)}
    in_use = headers_in_use()
    all_headers = [
        in_use if in_use.minor == minor else headers_of(minor, next(iter(chosen))) for minor in options.torch
    ]
    plan = Plan(setup_names())
    plan.kernels(in_use)
    for_torch = {plan.ops(headers): headers for headers in all_headers}
    modules = {plan.module(headers, program): headers for headers in all_headers for program in chosen.values()}
    file = FOLDER / "build.ninja"
    file.write_text("\n".join([*plan.lines, ""]))
    run([sys.executable, "-m", "ninja", "-f", str(file), "-j", os.environ.get("MAX_JOBS", "1")])
    for library, headers in (for_torch | modules).items():
        if missing := missing_symbols(library, headers):
            sys.exit(f"wheel-all: {library.name} needs what torch {headers.version} has not: {', '.join(missing)}")
    prebuilt = FOLDER / "prebuilt"
    shutil.rmtree(prebuilt, ignore_errors=True)
    (prebuilt / "transformer_fast").mkdir(parents=True)
    for library in plan.made:
        shutil.copy2(library, prebuilt / "transformer_fast")
    if options.compile_only:
        say(f"{len(modules)} modules and the kernels are in {prebuilt}")
        return
    wheel = make_wheel(prebuilt, options.out)
    size = wheel.stat().st_size / 1e6
    say(f"{wheel}: {size:.1f} MB, {len(modules)} pairs of torch and Python")
    if size > MEGABYTES:
        sys.exit(f"wheel-all: it has more than {MEGABYTES} MB")


if __name__ == "__main__":
    main()
