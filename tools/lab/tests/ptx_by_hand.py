"""Small kernels in PTX written by hand, for the tests of tools/lab/ptx_emulator."""

from __future__ import annotations

import torch
from lab.ptx_emulator import Argument, Report, launch

HEADER = ".version 8.0\n.target sm_80\n.address_size 64\n"


def entry(body: str, parameters: int = 3, shared: str = "", name: str = "test") -> str:
    """A kernel whose pointers are in %rd0, %rd1, ...; %r0 is the thread, %rd9 four times the thread."""
    named = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    loads = "\n".join(f"ld.param.u64 %rd{n}, [p{n}];" for n in range(parameters))
    return f"""{shared}
    .visible .entry {name}({named}) {{
        .reg .pred %p<10>; .reg .b16 %h<20>; .reg .b32 %r<60>; .reg .b64 %rd<30>;
        {loads}
        mov.u32 %r0, %tid.x;
        mul.wide.u32 %rd9, %r0, 4;
        {body}
        ret;
    }}"""


def execute(body: str, *tensors: torch.Tensor, threads: int = 32, shared: int = 0, grid: int = 1, **options) -> Report:
    """Launches an entry on tensors; `declarations` come before it, other options are those of `launch`."""
    declarations = options.pop("declarations", "")
    ptx = HEADER + entry(body, len(tensors), declarations)
    arguments = [Argument(f"tensor {n}", "*u8", tensor) for n, tensor in enumerate(tensors)]
    return launch(ptx, (grid, 1, 1), threads, shared, arguments, **options)
