"""Builds the C++/CUDA extension (everything else is in pyproject.toml): the library of the ops, libraries of CPU
kernels, and the Python module ``transformer_fast._C``.

Environment:
    TRANSFORMER_FAST_CUDA         auto (default): with CUDA where a CUDA build of torch, nvcc, its headers and libcudart
                                  are found; 0: never; 1: or fail.
    TRANSFORMER_FAST_CPU_SETS     instruction sets that get kernels: "host" (default), the baseline, which every machine
                                  runs, and the best that this machine runs; "baseline"; "all", for a wheel that other
                                  machines get (`make wheel`); names, "avx2,avx512"; or "none" (noxfile.py).
    TORCH_CUDA_ARCH_LIST          GPU architectures; default "8.0;9.0+PTX". No GPU is looked for.
    TRANSFORMER_FAST_CXX_FLAGS    further flags for the compiler and the linker, behind the ones below; the symbols are
                                  then kept. For tools/sanitize.py and for debuggers.
    TRANSFORMER_FAST_PREBUILT     folder with a package's compiled files (tools/wheel_all.py): the wheel gets them and
                                  is for every Python, and nothing is compiled.
    TRANSFORMER_FAST_URL          where the repository is published, https://host/owner/name: README's links then lead
                                  there from a package index, too, and the package names its pages.
    CXX                           the compiler; default c++, through ccache where that is installed.
    MAX_JOBS                      compilers at once.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    raise SystemExit(
        f"transformer_fast builds against the torch it will run with, and there is none here ({error}).\n"
        "Run `pip install torch`, then `pip install --no-build-isolation -e .` (or `make setup`, which does both)."
    ) from error
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
PREBUILT = os.environ.get("TRANSFORMER_FAST_PREBUILT", "")
MOST_JOBS = os.environ.get("MAX_JOBS", "")
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"
# Instruction set -> compiler flags, and what /proc/cpuinfo shows where it runs. csrc/instruction_set.cpp chooses among
# them by what the processor says itself.
X86_SETS = {
    "avx2": (["-march=x86-64-v3"], {"avx2", "fma", "bmi2"}),
    "avx512": (["-march=x86-64-v4"], {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
    "avx512_bf16": (["-march=x86-64-v4", "-mavx512bf16"], {"avx512f", "avx512bw", "avx512_bf16"}),
}
UNIT = re.compile(r"(\[\d+/\d+\]) .* -c \S*?/([^/\s]+/[^/\s]+) -o \S*/transformer_fast\.(\w+)/")
OTHER_SETS: dict[str, tuple[list[str], set[str]]] = {"generic": ([], set())}
# Slowest to compile first, so that no compiler runs alone at the end.
SLOW = ["attention/forward", "norm/backward", "norm/forward", "attention/weights", "embedding/forward", "dropout"]


def say(message: str) -> None:
    print(f"transformer_fast: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def one_line_per_unit() -> Iterator[None]:
    """Shorten what ninja writes to file descriptor 1, the command of each file that is done, to the file's name and
    number. What a compiler says stays whole."""
    shown, (read, write) = os.dup(1), os.pipe()

    def forward() -> None:
        with open(read, errors="replace") as lines, open(shown, "w", errors="replace") as out:
            for line in lines:
                unit = UNIT.match(line)
                out.write("transformer_fast: {2} {0} {1}\n".format(*unit.groups()) if unit else line)
                out.flush()

    reader = threading.Thread(target=forward)
    reader.start()
    sys.stdout.flush()
    os.dup2(write, 1)
    os.close(write)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(shown, 1)  # closes the pipe
        reader.join()


def want_cuda() -> bool:
    """Return True if the CUDA kernels are built; print the reason if not."""
    choice = os.environ.get("TRANSFORMER_FAST_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"TRANSFORMER_FAST_CUDA: expected auto, 0 or 1, got {choice!r}")
    obstacle = cuda_obstacle() if choice != "0" else "TRANSFORMER_FAST_CUDA=0"
    if choice == "1" and obstacle:
        raise SystemExit(f"TRANSFORMER_FAST_CUDA=1, but the CUDA kernels cannot be built here: {obstacle}")
    say(f"CPU kernels only ({obstacle})" if obstacle else f"CPU and CUDA kernels (CUDA {torch.version.cuda})")
    return not obstacle


def cuda_obstacle() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if cpp_extension.CUDA_HOME is None or not (nvcc := Path(cpp_extension.CUDA_HOME, "bin", "nvcc")).exists():
        return "there is no nvcc; put it on PATH or set CUDA_HOME"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = version.partition("release ")[2].partition(",")[0]
    if release.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"nvcc is {release}, but torch {torch.__version__} was built with CUDA {torch.version.cuda}"
    # CUDA_HOME may be a guess from nvcc's folder, and nvcc a script there that calls the one of a toolkit elsewhere.
    folders = [*cpp_extension.include_paths("cuda"), Path(cpp_extension.CUDA_HOME, "include")]
    found = any(Path(folder, "cuda_runtime.h").exists() for folder in folders)
    missing = [] if found else ["cuda_runtime.h"]
    if not can_link("libcudart.so", cpp_extension.library_paths("cuda")):
        missing.append("libcudart.so")
    return f"{nvcc} has no {' and no '.join(missing)}; set CUDA_HOME to the toolkit's folder" if missing else None


def can_link(library: str, folders: list[str]) -> bool:
    """Return True if a library is in one of the folders or in the compiler's default folders."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command = [*compiler, f"-print-file-name={library}"]  # its path, or the name alone
    own = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return own != library or any(Path(folder, library).exists() for folder in folders)


