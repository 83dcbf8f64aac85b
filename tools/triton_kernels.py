"""Ahead-of-time compilation of Triton kernels, without a GPU.

tools/triton_cases.py lists the launches that the configs of each kernel module can cause. Each is compiled as a launch
would compile it - the same specialisation, asked of Triton's own binder - and the cubin's resources are read back.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.hot_loops import NoHotLoopError, is_serialised, spills
from tools.sass import cuobjdump, disassemble

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

    `hot_spills`: instructions of its hot loop that read or write what was spilled; None where nothing was, or where no
    loop has products of tensor cores. `serialised`: see :func:`.hot_loops.is_serialised`.
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
    hot_spills: int | None = None
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
    hot_spills, serialised = in_hot_loop(compiled.asm["cubin"]) if spilled or wgmma else (None, False)
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
        hot_spills=hot_spills if spilled else None,
        serialised=serialised,
    )


def in_hot_loop(cubin: bytes) -> tuple[int | None, bool]:
    """(accesses to local memory, whether products wait for one another) in the loop of a kernel that has the most
    products; (None, False) if it has no such loop."""
    code = disassemble(cubin)
    try:
        return spills(code).hot, is_serialised(code)
    except NoHotLoopError:
        return None, False


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of the one kernel in a cubin."""
    text = cuobjdump("--dump-resource-usage", cubin)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


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
