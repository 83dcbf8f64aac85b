"""Ahead-of-time compilation of Triton kernels, for GPUs that are not here.

Every kernel module lists in ``compile_cases(arch)`` the launches its configs can cause. Each is compiled as a launch
would compile it - the same specialisation, asked of Triton's own binder - and the cubin's resources are read back.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory a program may use, in bytes, by compute capability (CUDA programming guide, table of limits)."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel x config x architecture needs of a GPU."""

    name: str
    arch: int
    registers: int
    spill_bytes: int
    shared: int
    warps: int
    wgmma: int
    dots: int
    seconds: float


def compile_case(name: str, kernel, arguments: dict[str, object], options: dict[str, int], arch: int) -> Compiled:
    """Compile one launch of `kernel` for compute capability `arch` and read its resources."""
    started = time.perf_counter()
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    launch = options | {"debug": False}
    bound, specialization, _ = bind(**arguments, **launch)
    parsed, signature, constexprs, attributes = kernel._pack_args(
        backend, arguments | launch, bound, specialization, None
    )
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=target, options=parsed.__dict__)
    usage = resource_usage(compiled.asm["cubin"])
    return Compiled(
        name=name,
        arch=arch,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared=compiled.metadata.shared,
        warps=parsed.num_warps,
        wgmma=compiled.asm["ptx"].count("wgmma.mma_async"),
        dots=compiled.asm["ttir"].count("tt.dot "),
        seconds=time.perf_counter() - started,
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, SHARED of the one kernel in a cubin, by the cuobjdump that Triton ships."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text.stdout)}