KERNELS, OPS = "transformer_fast.cpu_", "transformer_fast.ops_library"
WITH_PYTHON = ("csrc/python/", "csrc/triton/")
# Kernels that are compiled as one, because they share most of their templates: 18 seconds of a core instead of 29.
KERNEL_UNITS = {"attention_backward": ["csrc/cpu/attention/backward.cpp", "csrc/cpu/attention/grad_bias.cpp"]}


def known_sets() -> dict[str, tuple[list[str], set[str]]]:
    return X86_SETS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_SETS


def instruction_sets(choice: str) -> list[str]:
    """Instruction sets to build, from the value of TRANSFORMER_FAST_CPU_SETS."""
    known = known_sets()  # the baseline is the first
    if choice == "none":
        return []
    if choice == "host":
        present = cpu_flags()
        runs = [name for name, (_, needed) in known.items() if not present or needed <= present]
        names = {next(iter(known)), *(runs[-1:] if present else runs)}
    else:
        names = set({"all": known, "baseline": list(known)[:1]}.get(choice) or choice.split(","))
    if unknown := names - known.keys():
        expected = f"baseline, host, all, none, or names of {', '.join(known)}"
        raise SystemExit(f"TRANSFORMER_FAST_CPU_SETS: expected {expected}, got {', '.join(sorted(unknown))!r}")
    return [name for name in known if name in names]


