"""Ahead-of-time compilation of Triton kernels, without a GPU.

tools/triton_cases.py lists the launches that the configs of each kernel module can cause. Each is compiled as a launch
would compile it - the same specialisation, asked of Triton's own binder - and the cubin's resources are read back.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory a program may use, in bytes, by compute capability (CUDA programming guide, table of limits)."""


def jit_functions() -> Iterator[object]:
    """Yield the kernels and helpers of transformer_fast.triton: by module, then by name."""
    from triton.runtime.jit import JITFunction

    import transformer_fast.triton as package

    for name in sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")):
        for _, value in sorted(vars(importlib.import_module(name)).items()):
            if isinstance(value, JITFunction) and value.__module__ == name:
                yield value


@dataclass(frozen=True)
class Compiled:
    """Resources on a GPU of one kernel x config x architecture.

    `hot_spills` and `serialised`: see :func:`in_loop_over_tiles`.
    """

    name: str
    kernel: str
    arch: int
    registers: int
    spill_bytes: int
    shared: int
    warps: int
    wgmma: int
    mma_sync: int
    rows_of_16_bit_dot: int
    seconds: float
    hot_spills: int = 0
    serialised: bool = False


def ast_source(launch, arch: int):
    """Return (source, target, options) as a launch of :class:`transformer_fast.triton.launcher.Launch` gives them to
    Triton's compiler, for compute capability `arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = launch.options() | {"debug": False}
    # The same steps as in JITFunction.run before it looks into its cache.
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    return ASTSource(kernel, signature, constants, attributes), target, parsed


def triton_compiled(launch, arch: int):
    """Triton's compiled kernel of a launch, for compute capability `arch`."""
    import triton

    source, target, options = ast_source(launch, arch)
    return triton.compile(source, target=target, options=options.__dict__)


def triton_ir(launch, arch: int):
    """Triton's first representation of a launch's kernel: what its front end makes, before any pass."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    source, target, options = ast_source(launch, arch)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )


def front_end_digest(ir) -> str:
    """A digest of :func:`triton_ir`: another one for another kernel, comments and line numbers aside."""
    return hashlib.sha256(ir.str_nodebug().encode()).hexdigest()[:12]


def compile_launch(launch, arch: int) -> Compiled:
    """Compile a launch for compute capability `arch`, and read what it needs."""
    started = time.perf_counter()
    compiled = triton_compiled(launch, arch)
    usage = resource_usage(compiled.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
    hot_spills, serialised = in_loop_over_tiles(compiled.asm["cubin"]) if spilled or wgmma else (0, False)
    return Compiled(
        name=launch.name,
        kernel=launch.kernel.__name__,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=spilled,
        shared=compiled.metadata.shared,
        warps=launch.num_warps,
        wgmma=wgmma,
        mma_sync=compiled.asm["ptx"].count("mma.sync"),
        # Rows of the first factor of the tallest product: 64 for a wgmma, 16 for an mma.sync, 0 without one.
        rows_of_16_bit_dot=max(
            map(int, re.findall(r"tt\.dot .*: tensor<(\d+)x\d+xb?f16>", compiled.asm["ttir"])), default=0
        ),
        seconds=time.perf_counter() - started,
        hot_spills=hot_spills,
        serialised=serialised,
    )


def in_loop_over_tiles(cubin: bytes) -> tuple[int, bool]:
    """Return (accesses to spilled values, whether each product of tensor cores waits for the one before) of a kernel.

    Accesses count in the loop over tiles: the shortest of the loops that have most of the products. ptxas makes
    products wait where it cannot prove that nothing else touches their sums.
    """
    text = cuobjdump("-sass", cubin)
    code = {int(at, 16): words for at, words in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)}
    products = {at: words for at, words in code.items() if re.search(r"\b\w*MMA\b", words)}
    waits = [("gsb0" in words) for words in products.values() if "HGMMA" in words]
    jumps = ((at, re.search(r"\bBRA\b.*0x([0-9a-f]+)", words)) for at, words in code.items())
    loops = [range(start, at) for at, jump in jumps if jump and (start := int(jump[1], 16)) < at]
    tiles = max(loops, key=lambda loop: (sum(at in loop for at in products), -len(loop)), default=range(0))
    if not any(at in tiles for at in products):
        tiles = range(0)
    hot = sum(at in tiles for at, words in code.items() if re.search(r"\b(LDL|STL)\b", words))
    return hot, bool(waits) and all(waits)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of the one kernel in a cubin."""
    text = cuobjdump("--dump-resource-usage", cubin)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def cuobjdump(option: str, cubin: bytes) -> str:
    """Output of the cuobjdump that Triton ships, for a compiled kernel."""
    from triton.backends.nvidia import compiler as nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# Parts of a mask that change a kernel alike on every architecture: compiled for one, unless all are asked for.
ON_ONE_ARCHITECTURE = re.compile(r" (documents|by distance|capped|sinks)\b|grad_distance_bias")


def cases(everywhere: bool = False) -> Iterable[tuple[int, object]]:
    """(compute capability, launch) of every config of every kernel on every architecture; of calls with the rarer parts
    of a mask on sm_90 alone, unless `everywhere`."""
    from tools.triton_cases import CASES
    from transformer_fast.triton.configs import ARCHITECTURES

    for name, capability in ARCHITECTURES.items():
        for launches in CASES.values():
            for launch in {launch.name: launch for launch in launches(name)}.values():
                if everywhere or capability == 90 or not ON_ONE_ARCHITECTURE.search(launch.name):
                    yield capability, launch
