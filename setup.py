"""Builds the C++/CUDA extension ``transformer_fast._C`` (everything else is in pyproject.toml).

Environment:
    TRANSFORMER_FAST_CUDA         auto (default): with CUDA where nvcc and a CUDA build of torch are found; 0: never;
                                  1: or fail.
    TRANSFORMER_FAST_NATIVE_ARCH  1: CPU kernels for this machine's vector unit (default of an in-place or editable
                                  build); 0: for any x86-64 with AVX2 and FMA (default of a wheel).
    TORCH_CUDA_ARCH_LIST          GPU architectures; default "8.0;9.0+PTX". No GPU is looked for.
    MAX_JOBS                      compilers at once.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

try:
    import torch
    from torch.utils import cpp_extension
except ModuleNotFoundError as error:
    raise SystemExit(
        f"transformer_fast builds against the torch it will run with, and there is none here ({error}).\n"
        "Run `pip install torch`, then `pip install --no-build-isolation -e .` (or `make setup`, which does both)."
    ) from error
from setuptools import setup

ROOT = Path(__file__).resolve().parent
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"
# Compiler macro -> the flag /proc/cpuinfo shows. What a build used of these, the machine that imports it must have.
CPU_FEATURES = {
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VBMI2__": "avx512_vbmi2",
}


def say(message: str) -> None:
    print(f"transformer_fast: {message}", file=sys.stderr, flush=True)


def want_cuda() -> bool:
    """Whether to build the CUDA kernels; says in one line why not."""
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
    return None


def cpu_flags(native: bool) -> list[str]:
    machine = platform.machine().lower()
    if native:
        return ["-march=native"] if machine in ("x86_64", "amd64") else ["-mcpu=native"]
    return ["-mavx2", "-mfma", "-mf16c"] if machine in ("x86_64", "amd64") else []


def compiler_facts(compiler: list[str], flags: list[str]) -> dict[str, object]:
    """Name, version and vector unit of the compiler under the flags, from the compiler itself."""
    output = subprocess.run(
        [*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stdout
    macros = dict(line.split(maxsplit=2)[1:] for line in output.splitlines() if len(line.split(maxsplit=2)) == 3)
    features = [flag for macro, flag in CPU_FEATURES.items() if macro in macros]
    vector = "avx512" if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(features) else "baseline"
    if vector == "baseline" and {"avx2", "fma"} <= set(features):
        vector = "avx2"
    return {
        "compiler": f"{compiler[0]} {macros.get('__VERSION__', 'unknown').strip(chr(34))}",
        "vector": vector,
        "cpu_features": features,
    }


class Build(cpp_extension.BuildExtension):
    """Adds the machine's vector flags and writes build_config.h, which ``transformer_fast._C.build_info()`` returns."""

    def finalize_options(self) -> None:
        super().finalize_options()
        editable = getattr(self, "editable_mode", False)  # setuptools clears inplace in run()
        in_place = bool(self.inplace or editable)
        if editable:  # where `build_ext --inplace` builds; in setuptools' temporary folder all would be compiled again
            self.build_temp = os.path.join("build", f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        self.native = os.environ.get("TRANSFORMER_FAST_NATIVE_ARCH", "1" if in_place else "0") == "1"

    def build_extensions(self) -> None:
        native = self.native
        flags = cpu_flags(native)
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        facts = compiler_facts(compiler, flags)
        # Which of ATen's vector classes <ATen/cpu/vec/vec.h> gives; the same macro torch's own build sets.
        if facts["vector"] != "baseline":
            flags.append(f"-DCPU_CAPABILITY_{str(facts['vector']).upper()}")
        (extension,) = self.extensions
        with_cuda = any(source.endswith(".cu") for source in extension.sources)
        information = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda if with_cuda else None,
            "arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if with_cuda else None,
            "native_arch": native,
            **facts,
        }
        extension.include_dirs.append(str(write_build_config(Path(self.build_temp), information)))
        extension.extra_compile_args["cxx"] += flags
        super().build_extensions()


def write_build_config(folder: Path, information: dict[str, object]) -> Path:
    header = folder.resolve() / "build_config.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    text = f'#pragma once\n#define TRANSFORMER_FAST_BUILD R"json({json.dumps(information)})json"\n'
    if not header.exists() or header.read_text() != text:  # an unchanged header must not look newer to ninja
        header.write_text(text)
    return header.parent


def extension() -> cpp_extension.Extension:
    with_cuda = want_cuda()
    sources = ["csrc/bindings.cpp", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*/*.cpp")))]
    cxx = ["-O3", "-Wall", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-g0"]
    cxx.append("-Wno-maybe-uninitialized")  # GCC 12 raises it inside its own AVX-512 headers (GCC bug 105593)
    link = []
    if sys.platform == "linux":
        # Compiled, but deliberately not linked with OpenMP: the symbols then come from the runtime libtorch_cpu itself
        # loads, so torch.set_num_threads governs these kernels too and there is never a second thread pool.
        cxx.append("-fopenmp")
        link += ["-Wl,--as-needed", "-s"]
    nvcc = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-Wall", "-Xcompiler=-fvisibility=hidden"]
    if with_cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
        sources += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.cu"))
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        "transformer_fast._C",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=link,
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
