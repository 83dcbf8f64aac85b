"""Every config of every Triton kernel compiles for three GPU architectures, without a GPU."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)

from tools.triton_kernels import SHARED_LIMIT, cases, compile_launch

CASES = list(cases())


def spill_limit(name: str) -> int:
    """Return the bytes that a thread may spill.

    The limit is 0 except in these kernels: attention of fp32 or of heads above 128; backward of norms of more than
    8192 columns, whose fp32 sums of the weight gradients fill half of the registers; two registers in that of 8192
    fp32 columns. Attention may also spill outside its hot loop, where fewer registers let another program run while
    the first one waits.
    """
    head = re.search(r"attention (\S+) (\S+) d(\d+)", name)
    if head is not None and (head[2] == "float32" or int(head[3]) > 128):
        return 2048
    if head is not None and head[1] in ("forward", "grad_q", "grad_kv", "grad_bias"):
        return 256
    if name.endswith("norm backward 1x8192 torch.float32"):
        return 8
    return 256 if re.search(r"norm backward .* slices of [34] blocks$", name) else 0


def rows() -> Iterator[Any]:
    """Return every case; the short list has each kernel once, for sm_90."""
    seen: set[str] = set()
    for arch, launch in CASES:
        kernel = launch.kernel.fn.__name__
        first = arch == 90 and kernel not in seen
        seen |= {kernel} if first else set()
        marks = () if first else pytest.mark.slow("a kernel is compiled for sm_90 once")
        yield pytest.param(arch, launch, marks=marks, id=f"sm_{arch} {launch.name}")


@pytest.mark.parametrize(("arch", "launch"), list(rows()))
def test_compiles_within_the_machine(arch, launch, record_property):
    compiled = compile_launch(launch, arch)
    record_property("compiled", json.dumps(asdict(compiled)))
    assert compiled.shared <= SHARED_LIMIT[arch], f"{compiled.shared} bytes of shared memory"
    assert compiled.spill_bytes <= spill_limit(compiled.name), f"{compiled.spill_bytes} spilled"
    if re.search(r"attention (forward|grad_q|grad_kv|grad_bias) b?float16 d(32|64|128)\b", compiled.name):
        assert not compiled.hot_spills, f"{compiled.hot_spills} accesses to spilled values in the hot loop"
    if arch == 90 and compiled.rows_of_16_bit_dot >= 64:
        assert compiled.wgmma > 0, "a 16-bit matrix product that does not use the tensor core's wgmma"
    elif arch == 90 and compiled.rows_of_16_bit_dot > 0:
        assert "decode" in compiled.name, "only decoding has too few rows for a wgmma"
        assert compiled.mma_sync > 0, "a 16-bit matrix product that does not use the tensor core"


def test_names_tell_the_cases_apart():
    names = [(arch, launch.name) for arch, launch in CASES]
    assert len(names) == len(set(names))
