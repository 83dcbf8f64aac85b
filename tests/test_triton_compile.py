"""Every config of every Triton kernel, compiled for three GPU architectures on a machine that may have none."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)

from triton_kernels import SHARED_LIMIT, cases, compile_launch

SPILL_LIMIT = 2048
"""Bytes a thread may spill where spilling is allowed at all: fp32, and head sizes above 128."""

CASES = list(cases())


def may_spill(name: str) -> bool:
    """16-bit attention up to d 128, and everything else, must not; fp32 and wider heads are bounded."""
    head = re.search(r"attention \S+ (\S+) d(\d+)", name)
    return head is not None and (head[1] == "float32" or int(head[2]) > 128)


@pytest.mark.parametrize(("arch", "launch"), CASES, ids=[f"sm_{arch} {launch.name}" for arch, launch in CASES])
def test_compiles_within_the_machine(arch, launch, record_property):
    compiled = compile_launch(launch, arch)
    record_property("compiled", json.dumps(asdict(compiled)))
    assert compiled.shared <= SHARED_LIMIT[arch], f"{compiled.shared} bytes of shared memory"
    assert compiled.spill_bytes <= (SPILL_LIMIT if may_spill(compiled.name) else 0), f"{compiled.spill_bytes} spilled"
    if arch == 90 and compiled.rows_of_16_bit_dot >= 64:
        assert compiled.wgmma > 0, "a 16-bit matrix product that does not use the tensor core's wgmma"
    elif arch == 90 and compiled.rows_of_16_bit_dot > 0:
        assert "decode" in compiled.name, "only decoding has too few rows for a wgmma"
        assert compiled.mma_sync > 0, "a 16-bit matrix product that does not use the tensor core"


def test_names_tell_the_cases_apart():
    names = [(arch, launch.name) for arch, launch in CASES]
    assert len(names) == len(set(names))
