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

CASES = list(cases())


def spill_limit(name: str) -> int:
    """Bytes a thread may spill: none, but in attention of fp32 or of heads above 128, and in the backward of norms of
    more than 8192 columns, whose fp32 sums of the weight gradients fill half of the registers."""
    head = re.search(r"attention \S+ (\S+) d(\d+)", name)
    if head is not None and (head[1] == "float32" or int(head[2]) > 128):
        return 2048
    return 256 if re.search(r"norm backward .* slices of [34] blocks$", name) else 0


@pytest.mark.parametrize(("arch", "launch"), CASES, ids=[f"sm_{arch} {launch.name}" for arch, launch in CASES])
def test_compiles_within_the_machine(arch, launch, record_property):
    compiled = compile_launch(launch, arch)
    record_property("compiled", json.dumps(asdict(compiled)))
    assert compiled.shared <= SHARED_LIMIT[arch], f"{compiled.shared} bytes of shared memory"
    assert compiled.spill_bytes <= spill_limit(compiled.name), f"{compiled.spill_bytes} spilled"
    if arch == 90 and compiled.rows_of_16_bit_dot >= 64:
        assert compiled.wgmma > 0, "a 16-bit matrix product that does not use the tensor core's wgmma"
    elif arch == 90 and compiled.rows_of_16_bit_dot > 0:
        assert "decode" in compiled.name, "only decoding has too few rows for a wgmma"
        assert compiled.mma_sync > 0, "a 16-bit matrix product that does not use the tensor core"


def test_names_tell_the_cases_apart():
    names = [(arch, launch.name) for arch, launch in CASES]
    assert len(names) == len(set(names))