def cpu_flags() -> set[str]:
    """Flags of this processor in /proc/cpuinfo; empty where there is no such file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def use_ccache(folder: Path) -> None:
    """Compile through ccache where it is installed and CXX names no compiler: by a link, since torch takes one word."""
    ccache = shutil.which("ccache")
    if ccache is None or os.environ.get("CXX"):
        return
    link = folder / "ccache/c++"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(ccache)
    os.environ["CXX"] = str(link)
    say(f"compiling through {ccache}")


def compiler_name(compiler: list[str]) -> str:
    """Name and version of the compiler, from the compiler itself."""
    command = [*compiler, "-dM", "-E", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    macros = dict(line.split(maxsplit=2)[1:] for line in output.splitlines() if len(line.split(maxsplit=2)) == 3)
    return f"{Path(compiler[0]).name} {macros.get('__VERSION__', 'unknown').strip(chr(34))}"


class Build(cpp_extension.BuildExtension):
    """Builds the module for this Python and torch, the ops for this torch, and the kernels of each instruction set."""

    def get_ext_filename(self, name: str) -> str:
        """The file of an extension. setuptools asks for the whole name, distutils for its last part."""
        package, _, last = name.rpartition(".")
        minor = ".".join(torch.__version__.split(".")[:2])
        if last.startswith(("cpu_", "ops_")):
            return os.path.join(package, kernels_file(last) if last.startswith("cpu_") else ops_file(minor))
        return super().get_ext_filename(name).replace("_C.", f"_C.torch{minor}.")

    def finalize_options(self) -> None:
        super().finalize_options()
        editable = getattr(self, "editable_mode", False)  # setuptools clears inplace in run()
        in_place = bool(self.inplace or editable)
        if editable:  # reuse the objects of `build_ext --inplace` instead of compiling in a temporary folder
            self.build_temp = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        chosen = instruction_sets(os.environ.get("TRANSFORMER_FAST_CPU_SETS", "host"))
        left_out = {kernels_name(name) for name in known_sets() if name not in chosen}
        self.unwanted = [Path(ROOT, self.get_ext_filename(name)) for name in left_out] if in_place else []
        self.extensions = [extension for extension in self.extensions if extension.name not in left_out]
        if not MOST_JOBS:
            self.parallel = len(self.extensions)
            os.environ["MAX_JOBS"] = str(math.ceil(((os.cpu_count() or 1) + 2) / self.parallel))

    def build_extensions(self) -> None:
        if PREBUILT:
            say(f"compiling nothing: {PREBUILT} has the libraries")
            shutil.copytree(PREBUILT, self.build_lib, dirs_exist_ok=True)
            return
        use_ccache(Path(self.build_temp).resolve())
        with_cuda = any(source.endswith(".cu") for extension in self.extensions for source in extension.sources)
        folder = Path(self.build_temp).resolve()
        write_records(folder, torch.__version__, with_cuda)
        for extension in self.extensions:
            extension.sources = in_units(folder / "units", extension.sources)
            extension.include_dirs.append(str(folder))
        with one_line_per_unit():
            super().build_extensions()
        self.remove_older(self.unwanted)

    def remove_older(self, libraries: list[Path]) -> None:
        """Remove libraries that are older than a source, because they belong to another build and would be loaded."""
        newest = max(file.stat().st_mtime for file in (ROOT / "csrc").rglob("*") if file.is_file())
        for library in libraries:
            if library.exists() and library.stat().st_mtime < newest:
                say(f"removing {library.name}: older than its sources, and not among those to build")
                library.unlink()

    def build_extension(self, extension: cpp_extension.Extension) -> None:
        """Build an extension, in a thread beside the others and a folder of its own, because objects of different
        instruction sets have equal names. setuptools sorts the sources, so their order is restored."""
        say(f"compiling {extension.name} ({len(extension.sources)} files)")
        own, compile_files = copy.copy(self), self.compiler.compile
        own.build_temp = str(Path(self.build_temp, extension.name))
        own.compiler = copy.copy(self.compiler)
        own.compiler.compile = lambda sources, *arguments, **options: compile_files(
            sorted(sources, key=extension.sources.index), *arguments, **options
        )
        super(Build, own).build_extension(extension)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Wheel tag: py3-none for a prebuilt wheel that serves every Python, else this interpreter's."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILT else (python, abi, platform)


def in_units(folder: Path, files: list[str]) -> list[str]:
    """Write files that include several of an extension's sources, and put them in their place, first. All files of the
    ops are one, and all of the module, because a compiler mostly reads PyTorch's headers there."""
    whole = {"ops" if "csrc/ops/library.cpp" in files else "module": [file for file in files if file.endswith(".cpp")]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, together in (KERNEL_UNITS if "csrc/cpu/kernels.cpp" in files else whole).items():
        unit = folder / f"{name}.cpp"
        write_changed(unit, "".join(f'#include "{ROOT / file}"\n' for file in sorted(together)))
        files = [str(unit.resolve()), *(file for file in files if file not in together)]
    return files


def write_records(folder: Path, torch_version: str, with_cuda: bool = False) -> None:
    """Write the headers that say what the module and the libraries are built for, and what they are compiled of."""
    information = {
        "torch": torch_version,
        "cuda": torch.version.cuda if with_cuda else None,
        "arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if with_cuda else None,
        "compiler": compiler_name(shlex.split(os.environ.get("CXX", "")) or ["c++"]),
        "sources": digest((ROOT / "csrc").rglob("*.*")),
    }
    write_define(folder / "build_config.h", "TRANSFORMER_FAST_BUILD", json.dumps(information))
    write_define(folder / "kernels_config.h", "TRANSFORMER_FAST_KERNELS", kernels_digest())


def write_define(header: Path, name: str, text: str) -> None:
    header.parent.mkdir(parents=True, exist_ok=True)
    write_changed(header, f'#pragma once\n#define {name} R"text({text})text"\n')


def kernels_digest() -> str:
    return digest([*(ROOT / "csrc/cpu").rglob("*.*"), *(ROOT / "csrc").glob("*.h")])


def digest(files: Iterable[Path]) -> str:
    """A digest of what libraries are compiled of. Those with the same one fit together."""
    texts = sorted((file.relative_to(ROOT).as_posix(), file.read_text()) for file in files)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def write_changed(file: Path, text: str) -> None:
    """Write a file only if its content changed, so that ninja does not rebuild."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def sources(folder: str) -> list[str]:
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / "csrc" / folder).rglob("*.cpp"))
    place = {f"csrc/cpu/{stem}.cpp": number for number, stem in enumerate(SLOW)}
    return sorted(files, key=lambda file: (place.get(file, len(place)), file))


# With -O2 attention takes 2.0 to 2.6 times as long, norms and dropout 1.3 to 1.5 times (GCC 12).
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-Wall", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS.append("-Wno-maybe-uninitialized")  # GCC 12 warns inside its own headers (bug 105593) and PyTorch's
NVCC_FLAGS = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-Xcompiler=-fvisibility=hidden"]
LINK_FLAGS: list[str] = []
OPENMP_OF_TORCH: list[str] = []
if sys.platform == "linux":
    # Compiled, but deliberately not linked with OpenMP: the symbols then come from the runtime libtorch_cpu itself
    # loads, so torch.set_num_threads governs these kernels too and there is never a second thread pool.
    CXX_FLAGS.append("-fopenmp")
    LINK_FLAGS += ["-Wl,--as-needed", "-s"]
    OPENMP_OF_TORCH = ["-Wl,--no-as-needed", "-ltorch_cpu"]
if further := shlex.split(os.environ.get("TRANSFORMER_FAST_CXX_FLAGS", "")):
    CXX_FLAGS += further
    LINK_FLAGS = [flag for flag in LINK_FLAGS if flag != "-s"] + further


def kernels_name(instruction_set: str) -> str:
    return f"{KERNELS}{instruction_set}"


def kernels_file(name: str) -> str:
    """The file of a library of kernels, by the last part of its extension's name."""
    return f"libtransformer_fast_{name}.so"


def kernels_extension(name: str, flags: list[str]) -> Extension:
    """Extension with the kernels of one instruction set: a library that the ops load. The kernels need torch's headers
    for 16-bit numbers, and the name of libtorch_cpu to find torch's OpenMP runtime."""
    # csrc/cpu/simd/vec.h says where a product and a sum round once. GCC takes the files of a unit for headers.
    flags = [*flags, "-ffp-contract=off", "-Wno-subobject-linkage"]
    built = on_torch(cpp_extension.CppExtension, kernels_name(name), sources("cpu"), flags, OPENMP_OF_TORCH)
    built.libraries.clear()
    return built


def ops_file(minor: str) -> str:
    return f"libtransformer_fast_ops.torch{minor}.so"


def ops_extension() -> Extension:
    """Extension with the ops: checks, autograd and kernel calls, compiled for any processor, and the CUDA kernels: a
    library that torch loads, and that needs no Python."""
    with_cuda = want_cuda()
    files = [file for file in sources("") if not file.startswith(("csrc/cpu/", *WITH_PYTHON))]
    if with_cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
        files += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.cu"))
    built = on_torch(cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension, OPS, files)
    built.libraries.remove("torch_python")
    return built


def module_extension() -> Extension:
    """Extension with the Python module: the eager doors of the ops, and the launches of Triton kernels."""
    files = [file for file in sources("") if file.startswith(WITH_PYTHON)]
    return on_torch(cpp_extension.CppExtension, "transformer_fast._C", files)


def on_torch(
    kind: Callable[..., Extension], name: str, files: list[str], flags: Sequence[str] = (), link: Sequence[str] = ()
) -> Extension:
    compiler = {"cxx": [*CXX_FLAGS, *flags], "nvcc": NVCC_FLAGS}
    folders, link = [str(ROOT / "csrc")], [*LINK_FLAGS, *link]
    return kind(name, files, include_dirs=folders, extra_compile_args=compiler, extra_link_args=link)


def description(url: str) -> dict[str, object]:
    """Package description (README) and project URLs. Relative links become absolute, because they fail on a package
    index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {"long_description": text, "long_description_content_type": "text/markdown"}
    if not url:
        return shown
    if not re.fullmatch(r"https://[^/\s]+/[^/\s]+/[^/\s]+", url):
        raise SystemExit(f"TRANSFORMER_FAST_URL: expected https://host/owner/name, got {url!r}")
    within = r"\]\((?!https?:|#)"
    text = re.sub(rf"(!\[[^\]]*){within}", rf"\1]({url}/raw/HEAD/", text)
    shown["long_description"] = re.sub(within, f"]({url}/blob/HEAD/", text)
    pages = {"Documentation": "blob/HEAD/docs", "Changelog": "blob/HEAD/CHANGELOG.md", "Issues": "issues"}
    return {**shown, "project_urls": {"Homepage": url, **{name: f"{url}/{page}" for name, page in pages.items()}}}


KERNEL_EXTENSIONS = [kernels_extension(name, flags) for name, (flags, _) in known_sets().items()]
setup(
    **description(os.environ.get("TRANSFORMER_FAST_URL", "").rstrip("/")),
    ext_modules=[*KERNEL_EXTENSIONS, ops_extension(), module_extension()],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    verbose=0,  # no line for each file that is copied; with -v they are printed
)
