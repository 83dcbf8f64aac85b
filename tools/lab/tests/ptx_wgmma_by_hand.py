"""A product by wgmma in PTX written by hand, for the tests of tools/lab/ptx_emulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from lab.ptx_emulator import Argument, Report, launch
from lab.ptx_emulator.wgmma_layout import (
    accumulator_from_registers,
    decode_descriptors,
    first_factor_positions,
    operand_addresses,
)

PATTERN = {0: 16, 1: 128, 2: 64, 3: 32}
A_AT, B_AT, IMAGE = 0, 8192, 32768
"""Addresses of the factors in shared memory, and its size."""


@dataclass(frozen=True)
class Product:
    """One wgmma of 128 threads: a 64 by K factor, an N by K factor, both in an image of shared memory."""

    columns: int = 16
    type: str = "bf16"
    mode_a: int = 1
    mode_b: int = 1
    transposed_a: bool = False
    transposed_b: bool = False
    in_registers: bool = False
    scale: int = 1
    scale_a: int = 1

    @property
    def element(self) -> int:
        return 4 if self.type == "tf32" else 2

    @property
    def depth(self) -> int:
        return 32 // self.element

    def descriptor(self, at: int, mode: int) -> int:
        leading = 16 * PATTERN[mode] if mode else 4096
        return at >> 4 | (leading >> 4) << 16 | (8 * PATTERN[mode] >> 4) << 32 | mode << 62

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.descriptor(A_AT, self.mode_a), self.descriptor(B_AT, self.mode_b)

    def ptx(self) -> str:
        """The kernel: copies the image, fences, multiplies, waits and stores its accumulator."""
        n = self.columns // 2
        accumulators = [f"%f{i}" for i in range(n)]
        first = "{%a0, %a1, %a2, %a3}" if self.in_registers else "%rd4"
        transposes = (
            []
            if self.type == "tf32"
            else [self.transposed_b]
            if self.in_registers
            else [self.transposed_a, self.transposed_b]
        )
        immediates = ", ".join(str(int(value)) for value in (self.scale_a, 1, *transposes))
        opcode = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.depth}.f32.{self.type}.{self.type}"
        copies = "".join(
            f"    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd6+{at}];\n"
            f"    st.shared.v4.b32 [%r2+{at}], {{%r10, %r11, %r12, %r13}};\n"
            for at in range(0, IMAGE, 2048)
        )
        starts = "".join(f"    mov.b32 {register}, 0f3F000000;\n" for register in accumulators)
        stores = "".join(f"    st.global.b32 [%rd8+{4 * i}], {register};\n" for i, register in enumerate(accumulators))
        return f"""
.version 8.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 image[];
.visible .entry multiply(
    .param .u64 multiply_0, .param .u64 multiply_1, .param .u64 multiply_2,
    .param .u64 multiply_3, .param .u64 multiply_4, .param .u32 multiply_5
)
.reqntid 128
{{
    .reg .pred %p<4>;
    .reg .b32 %r<20>;
    .reg .b32 %a<4>;
    .reg .b32 %f<{max(n, 4)}>;
    .reg .b64 %rd<20>;
    ld.param.b64 %rd1, [multiply_0];
    ld.param.b64 %rd2, [multiply_1];
    ld.param.b64 %rd3, [multiply_2];
    ld.param.b64 %rd4, [multiply_3];
    ld.param.b64 %rd5, [multiply_4];
    ld.param.b32 %r3, [multiply_5];
    setp.ne.b32 %p1, %r3, 0;
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 4;
    mul.wide.u32 %rd6, %r1, 16;
    add.s64 %rd7, %rd3, %rd6;
    add.s64 %rd6, %rd1, %rd6;
    mov.u32 %r5, %ctaid.x;
    mad.lo.s32 %r5, %r5, 128, %r1;
    mul.wide.u32 %rd8, %r5, {4 * n};
    add.s64 %rd8, %rd2, %rd8;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%rd7];
{copies}{starts}
    // before the fence
    fence.proxy.async.shared::cta;
    bar.sync 0;
    // before the product
    wgmma.fence.sync.aligned;
    {opcode} {{{", ".join(accumulators)}}}, {first}, %rd5, %p1, {immediates};
    wgmma.commit_group.sync.aligned;
    // in flight
    wgmma.wait_group.sync.aligned 0;
    // complete
{stores}
    ret;
}}
"""

    def run(
        self, ptx: str | None = None, descriptors: tuple[int, int] | None = None, order: str = "lockstep"
    ) -> tuple[Report, float]:
        """The report, and the largest error of the product relative to its largest element."""
        rng = np.random.default_rng(self.columns)
        a, b = (rng.standard_normal((rows, self.depth)).astype(np.float32) for rows in (64, self.columns))
        a, b = (
            torch.from_numpy(x).to({"bf16": torch.bfloat16, "f16": torch.float16}.get(self.type, torch.float32))
            for x in (a, b)
        )
        if self.type == "tf32":
            a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
        bits_a, bits_b = (x.view(torch.int16 if self.element == 2 else torch.int32).numpy() for x in (a, b))
        image = np.full(IMAGE // self.element, -1, bits_a.dtype)
        for bits, at, mode, transposed in (
            (bits_a, A_AT, self.mode_a, self.transposed_a),
            (bits_b, B_AT, self.mode_b, self.transposed_b),
        ):
            fields = decode_descriptors(np.array([self.descriptor(at, mode)], np.uint64))
            image[operand_addresses(fields, len(bits), self.depth, self.element, transposed)[0] // self.element] = bits
        row, column = first_factor_positions(self.element)
        fragments = bits_a.reshape(4, 16, self.depth)[:, row, column].reshape(128, -1)
        out = torch.full((2, 128, self.columns // 2), float("nan"))
        given = descriptors or self.descriptors
        arguments = [
            Argument("image", "*i8", torch.from_numpy(image)),
            Argument("out", "*fp32", out),
            Argument("fragments", "*i8", torch.from_numpy(np.ascontiguousarray(fragments))),
            *(Argument(name, "u64", value) for name, value in zip(("a", "b"), given)),
            Argument("scale", "i32", self.scale),
        ]
        report = launch(ptx or self.ptx(), (2, 1, 1), 128, IMAGE, arguments, order=order)
        result = accumulator_from_registers(out.numpy().view(np.uint32).reshape(8, 32, -1)).reshape(2, 64, -1)
        expected = self.scale_a * (a.double() @ b.double().T).numpy() + (0.5 if self.scale else 0.0)
        return report, float(np.abs(result - expected).max() / np.abs(expected).max())
